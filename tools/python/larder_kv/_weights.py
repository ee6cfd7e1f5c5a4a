"""Versions of weights, as far as a process can tell them, and settings of engines as JSON."""

import dataclasses
import enum
import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from typing import Any, Optional

from ._numerics import ask

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", "config.json")

COMMIT_DIGITS = (40, 64)
"""Hexadecimal digits of a commit of Git, by SHA-1 and by SHA-256."""


def version_of_weights(path: str, revision: Optional[str], commit: Optional[str] = None) -> list[str]:
    """The files of a directory, or the commit of a repository. Raises if neither is known.

    Without `commit`, it is that of the copy of `revision` in the cache of Hugging Face.
    """
    if os.path.isdir(path):
        files = [[entry.name, *file_version(entry.path)] for entry in os.scandir(path) if is_weights(entry)]
        return ["files", hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()]
    if os.path.isfile(path):
        return ["file", *map(str, file_version(path))]
    for found in (commit, ask(lambda: cached_commit(path, revision)), revision):
        if is_digest(found):
            return ["commit", str(found)]
    raise ValueError(unknown(path, "its commit is not known"))


def cached_commit(repository: str, revision: Optional[str]) -> Optional[str]:
    """Commit of the copy of a repository that Hugging Face's library has stored last."""
    hub: Any = importlib.import_module("huggingface_hub")
    path = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    return os.path.basename(os.path.dirname(path)) if isinstance(path, str) else None


def unknown(name: str, reason: str) -> str:
    return f"{reason}, so Larder cannot tell {name} from other weights: set weights to a text that changes with them"


def is_weights(entry: Any) -> bool:
    return entry.name.endswith(WEIGHT_FILES) and entry.is_file()


def file_version(path: str) -> tuple[int, str]:
    """Size and version of a file: its digest in a cache of Hugging Face, else the time of its last change."""
    real = os.path.realpath(path)
    status = os.stat(real)
    directory, name = os.path.split(real)
    if os.path.basename(directory) == "blobs" and is_digest(name):
        return status.st_size, name
    return status.st_size, str(status.st_mtime_ns)


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) in COMMIT_DIGITS and set(value) <= set("0123456789abcdef")


def plain(value: Any) -> Any:
    """The same as JSON, equal in each process. A value of an unknown type is its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(value):
        # Its effect is in the model's configuration.
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)
