"""LMCache 0.5.6 on Larder: a remote storage plug-in, and an L2 adapter for LMCache's multiprocess (MP) mode.

The plug-in, in LMCache's configuration:

    pre_caching_hash_algorithm: sha256_cbor
    remote_storage_plugins: ["larder"]
    extra_config:
      remote_storage_plugin.larder.module_path: larder_kv.lmcache
      remote_storage_plugin.larder.class_name: LarderAdapter
      remote_storage_plugin.larder.url: larder://127.0.0.1:7700
      remote_storage_plugin.larder.weights: my-model, revision 3

The adapter, as an option of `lmcache server`:

    --l2-adapter '{"type": "plugin", "module_path": "larder_kv.lmcache", "class_name": "LarderL2Adapter",
      "adapter_params": {"url": "larder://127.0.0.1:7700", "weights": "my-model, revision 3"}}'

An object of LMCache is a value of `_values`: its layout and all its bytes are stored and lost together. Calls run on
threads of this module, and each ends by its timeout. A store that is away is a miss.
"""

import asyncio
import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Optional

import lmcache
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.platform import create_event_notifier
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from ._native import Lookup
from ._numerics import numerics
from ._values import Head, Memory, Values, Workers

logger = init_logger("lmcache.larder")

DEFAULTS: dict[str, Any] = {
    "weights": "",
    "numerics": "",
    "tenant": "default",
    "lookup_timeout": 0.5,
    "load_timeout": 5.0,
    "store_timeout": 5.0,
    "lease": 5.0,
}
TIMEOUT_MAX = 86400.0
LEASE_MAX = 60.0

THREADS = 4
WAITING_MAX = 256
"""Calls of one kind that wait or run. Others are misses, or are not stored."""

DIMENSIONS_MAX = 8
DTYPES = {"None": None, **{str(value): value for value in vars(torch).values() if type(value) is torch.dtype}}

HASH_BITS_SHORT = 64
"""Others can find prompts with equal hashes of this length, and would read or plant wrong pages."""

PLUGIN = "plugin://"
PREFIX = "remote_storage_plugin."


def read_options(source: dict[str, Any]) -> dict[str, Any]:
    """Options with their defaults. Raises for wrong ones, while LMCache starts."""
    if not isinstance(source.get("url"), str):
        raise ValueError("Larder needs a url, such as larder://127.0.0.1:7700")
    options = {name: type(default)(source.get(name, default)) for name, default in DEFAULTS.items()}
    for name in ("lookup_timeout", "load_timeout", "store_timeout"):
        if not 0 <= options[name] <= TIMEOUT_MAX:
            raise ValueError(f"{name} must be 0 to {TIMEOUT_MAX} seconds")
    if not 0 <= options["lease"] <= LEASE_MAX:
        raise ValueError(f"lease must be 0 to {LEASE_MAX} seconds")
    return dict(options, url=source["url"])


def hashed(*fields: Any) -> bytes:
    """Key of the store. JSON keeps the bounds of the fields."""
    return hashlib.sha256(json.dumps(fields).encode()).digest()


def remote_key(key: Any) -> bytes:
    """Key of a chunk, or of one layer of it, in the store."""
    tags = [[str(name), str(value)] for name, value in key.tags or ()]
    layer = getattr(key, "layer_id", None)
    return hashed(key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), tags, layer)


def object_key(key: Any) -> bytes:
    return hashed(key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash.hex(), key.cache_salt)


def layout_of(memory_obj: Any) -> list[Any]:
    """Shapes, types and format of an object, for JSON."""
    meta = memory_obj.meta
    shapes = [meta.shape] if meta.shapes is None else meta.shapes
    dtypes = [meta.dtype] if meta.dtypes is None else meta.dtypes
    return [[list(map(int, shape)) for shape in shapes], [str(dtype) for dtype in dtypes], int(meta.fmt.value)]


