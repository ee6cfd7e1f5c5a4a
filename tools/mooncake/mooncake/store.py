"""Mooncake's store client on a Larder store: the calls that the backends of SGLang and vLLM make, and those for bytes.

`master_server_addr` names the nodes: `host:port`, several with commas, or a URL `larder://…`. `LARDER_URL` replaces
it. A value has a head and pieces in the store, as `larder_kv` writes them. No call raises because of the store or of a
wrong address: each returns Mooncake's error codes, and ends by `LARDER_TIMEOUT` seconds.

Codes are those of `mooncake-store/include/types.h` of Mooncake 3b5a594.
"""

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Optional

from larder_kv import _numerics
from larder_kv._values import VALUE_BYTES_MAX, Head, Memory, Values

from ._memory import Regions, Span, gathered, scatter

logger = logging.getLogger("mooncake.larder")

OK = 0
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
RPC_FAIL = -900

KEYS_REMEMBERED = 1 << 20
"""Keys that `remove_all` and `remove_by_regex` can remove. The store keeps only hashes of keys."""

KEYS_REMOVED_AT_ONCE = 4096
"""Keys of one removal, of which each needs 1 KiB of memory."""

SESSION_SECONDS = 30.0
"""Time for which the values of a get session stay readable."""

SESSION_KEYS_MAX = 1 << 16
"""Values of get sessions. Engines that die leave theirs open."""

UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def size_of(value: Any) -> int:
    """Bytes of a size such as 1024 or `16 MB`. Raises `ValueError` for others."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is None or match[2].lower() not in UNITS:
        raise ValueError(f"{value} is no size")
    return int(float(match[1]) * UNITS[match[2].lower()])


class SoftPinAction(Enum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(Enum):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicateConfig:
    """Options of a put. The store decides about places and copies, so none of them has an effect."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.with_hard_pin = False
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.preferred_segment = ""
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: Optional[list[str]] = None
        self._ttl: Optional[int] = None

    @property
    def soft_pin_ttl_ms(self) -> Optional[int]:
        return self._ttl

    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, value: Optional[int]) -> None:
        if value is not None and (not isinstance(value, int) or not 0 <= value < 1 << 64):
            raise TypeError("soft_pin_ttl_ms is None or an unsigned number of 64 bits")
        self._ttl = value

    def is_valid(self) -> bool:
        return self._ttl is None or self.soft_pin_action is SoftPinAction.ENABLE

    def __str__(self) -> str:
        return f"ReplicateConfig: {{ replica_num: {self.replica_num}, preferred_segment: {self.preferred_segment} }}"


class BufferHandle(bytearray):
    """A value in memory of its own."""

    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        return len(self)


class ReplicaDescriptor:
    """Place of a value: DRAM or NVMe of a node."""

    def __init__(self, tier: str) -> None:
        self.tier = tier

    def is_memory_replica(self) -> bool:
        return self.tier == "L2"

    def is_disk_replica(self) -> bool:
        return self.tier == "L3"

    def is_local_disk_replica(self) -> bool:
        return False


