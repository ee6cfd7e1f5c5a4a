"""The part of LMCache 0.5.6 that the plug-ins see: types, and small stand-ins for its callers.

LMCache itself needs 6 GB of packages. The stand-ins make the calls of LMCache's `RemoteBackend` and of its MP
controllers in the same order, with the same arguments and reference counts. `tests/clients/lmcache` runs the real ones.
"""

import asyncio
import logging
import os
import select
import sys
import threading
import types
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

import numpy

CALL_SECONDS = 60.0


class Size(tuple):
    pass


class dtype:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.itemsize = name, size

    def __repr__(self) -> str:
        return f"torch.{self.name}"


bfloat16, float16, uint8 = dtype("bfloat16", 2), dtype("float16", 2), dtype("uint8", 1)


class Tensor:
    """A flat tensor of bytes in host memory."""

    def __init__(self, array: numpy.ndarray, device: str = "cpu") -> None:
        self.array, self.device = array, types.SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


class MemoryFormat(Enum):
    UNDEFINED = 0
    KV_2LTD = 1
    KV_T2D = 2
    BINARY_BUFFER = 5


@dataclass
class Meta:
    shape: Any
    dtype: Any
    fmt: MemoryFormat
    shapes: Any = None
    dtypes: Any = None


class MemoryObj:
    """An object of LMCache with a reference count. A free object must not be used, so its bytes change."""

    def __init__(self, raw_data: Any, meta: Meta) -> None:
        self.raw_data, self.meta, self.references = raw_data, meta, 1

    def get_size(self) -> int:
        return self.raw_data.numel() if isinstance(self.raw_data, Tensor) else len(self.raw_data)

    def content(self) -> bytes:
        return self.raw_data.array.tobytes() if isinstance(self.raw_data, Tensor) else bytes(self.raw_data)

    def ref_count_up(self) -> None:
        assert self.references > 0
        self.references += 1

    def ref_count_down(self) -> None:
        assert self.references > 0
        self.references -= 1
        if self.references == 0 and isinstance(self.raw_data, Tensor):
            self.raw_data.array[:] = 0xEE


class Backend:
    """LMCache's host memory: `allocate` as `LocalCPUBackend` has it, with at most `room` objects at a time."""

    def __init__(self, room: int = 1000) -> None:
        self.room, self.objects = room, []

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, eviction: bool = True, busy_loop: bool = True) -> Any:
        assert not busy_loop, "an allocation that waits may wait for ever"
        self.objects = [each for each in self.objects if each.references]
        if len(self.objects) >= self.room:
            return None
        if fmt == MemoryFormat.BINARY_BUFFER:
            each = MemoryObj(bytearray(shapes[0][0]), Meta(shapes[0], None, fmt))
        else:
            size = sum(int(numpy.prod(shape)) * each.itemsize for shape, each in zip(shapes, dtypes))
            each = MemoryObj(
                Tensor(numpy.zeros(size, numpy.uint8)), Meta(shapes[0], dtypes[0], fmt, list(shapes), list(dtypes))
            )
        self.objects.append(each)
        return each

    def live(self) -> int:
        return sum(each.references > 0 for each in self.objects)


@dataclass
class CacheEngineKey:
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: Any
    dtype: Any = bfloat16
    tags: Optional[tuple] = None

    @property
    def chunk_hash_hex(self) -> str:
        return self.chunk_hash.hex() if isinstance(self.chunk_hash, bytes) else f"{self.chunk_hash:x}"


@dataclass
class LayerCacheEngineKey(CacheEngineKey):
    layer_id: int = 0


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class ConnectorAdapter:
    def __init__(self, schema: str = "") -> None:
        self.schema = schema


class RemoteConnector:
    def __init__(self, config: Any, metadata: Any) -> None:
        assert metadata is not None


class L2StoreResult(int):
    def __new__(cls, success: bool, size: int) -> "L2StoreResult":
        return super().__new__(cls, size if success else -1)

    def is_successful(self) -> bool:
        return self >= 0


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, index: int) -> None:
        self.bits[index] = True


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.events: list[tuple] = []

    def _notify_keys_stored(self, keys: list, sizes: list) -> None:
        self.events.append(("stored", keys, sizes))

    def _notify_keys_accessed(self, keys: list) -> None:
        self.events.append(("accessed", keys))

    def _notify_keys_deleted(self, keys: list, sizes: list) -> None:
        self.events.append(("deleted", keys, sizes))


