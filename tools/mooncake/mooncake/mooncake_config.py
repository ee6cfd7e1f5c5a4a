"""Configuration of a Mooncake client, from a JSON file or from the environment."""

import json
import os
from dataclasses import dataclass
from typing import Any

from .store import size_of

SIZE = 16 << 20


@dataclass
class MooncakeConfig:
    """Arguments of `MooncakeDistributedStore.setup`."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str
    master_server_address: str

    @staticmethod
    def of(values: dict[str, Any]) -> "MooncakeConfig":
        if not values.get("master_server_address"):
            raise ValueError("the configuration of Mooncake needs master_server_address")
        return MooncakeConfig(
            values.get("local_hostname") or "localhost",
            values.get("metadata_server") or "P2PHANDSHAKE",
            size_of(values.get("global_segment_size", SIZE)),
            size_of(values.get("local_buffer_size", SIZE)),
            values.get("protocol") or "tcp",
            values.get("device_name") or "",
            values["master_server_address"],
        )

    @staticmethod
    def from_file(path: str) -> "MooncakeConfig":
        with open(path) as file:
            return MooncakeConfig.of(json.load(file))

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """Reads the file that `MOONCAKE_CONFIG_PATH` names. Without it, reads the variables."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        names = {
            "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
            "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
            "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
            "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
            "protocol": "MOONCAKE_PROTOCOL",
            "device_name": "MOONCAKE_DEVICE",
            "master_server_address": "MOONCAKE_MASTER",
        }
        return MooncakeConfig.of({key: os.environ[name] for key, name in names.items() if name in os.environ})