class MooncakeHostMemAllocator:
    """Host memory of this process."""

    def __init__(self) -> None:
        self.maps: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """Address of `size` bytes, or 0 if there is no memory."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.maps[address] = memory
        return address

    def free(self, address: int) -> int:
        return OK if self.maps.pop(address, None) is not None else INVALID_PARAMS


def guarded(failure: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a call return `failure(keys)` instead of an exception. `keys` is its first argument."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def guard(self: Any, *args: Any, **options: Any) -> Any:
            keys = args[0] if args else options.get("keys", options.get("key"))
            if self.values is None:
                return failure(keys)
            try:
                return call(self, *args, **options)
            except Exception:
                logger.exception("Larder: %s has failed", call.__name__)
                return failure(keys)

        return guard

    return decorate


def code(_: Any) -> int:
    return INVALID_PARAMS


def codes(keys: Any) -> list[int]:
    return [INVALID_PARAMS] * len(keys or ())


class MooncakeDistributedStore:
    """A client of the store. For several threads."""

    def __init__(self) -> None:
        self.values: Optional[Values] = None
        self.regions = Regions()
        self.lock = threading.Lock()
        self.seen: OrderedDict[str, None] = OrderedDict()
        self.sessions: dict[str, Any] = {}
        self.hostname, self.local_buffer, self.timeout = "", 0, 5.0

    # Setup.

    def setup(
        self,
        local_hostname: Any = None,
        metadata_server: str = "",
        global_segment_size: Any = 16 << 20,
        local_buffer_size: Any = 16 << 20,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        config: Optional[dict[str, Any]] = None,
    ) -> int:
        """Attaches to the store. The arguments may also be one dictionary.

        The client lends no memory to the store, and the nodes decide about NVMe. So sizes and offload have no effect.
        """
        config = config or (local_hostname if isinstance(local_hostname, dict) else None)
        if config is not None:
            local_hostname = config.get("local_hostname", "localhost")
            global_segment_size = config.get("global_segment_size", global_segment_size)
            local_buffer_size = config.get("local_buffer_size", local_buffer_size)
            master_server_addr = config.get("master_server_addr", "")
            tenant_id = config.get("tenant_id", tenant_id)
        try:
            size_of(global_segment_size)
            self.attach(str(local_hostname), master_server_addr, size_of(local_buffer_size), tenant_id)
        except Exception:
            logger.exception("Larder: the store cannot be attached")
            return INVALID_PARAMS
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """The same, where Mooncake has a client process on the machine. The address is that of a node."""
        return self.setup("localhost", "", 0, local_buffer_size, master_server_addr=server_address)

    def attach(self, hostname: str, address: str, local_buffer: int, tenant: str) -> None:
        url = os.environ.get("LARDER_URL") or (address if "://" in address else f"larder://{address}")
        self.timeout = float(os.environ.get("LARDER_TIMEOUT", "5"))
        if not 0 < self.timeout <= 86400:
            raise ValueError("LARDER_TIMEOUT must be at most 86400 seconds")
        identity = {
            "engine": "mooncake/1",
            "weights": os.environ.get("LARDER_WEIGHTS", ""),
            "numerics": _numerics.numerics(os.environ.get("LARDER_NUMERICS", ""), None),
        }
        self.values = Values(url, identity, tenant=tenant, name="mooncake")
        self.local_buffer = local_buffer
        # Mooncake takes a port of this range if the name has none.
        self.hostname = hostname if ":" in hostname else f"{hostname}:{12300 + os.getpid() % 2000}"

    def close(self) -> int:
        """Detaches. The values stay in the store. Fails while a transfer reads memory of the engine."""
        values, self.values = self.values, None
        self.sessions.clear()
        if values is not None:
            try:
                values.close()
            except RuntimeError:
                logger.exception("Larder: a transfer still reads memory of the engine")
                # So `unregister_buffer` still waits for the transfer.
                self.values = values
                return INVALID_PARAMS
        return OK

    def health_check(self) -> int:
        """0: healthy; 1: not set up; 2: no node is connected."""
        if self.values is None:
            return 1
        return OK if self.values.head_client.nodes_connected else 2

    def get_hostname(self) -> str:
        return self.hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Allows transfers from and to memory. Refuses device memory."""
        if self.regions.add(int(buffer_ptr), int(size)):
            return OK
        logger.error("Larder: %d bytes at %#x are no host memory of this process", size, buffer_ptr)
        return INVALID_PARAMS

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Returns once no transfer reads the memory."""

        def reading() -> list[Memory]:
            values = self.values
            if values is None:
                return []
            # References that threads of the client dropped end when a thread enters the native module.
            values.head_client.nodes_connected
            with values.lock:
                return list(values.reading)

        return OK if self.regions.remove(int(buffer_ptr), reading) else INVALID_PARAMS

    # Parts of the calls.

    def deadline(self) -> float:
        return time.monotonic() + self.timeout

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Keys of the store. Notes those of Mooncake."""
        with self.lock:
            for key in keys:
                self.seen[key] = None
                self.seen.move_to_end(key)
            while len(self.seen) > KEYS_REMEMBERED:
                self.seen.popitem(last=False)
        return [hashlib.sha256(key.encode()).digest() for key in keys]

    def write(self, keys: Sequence[str], sources: Sequence[Optional[Memory]], replace: bool = False) -> list[int]:
        """Puts values. A source of None is a wrong argument. An existing value stays, unless it is replaced."""
        assert self.values is not None
        values, deadline = self.values, self.deadline()
        given = [at for at, source in enumerate(sources) if source is not None and source.length <= VALUE_BYTES_MAX]
        names = self.names([keys[at] for at in given])
        results = [INVALID_PARAMS] * len(keys)
        if replace and names:
            heads, lengths = values.heads(names, deadline), values.delete(names, deadline)
            kept = [head is not None and length is None for head, length in zip(heads, lengths)]
            for at, is_kept in zip(given, kept):
                results[at] = RPC_FAIL if is_kept else results[at]
            given = [at for at, is_kept in zip(given, kept) if not is_kept]
            names = [name for name, is_kept in zip(names, kept) if not is_kept]
        if names:
            failure = NO_AVAILABLE_HANDLE if values.head_client.nodes_connected else RPC_FAIL
            stored = values.put(names, [sources[at] for at in given], [None] * len(given), deadline)
            for at, is_stored in zip(given, stored):
                results[at] = OK if is_stored else failure
        return results

    def read(
        self, keys: Sequence[str], target: Callable[[int, int], Optional[Memory]]
    ) -> tuple[list[int], list[Optional[Memory]]]:
        """Reads values. `target` has the memory for a value of a length, or None if there is none.

        Returns the length or the error of each value, and its memory.
        """
        assert self.values is not None
        deadline, names = self.deadline(), self.names(keys)
        heads: list[Optional[Head]] = self.values.heads(names, deadline)
        targets = [None if head is None else target(at, head.length) for at, head in enumerate(heads)]
        found = self.values.get(names, heads, targets, deadline)
        results = []
        for head, memory, is_found in zip(heads, targets, found):
            if head is not None and memory is None:
                results.append(INVALID_PARAMS)
            else:
                results.append(head.length if head is not None and is_found else OBJECT_NOT_FOUND)
        return results, targets

    def read_copies(self, keys: Sequence[str]) -> list[Optional[BufferHandle]]:
        """Values in memory of their own. None for those that are not found."""
        handles: dict[int, BufferHandle] = {}

        def target(at: int, length: int) -> Memory:
            handles[at] = BufferHandle(length)
            return Memory(handles[at], length)

        results, _ = self.read(keys, target)
        return [handles[at] if result > 0 else None for at, result in enumerate(results)]

    # Values in bytes.

    def is_allowed(self, config: Optional[ReplicateConfig]) -> bool:
        return config is None or config.is_valid()

    def put_bytes(
        self, keys: Sequence[str], values: Sequence[Any], config: Optional[ReplicateConfig], replace: bool
    ) -> int:
        """0, or the first error."""
        if len(keys) != len(values) or not self.is_allowed(config):
            return INVALID_PARAMS
        if not self.local_buffer:
            # Mooncake copies bytes into this buffer, so it cannot store them without one.
            return NO_AVAILABLE_HANDLE
        views = [memoryview(value).cast("B") for value in values]
        sources = [Memory(view, len(view)) if len(view) else None for view in views]
        return next((result for result in self.write(keys, sources, replace) if result), OK)

    @guarded(code)
    def put(self, key: str, value: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self.put_bytes([key], [value], config, False)

    @guarded(code)
    def put_parts(self, key: str, *parts: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self.put_bytes([key], [b"".join(parts)], config, False)

    @guarded(code)
    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Optional[ReplicateConfig] = None) -> int:
        return self.put_bytes(keys, values, config, False)

    @guarded(code)
    def upsert(self, key: str, value: Any, config: Optional[ReplicateConfig] = None) -> int:
        """Replaces a value. Readers may find none for a moment."""
        return self.put_bytes([key], [value], config, True)

    @guarded(code)
    def upsert_parts(self, key: str, *parts: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self.put_bytes([key], [b"".join(parts)], config, True)

    @guarded(code)
    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: Optional[ReplicateConfig] = None
    ) -> int:
        return self.put_bytes(keys, values, config, True)

    @guarded(lambda key: b"")
    def get(self, key: str) -> bytes:
        """The value, or no bytes if it is not found."""
        return bytes(self.read_copies([key])[0] or b"")

    @guarded(lambda keys: [b""] * len(keys))
    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(value or b"") for value in self.read_copies(keys)]

    @guarded(lambda key: None)
    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        return self.read_copies([key])[0]

    @guarded(lambda keys: [None] * len(keys))
    def batch_get_buffer(self, keys: Sequence[str]) -> list[Optional[BufferHandle]]:
        return self.read_copies(keys)

    # Values in registered memory.

    def source(self, address: int, size: int) -> Optional[Span]:
        return Span(address, size) if self.regions.has(address, size) else None

    def joined(self, addresses: Sequence[int], sizes: Sequence[int]) -> Optional[Memory]:
        """Pieces of memory as one value. A single piece is not copied."""
        if len(addresses) != len(sizes) or not all(map(self.regions.has, addresses, sizes)):
            return None
        if len(addresses) == 1:
            return Span(addresses[0], sizes[0])
        content = gathered(list(addresses), list(sizes))
        return Memory(content, len(content)) if content else None

    @guarded(codes)
    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Optional[ReplicateConfig] = None,
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes) or not self.is_allowed(config):
            return codes(keys)
        return self.write(keys, list(map(self.source, buffer_ptrs, sizes)))

    @guarded(codes)
    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Optional[ReplicateConfig] = None,
    ) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes) or not self.is_allowed(config):
            return codes(keys)
        return self.write(keys, list(map(self.source, buffer_ptrs, sizes)), replace=True)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Optional[ReplicateConfig] = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Optional[ReplicateConfig] = None) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Optional[ReplicateConfig] = None,
    ) -> int:
        """Puts a value that begins with metadata."""
        places = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self.batch_put_from_multi_buffers([key], [places[0]], [places[1]], config)[0]

    @guarded(codes)
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Optional[ReplicateConfig] = None,
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) or not self.is_allowed(config):
            return codes(keys)
        return self.write(keys, list(map(self.joined, all_buffer_ptrs, all_sizes)))

    @guarded(codes)
    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Bytes of each value, or an error."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return codes(keys)

        def target(at: int, length: int) -> Optional[Memory]:
            return self.source(buffer_ptrs[at], length) if length <= sizes[at] else None

        return self.read(keys, target)[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    @guarded(codes)
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return codes(keys)

        def target(at: int, length: int) -> Optional[Memory]:
            addresses, sizes = all_buffer_ptrs[at], all_sizes[at]
            if len(addresses) != len(sizes) or length > sum(sizes) or not all(map(self.regions.has, addresses, sizes)):
                return None
            return Span(addresses[0], length) if len(addresses) == 1 else Memory(bytearray(length), length)

        results, targets = self.read(keys, target)
        for at, (result, memory) in enumerate(zip(results, targets)):
            if result > 0 and memory is not None and memory.view is not None:
                scatter(memory.view, *clipped(all_buffer_ptrs[at], all_sizes[at], result))
        return results

    # Parts of values.

    @guarded(codes)
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Bytes that were read of each value, or an error. Each value is read as a whole."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return codes(keys)
        results = []
        for value, *ranges in zip(self.read_copies(keys), all_buffer_ptrs, all_sizes, all_src_offsets):
            copied = self.copy_ranges(value, *ranges)
            error = next((length for length in copied if length < 0), None)
            results.append(sum(copied) if error is None else error)
        return results

    def copy_ranges(
        self,
        value: Optional[BufferHandle],
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> list[int]:
        """Copies ranges of a value to registered memory. The length or the error of each."""
        if not len(addresses) == len(sizes) == len(offsets):
            return [INVALID_PARAMS] * max(len(addresses), len(sizes), len(offsets))
        if value is None:
            return [OBJECT_NOT_FOUND] * len(sizes)
        results = []
        for address, size, offset in zip(addresses, sizes, offsets):
            if offset < 0 or size <= 0 or offset + size > len(value) or not self.regions.has(address, size):
                results.append(INVALID_PARAMS)
            else:
                ctypes.memmove(address, value.ptr() + offset, size)
                results.append(size)
        return results

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Lengths or errors of ranges, by buffer, key and range."""
        results = []
        for buffer, keys, targets, sources, sizes in zip(
            buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes
        ):
            rows = zip(self.batch_get_buffer(keys), targets, sizes, sources)
            results.append(
                [
                    self.copy_ranges(value, [buffer + offset for offset in places], lengths, offsets)
                    for value, places, lengths, offsets in rows
                ]
            )
        return results

    @guarded(codes)
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Keeps values readable until the end of the session, at most 30 s."""
        assert self.values is not None
        found, lookups = self.values.find(self.names(keys), self.deadline(), SESSION_SECONDS)
        with self.lock:
            if len(self.sessions) + len(keys) > SESSION_KEYS_MAX:
                # Their holds have ended, or end soon.
                self.sessions.clear()
            self.sessions.update(dict.fromkeys(keys, lookups))
        return [OK if is_found else OBJECT_NOT_FOUND for is_found in found]

    @guarded(codes)
    def batch_get_session_end(self, keys: Sequence[str]) -> list[int]:
        with self.lock:
            for key in keys:
                self.sessions.pop(key, None)
        return [OK] * len(keys)

    # Queries.

    @guarded(lambda keys: [-1] * len(keys))
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each value that exists, 0 for others."""
        assert self.values is not None
        if not keys:
            return []
        return [int(found) for found in self.values.find(self.names(keys), self.deadline())[0]]

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    @guarded(code)
    def get_size(self, key: str) -> int:
        assert self.values is not None
        (head,) = self.values.heads(self.names([key]), self.deadline())
        return OBJECT_NOT_FOUND if head is None else head.length

    @guarded(lambda keys: {})
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Place of each value that exists."""
        assert self.values is not None
        tiers = self.values.head_client.locate(self.names(keys), self.timeout)
        return {key: [ReplicaDescriptor(tier)] for key, tier in zip(keys, tiers) if tier is not None}

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    # Removal.

    @guarded(codes)
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Removes values durably."""
        return self.removed(keys, self.deadline())

    def removed(self, keys: Sequence[str], deadline: float) -> list[int]:
        assert self.values is not None
        if not keys:
            return []
        names = self.names(keys)
        heads = self.values.heads(names, deadline)
        lengths = self.values.delete(names, deadline)
        with self.lock:
            for key, head, length in zip(keys, heads, lengths):
                if head is None or length is not None:
                    self.seen.pop(key, None)
        return [
            OBJECT_NOT_FOUND if head is None else RPC_FAIL if length is None else OK
            for head, length in zip(heads, lengths)
        ]

    def remove(self, key: str, force: bool = False) -> int:
        return self.batch_remove([key], force)[0]

    @guarded(lambda _: 0)
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes the values that this client has named, and whose keys match. Returns their number."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error:
            return INVALID_PARAMS
        with self.lock:
            keys = [key for key in self.seen if pattern.search(key)]
        count, deadline = 0, self.deadline()
        for at in range(0, len(keys), KEYS_REMOVED_AT_ONCE):
            if time.monotonic() >= deadline:
                break
            count += sum(result == OK for result in self.removed(keys[at : at + KEYS_REMOVED_AT_ONCE], deadline))
        return count

    def remove_all(self, force: bool = False) -> int:
        """Removes the values that this client has named. Returns their number."""
        return self.remove_by_regex("", force)


def clipped(addresses: Sequence[int], sizes: Sequence[int], length: int) -> tuple[list[int], list[int]]:
    """Places of the first `length` bytes."""
    kept = []
    for size in sizes:
        kept.append(min(size, length))
        length -= kept[-1]
    return list(addresses), kept