class Notifier:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fileno(self) -> int:
        return self.reader

    def notify(self) -> None:
        os.write(self.writer, b"1")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@dataclass
class Config:
    extra_config: dict = field(default_factory=dict)
    pre_caching_hash_algorithm: str = "sha256_cbor"
    remote_serde: str = "naive"
    use_layerwise: bool = False
    enable_blending: bool = False


@dataclass
class Metadata:
    model_name: str = "model"
    kv_dtype: Any = bfloat16
    kv_shape: tuple = (2, 2, 256, 4, 64)
    use_mla: bool = False
    chunk_size: int = 256


@dataclass
class Context:
    url: str
    local_cpu_backend: Any
    config: Any
    metadata: Any
    plugin_name: Optional[str] = None


class Remote:
    """LMCache's `RemoteBackend` with its instrumented connector: calls from another thread, on an event loop."""

    def __init__(
        self, adapter: Any, address: str, name: Optional[str] = None, *, room: int = 1000, **extra: Any
    ) -> None:
        self.backend = Backend(room)
        config = Config({f"remote_storage_plugin.{name or 'larder'}.{key}": each for key, each in extra.items()})
        assert adapter.can_parse(address)
        self.connector = adapter.create_connector(Context(address, self.backend, config, Metadata(), name))
        self.loop = asyncio.new_event_loop()
        # A daemon: a test that fails before `close` would keep the interpreter alive for ever.
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def start(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def contains(self, key: Any) -> bool:
        return self.start(self.connector.exists(key)).result(CALL_SECONDS)

    def put(self, keys: list, objects: list) -> None:
        async def instrumented() -> None:
            try:
                await self.connector.batched_put(keys, objects)
            finally:
                for each in objects:
                    each.ref_count_down()

        self.start(instrumented()).result(CALL_SECONDS)

    def get(self, key: Any) -> Any:
        return self.start(self.connector.get(key)).result(CALL_SECONDS)

    def batched_get(self, keys: list) -> list:
        return self.start(self.connector.batched_get(keys)).result(CALL_SECONDS)

    def close(self) -> None:
        self.start(self.connector.close()).result(CALL_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Controller:
    """The store and prefetch controllers of LMCache's MP server: they submit, wait for an event, and ask."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.descriptors = {
            "store": adapter.get_store_event_fd(),
            "lookup": adapter.get_lookup_and_lock_event_fd(),
            "load": adapter.get_load_event_fd(),
        }
        assert len(set(self.descriptors.values())) == 3

    def wait(self, kind: str) -> None:
        descriptor = self.descriptors[kind]
        assert select.select([descriptor], [], [], CALL_SECONDS)[0], "no event"
        os.read(descriptor, 1)

    def store(self, keys: list, objects: list) -> L2StoreResult:
        task = self.adapter.submit_store_task(keys, objects)
        self.wait("store")
        results = self.adapter.pop_completed_store_tasks()
        assert set(results) == {task}
        return results[task]

    def lookup(self, keys: list) -> list:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        self.wait("lookup")
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return found.bits

    def load(self, keys: list, objects: list) -> list:
        task = self.adapter.submit_load_task(keys, objects)
        self.wait("load")
        found = self.adapter.query_load_result(task)
        self.adapter.submit_unlock(keys)
        return found.bits


def install() -> None:
    """Provides the modules that the plug-ins import."""
    provided = {
        "torch": {"Size": Size, "dtype": dtype, "bfloat16": bfloat16, "float16": float16, "uint8": uint8},
        "lmcache": {"__version__": "0.5.6"},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.logging": {"init_logger": logging.getLogger},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.memory_management": {"MemoryFormat": MemoryFormat},
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
        "lmcache.v1.storage_backend": {},
        "lmcache.v1.storage_backend.connector": {"ConnectorAdapter": ConnectorAdapter},
        "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
    }
    for name, items in provided.items():
        module = types.ModuleType(name)
        module.__dict__.update(items)
        sys.modules[name] = module