def parse_layout(layout: Any, length: int) -> Optional[tuple[list[Any], list[Any], Any]]:
    """The arguments of an allocation. None if they do not describe an object of so many bytes."""
    try:
        shapes, names, fmt = layout
        dtypes = [DTYPES[name] for name in names]
        if not shapes or len(shapes) != len(dtypes):
            return None
        for shape in shapes:
            if len(shape) > DIMENSIONS_MAX or any(type(size) is not int or size < 0 for size in shape):
                return None
        # Objects without a type are bytes, and their first dimension is their length.
        sizes = [math.prod(s) * d.itemsize if d is not None else s[0] for s, d in zip(shapes, dtypes)]
        if sum(sizes) != length:
            return None
        return [torch.Size(shape) for shape in shapes], dtypes, MemoryFormat(fmt)
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def memory_of(memory_obj: Any) -> Memory:
    return Memory(memory_obj.raw_data, memory_obj.get_size())


def release(objects: Sequence[Optional[Any]]) -> None:
    for each in objects:
        if each is not None:
            each.ref_count_down()


def free(future: Any) -> None:
    """Releases the objects of a read whose caller has gone."""
    if not future.cancelled() and future.exception() is None:
        release(future.result())


class Leases:
    """Lookups, each until its lease has ended. Several threads use it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.lock = threading.Lock()
        self.held: deque[tuple[float, Lookup]] = deque()

    def hold(self, lookups: Sequence[Lookup]) -> None:
        now = time.monotonic()
        with self.lock:
            while self.held and self.held[0][0] <= now:
                self.held.popleft()
            self.held.extend((now + self.seconds, lookup) for lookup in lookups)


class LarderAdapter(ConnectorAdapter):
    """Makes connectors for `larder://…`, and for the plug-ins `larder` and `larder.NAME`."""

    def __init__(self) -> None:
        super().__init__("larder://")

    def can_parse(self, url: str) -> bool:
        return url.startswith(self.schema) or url.removeprefix(PLUGIN).split(".")[0] == "larder"

    def create_connector(self, context: Any) -> RemoteConnector:
        name = context.plugin_name or (context.url[len(PLUGIN) :] if context.url.startswith(PLUGIN) else "larder")
        prefix = f"{PREFIX}{name}."
        extra = (context.config.extra_config if context.config else None) or {}
        options = {key[len(prefix) :]: value for key, value in extra.items() if key.startswith(prefix)}
        if context.url.startswith(self.schema):
            options["url"] = context.url
        return LarderConnector(options, context.local_cpu_backend, context.config, context.metadata)


class LarderConnector(RemoteConnector):
    """A remote store. LMCache calls it from its event loop and from its scheduler's thread."""

    def __init__(self, options: dict[str, Any], local_cpu_backend: Any, config: Any, metadata: Any) -> None:
        super().__init__(config, metadata)
        self.options = read_options(options)
        self.local_cpu_backend = local_cpu_backend
        identity = {
            "engine": f"lmcache/{getattr(lmcache, '__version__', '')}",
            "model": metadata.model_name,
            "weights": self.options["weights"],
            "numerics": numerics(self.options["numerics"], None),
            "dtype": str(metadata.kv_dtype),
            "shape": [int(size) for size in metadata.kv_shape],
            "latent": bool(metadata.use_mla),
            "chunk": metadata.chunk_size,
            "hash": config.pre_caching_hash_algorithm,
            "serde": config.remote_serde,
            "layerwise": bool(config.use_layerwise),
            "blending": bool(config.enable_blending),
        }
        self.values = Values(self.options["url"], identity, tenant=self.options["tenant"], name="lmcache")
        self.reads, self.writes = (Workers(f"larder-{kind}", THREADS, WAITING_MAX) for kind in ("read", "write"))
        self.leases = Leases(self.options["lease"])
        self.has_warned = False

    def deadline(self, timeout: str) -> float:
        return time.monotonic() + self.options[timeout]

    def keys(self, keys: Sequence[Any]) -> list[bytes]:
        """Keys in the store, up to the first whose hash is too short."""
        found = []
        for key in keys:
            chunk = key.chunk_hash
            if (len(chunk) * 8 if isinstance(chunk, bytes) else chunk.bit_length()) <= HASH_BITS_SHORT:
                if not self.has_warned:
                    logger.error("Larder stores nothing: set pre_caching_hash_algorithm to sha256_cbor")
                self.has_warned = True
                break
            found.append(remote_key(key))
        return found

    # Queries.

    def count(self, keys: Sequence[Any], deadline: float) -> int:
        """Consecutive chunks from the first that exist. They stay readable for the lease."""
        found, lookups = self.values.find(self.keys(keys), deadline, self.options["lease"])
        self.leases.hold(lookups)
        return (found + [False]).index(False)

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        return self.count(keys, self.deadline("lookup_timeout"))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        future = self.reads.submit(self.count, keys, self.deadline("lookup_timeout"))
        return 0 if future is None else await asyncio.wrap_future(future)

    # Reads.

    def read(self, keys: Sequence[Any], deadline: float) -> list[Optional[Any]]:
        """Objects of the chunks that exist, in new memory of LMCache."""
        names = self.keys(keys)
        heads = self.values.heads(names, deadline)
        objects = [self.allocate(head) for head in heads]
        read = [False] * len(names)
        try:
            targets = [None if each is None else memory_of(each) for each in objects]
            read = self.values.get(names, heads, targets, deadline)
        finally:
            for at, (each, is_read) in enumerate(zip(objects, read)):
                if each is not None and not is_read:
                    each.ref_count_down()
                    objects[at] = None
        return objects + [None] * (len(keys) - len(names))

    def allocate(self, head: Optional[Head]) -> Optional[Any]:
        layout = None if head is None else parse_layout(head.layout, head.length)
        if head is None or layout is None:
            return None
        # Waiting for memory could take for ever.
        memory_obj = self.local_cpu_backend.allocate(*layout, busy_loop=False)
        if memory_obj is not None and memory_obj.get_size() != head.length:
            memory_obj.ref_count_down()
            return None
        return memory_obj

    async def get(self, key: Any) -> Optional[Any]:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Optional[Any]]:
        future = self.reads.submit(self.read, keys, self.deadline("load_timeout"))
        if future is None:
            return [None] * len(keys)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The thread still writes to the memory, and then nobody takes it.
            future.add_done_callback(free)
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        objects = await self.batched_get(keys)
        count = (objects + [None]).index(None)
        for each in objects[count:]:
            if each is not None:
                each.ref_count_down()
        return objects[:count]

    # Writes. The memory belongs to the call until its thread has ended, also if LMCache cancels the call.

    def write(self, keys: Sequence[Any], memory_objs: Sequence[Any], deadline: float) -> None:
        names = self.keys(keys)
        memory_objs = memory_objs[: len(names)]
        sources, layouts = list(map(memory_of, memory_objs)), list(map(layout_of, memory_objs))
        stored = self.values.put(names, sources, layouts, deadline)
        if not all(stored):
            logger.debug("Larder: %d of %d chunks are not stored", stored.count(False), len(stored))

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        objects = list(memory_objs)
        for each in objects:
            each.ref_count_up()
        future = self.writes.submit(self.write, list(keys), objects, self.deadline("store_timeout"))
        if future is None:
            release(objects)
            return
        future.add_done_callback(lambda _: release(objects))
        await asyncio.wrap_future(future)

    def remove_sync(self, key: Any) -> bool:
        return any(size is not None for size in self.values.delete(self.keys([key]), self.deadline("store_timeout")))

    async def list(self) -> list[str]:
        """Nothing: the store keeps hashes of keys."""
        return []

    async def close(self) -> None:
        def end() -> None:
            self.reads.close()
            self.writes.close()
            self.values.close()

        await asyncio.get_running_loop().run_in_executor(None, end)


class LarderL2Adapter(L2AdapterInterface):
    """An L2 adapter of the MP server. Its store and prefetch controllers call it, and none of its methods waits,
    except `delete` and `close`."""

    def __init__(self, config: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self.options = read_options(config)
        identity = {
            "engine": f"lmcache-mp/{getattr(lmcache, '__version__', '')}",
            "weights": self.options["weights"],
            # The server knows neither the engines nor their devices.
            "numerics": self.options["numerics"],
        }
        self.values = Values(self.options["url"], identity, tenant=self.options["tenant"], name="lmcache-mp")
        self.leases = Leases(self.options["lease"])
        kinds = ("store", "lookup", "load")
        self.notifiers = {kind: create_event_notifier() for kind in kinds}
        self.workers = {kind: Workers(f"larder-{kind}", THREADS, WAITING_MAX) for kind in kinds}
        self.lock = threading.Lock()
        self.tasks = 0
        self.results: dict[str, dict[int, Any]] = {kind: {} for kind in kinds}

    def get_store_event_fd(self) -> int:
        return self.notifiers["store"].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self.notifiers["lookup"].fileno()

    def get_load_event_fd(self) -> int:
        return self.notifiers["load"].fileno()

    def submit(self, kind: str, failure: Any, call: Callable[..., Any], *args: Any) -> int:
        """Starts a task. Its result is that of `call`, or `failure` if the task cannot run."""
        deadline = time.monotonic() + self.options[f"{kind}_timeout"]
        with self.lock:
            task = self.tasks
            self.tasks += 1

        def run() -> None:
            result = failure
            try:
                result = call(*args, deadline)
            except Exception:
                logger.exception("Larder: a %s task has failed", kind)
            self.end(kind, task, result)

        if self.workers[kind].submit(run) is None:
            self.end(kind, task, failure)
        return task

    def end(self, kind: str, task: int, result: Any) -> None:
        with self.lock:
            self.results[kind][task] = result
        self.notifiers[kind].notify()

    # Stores.

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self.submit("store", L2StoreResult(False, 0), self.store, list(keys), list(objects))

    def store(self, keys: list[Any], objects: list[Any], deadline: float) -> L2StoreResult:
        sources, layouts = list(map(memory_of, objects)), list(map(layout_of, objects))
        stored = self.values.put(list(map(object_key, keys)), sources, layouts, deadline)
        written = [(key, source.length) for key, source, is_there in zip(keys, sources, stored) if is_there]
        if written:
            self._notify_keys_stored([key for key, _ in written], [size for _, size in written])
        return L2StoreResult(all(stored), sum(size for _, size in written))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self.lock:
            results, self.results["store"] = self.results["store"], {}
        return results

    # Lookups.

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self.submit("lookup", Bitmap(len(keys)), self.lookup, list(keys))

    def lookup(self, keys: list[Any], deadline: float) -> Bitmap:
        found, lookups = self.values.find(list(map(object_key, keys)), deadline, self.options["lease"])
        self.leases.hold(lookups)
        return bitmap(found)

    def query_lookup_and_lock_result(self, task_id: int) -> Optional[Bitmap]:
        return self.take("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing: a lock ends with its lease, also if this process dies."""

    # Loads.

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self.submit("load", Bitmap(len(keys)), self.load, list(keys), list(objects))

    def load(self, keys: list[Any], objects: list[Any], deadline: float) -> Bitmap:
        names = list(map(object_key, keys))
        heads = self.values.heads(names, deadline)
        # The keys of LMCache do not name the layout, so an object of another one is a miss.
        targets = [
            memory_of(target) if head and (head.length, head.layout) == (target.get_size(), layout_of(target)) else None
            for head, target in zip(heads, objects)
        ]
        read = self.values.get(names, heads, targets, deadline)
        accessed = [key for key, is_read in zip(keys, read) if is_read]
        if accessed:
            self._notify_keys_accessed(accessed)
        return bitmap(read)

    def query_load_result(self, task_id: int) -> Optional[Bitmap]:
        return self.take("load", task_id)

    def take(self, kind: str, task: int) -> Optional[Bitmap]:
        with self.lock:
            return self.results[kind].pop(task, None)

    # Administration.

    def delete(self, keys: list[Any]) -> None:
        deadline = time.monotonic() + self.options["store_timeout"]
        sizes = self.values.delete(list(map(object_key, keys)), deadline)
        deleted = [(key, size) for key, size in zip(keys, sizes) if size is not None]
        if deleted:
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    def report_status(self) -> dict[str, Any]:
        nodes = self.values.head_client.nodes_connected
        return {"is_healthy": nodes > 0, "type": type(self).__name__, "url": self.options["url"], "nodes": nodes}

    def close(self) -> None:
        for workers in self.workers.values():
            workers.close()
        self.values.close()
        for notifier in self.notifiers.values():
            notifier.close()


def bitmap(found: Sequence[bool]) -> Bitmap:
    result = Bitmap(len(found))
    for at, is_found in enumerate(found):
        if is_found:
            result.set(at)
    return result
