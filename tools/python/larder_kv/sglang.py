"""SGLang's hierarchical cache on Larder: a `HiCacheStorage` for the backend `dynamic`.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \
    '{"backend_name": "larder", "module_path": "larder_kv.sglang", "class_name": "LarderStorage",
      "interface_v1": 1, "url": "larder://127.0.0.1:7700", "weights": "my-model, revision 3"}'

A page of SGLang is a page of the store, in the namespace of its model, rank, pool and layout. All buffers of the page,
such as keys and values, are stored and lost together. A call never raises because of the store, and ends by its
timeout: a store that is away is a miss.
"""

import hashlib
import json
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Optional

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from ._client import Client, PutOutcome
from ._native import Lookup, Namespace, Pointer
from ._numerics import ask, numerics, setting_of_sglang
from ._weights import plain, unknown, version_of_weights

MAX_PAGE_BYTES = 16 << 20
MAX_PARTS = 128
FORGET_BATCH = 4096
KEYS_REMEMBERED = 1_000_000
"""Keys that `clear` can forget. Beyond it, the oldest are not forgotten."""

REPLICATED = ("kv", "swa", "indexer", "deepseek_v4_")
"""Prefixes of the names of pools in which all ranks of a latent model have the same bytes. SGLang shards the state of
Mamba layers by rank, and a draft model may have heads."""

TIMEOUT_MAX = 86400.0
LEASE_MAX = 60.0

DEFAULTS: dict[str, Any] = {"exists_timeout": 0.5, "get_timeout": 5.0, "set_timeout": 10.0, "lease": 5.0, "tenant": "default"}

# After "refused" the store has the page with other bytes: the numerics of this engine depend on its batches. The first
# writer's page is as good. After "in-progress" another rank writes it.
STORED: frozenset[PutOutcome] = frozenset({"stored", "already-there", "refused", "in-progress"})

BUSY_RETRIES = 1000
"""A large batch exceeds a node's budget for puts, so the rest waits in turns. The timeout bounds this."""


MODEL_SETTINGS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "modelopt_quant",
    "model_impl",
    "json_model_override_args",
)
"""Settings of SGLang's model that change the bytes of KV."""


def model_of(weights: str) -> dict[str, Any]:
    """Fields for the identity of a namespace. Raises if the version of the weights is neither given nor known."""
    path = ask(lambda: setting_of_sglang("model_path", "model"))
    if path is None:
        if not weights:
            raise ValueError(unknown("the model", "SGLang does not tell its configuration"))
        return {"weights": weights}
    names = {name: plain(setting_of_sglang(name, "model")) for name in MODEL_SETTINGS}
    names["is_dummy"] = setting_of_sglang("load_format", "model") == "dummy"
    names["weights"] = weights or version_of_weights(path, setting_of_sglang("revision", "model"))
    return names


def part_layout(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Cuts a page with buffers of these sizes: bytes of a part, parts of a store page, and store pages of a page."""
    if not sizes or min(sizes) <= 0:
        raise ValueError("the host pool has pages without bytes")
    part = math.gcd(*sizes)
    while part > MAX_PAGE_BYTES and part % 2 == 0:
        part //= 2
    parts = sum(sizes) // part
    fits = [n for n in range(1, min(parts, MAX_PARTS) + 1) if parts % n == 0 and n * part <= MAX_PAGE_BYTES]
    if not fits:
        raise ValueError(f"buffers of {list(sizes)} bytes cannot be cut into pages of at most {MAX_PAGE_BYTES} bytes")
    return part, fits[-1], parts // fits[-1]


def key_of(first: bytes, name: bytes, number: int) -> bytes:
    return hashlib.sha256(first + name + number.to_bytes(4, "little")).digest()


class _Pool:
    """Pages of one host pool. `shards` are the head groups that the rank has of each page, if it is cut by heads."""

    def __init__(
        self, url: str, identity: dict[str, Any], tenant: str, sizes: Sequence[int], shards: Optional[range] = None
    ) -> None:
        self.shards = shards
        self.part, self.parts, self.fragments = part_layout(sizes)
        self.per_page = self.fragments * (1 if shards is None else len(shards))
        """Store pages of a page of this rank."""
        self.sizes = list(sizes)
        identity = dict(identity, sizes=self.sizes)
        namespace = Namespace(
            self.part * self.parts,
            parts=self.parts,
            identity=json.dumps(identity, sort_keys=True),
            model=str(identity["model"])[:64],
            tenant=tenant,
        )
        self.client = Client(url, namespace, name="sglang", memory_bytes=0)

    def keys(self, keys: Sequence[str]) -> list[bytes]:
        """Keys of the store: one for each fragment of each page, or of each head group of it."""
        found = []
        for page in map(bytes.fromhex, keys):
            firsts = [page] if self.shards is None else [key_of(page, b"larder-heads", shard) for shard in self.shards]
            for first in firsts:
                found.append(first)
                found += [key_of(first, b"larder-fragment", number) for number in range(1, self.fragments)]
        return found

    def buffers(self, addresses: Sequence[int], sizes: Sequence[int], owner: Any) -> list[list[Pointer]]:
        """Memory of each fragment, as its parts."""
        if list(sizes) != self.sizes * (len(sizes) // len(self.sizes)):
            raise ValueError("the host pool has changed the shape of its pages")
        parts = [
            Pointer(address + at, self.part, owner)
            for address, size in zip(addresses, sizes)
            for at in range(0, size, self.part)
        ]
        return [parts[at : at + self.parts] for at in range(0, len(parts), self.parts)]

    def pages(self, results: Sequence[bool]) -> list[bool]:
        """Joins the results of fragments to those of pages."""
        return [all(results[at : at + self.per_page]) for at in range(0, len(results), self.per_page)]


class LarderStorage(HiCacheStorage):
    """The storage backend. SGLang calls it from one thread for reads, one for writes, and one for queries."""

    def __init__(self, storage_config: Any, kwargs: Optional[dict[str, Any]] = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if "url" not in extra:
            raise ValueError("the extra config needs a url, such as larder://127.0.0.1:7700")
        self.config = storage_config
        if storage_config.should_split_heads and not extra.get("interface_v1"):
            raise ValueError("pages are cut by heads without copies only: set interface_v1, or remove tp_lcm_size")
        self.url = str(extra["url"])
        self.options: dict[str, Any] = {name: type(value)(extra.get(name, value)) for name, value in DEFAULTS.items()}
        # A wrong value must fail here: SGLang's threads end with an exception of a call.
        for name in ("exists_timeout", "get_timeout", "set_timeout", "lease"):
            seconds_max = LEASE_MAX if name == "lease" else TIMEOUT_MAX
            if not 0 <= self.options[name] <= seconds_max:
                raise ValueError(f"{name} is {self.options[name]}, must be 0 to {seconds_max:g} seconds")
        self.zero_copy = bool(extra.get("interface_v1"))
        self.model = model_of(str(extra.get("weights", "")))
        self.numerics = numerics(str(extra.get("numerics", "")), "sglang")
        self.kv_cache_dtype = str(extra.get("kv_cache_dtype", "auto"))
        self.registered_pools: dict[str, Any] = {}
        self.pools: dict[str, _Pool] = {}
        self.leases: deque[tuple[float, Lookup]] = deque()
        self.known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.counts = {"pages_read": 0, "pages_missed": 0, "pages_written": 0, "pages_not_written": 0}
        # Refuses a wrong URL now: an exception here undoes the attachment.
        Client(self.url, Namespace(1, identity="check"), memory_bytes=0)

    def identity(self, name: str, host_pool: Any) -> dict[str, Any]:
        """Everything that distinguishes the bytes of a page."""
        config = self.config
        is_replicated = config.is_mla_model and name.startswith(REPLICATED)
        # Any rank may read what every rank has, and each group of heads has a key of its own.
        ranks: list[Any] = [] if is_replicated else [config.tp_rank, config.tp_size]
        if self.shards(name, host_pool) is not None:
            ranks = ["heads", config.tp_lcm_size]
        ranks += [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        ranks += [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)]
        dtype = str(getattr(host_pool, "dtype", None))
        if dtype.endswith("uint8") and self.kv_cache_dtype == "auto":
            raise ValueError(
                f"the pool {name} has plain bytes: name their type, such as fp8_e4m3, "
                "by kv_cache_dtype in the extra config"
            )
        return {
            "engine": "sglang/2",
            "model": config.model_name,
            "weights": self.model,
            "numerics": self.numerics,
            "ranks": ranks,
            "pool": name,
            "layout": getattr(host_pool, "layout", None),
            "dtype": dtype,
            "temporal_dtype": str(getattr(host_pool, "temporal_dtype", None)),
            "kv_cache_dtype": self.kv_cache_dtype,
            "page_tokens": getattr(host_pool, "page_size", 1),
        }

    def shards(self, name: str, host_pool: Any) -> Optional[range]:
        """Head groups of this rank. None if the pool is not cut by heads: SGLang can cut its main pool only."""
        config = self.config
        is_cut = config.tp_lcm_size and getattr(host_pool, "layout", None) == "page_head" and not config.is_mla_model
        if name != "kv" or not is_cut or not self.zero_copy:
            return None
        count = config.tp_lcm_size // config.tp_size
        return range(config.tp_rank * count, (config.tp_rank + 1) * count)

    def page_buffers(self, name: str, host_pool: Any, host_indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Addresses and sizes of the buffers of pages, head group by head group."""
        shards = self.shards(name, host_pool)
        if shards is None or len(shards) == 1:
            return host_pool.get_page_buffer_meta(host_indices)
        return host_pool.get_split_heads_page_buffer_meta(host_indices, len(shards))

    def add_pool(self, name: str, host_pool: Any) -> None:
        shards = self.shards(name, host_pool)
        count = 1 if shards is None else len(shards)
        if host_pool_heads(host_pool) % count:
            raise ValueError(f"the heads of a rank cannot be cut into {count} groups: choose another tp_lcm_size")
        _, sizes = self.page_buffers(name, host_pool, _first_page(host_pool))
        sizes = sizes[: len(sizes) // count]
        self.pools[name] = _Pool(self.url, self.identity(name, host_pool), self.options["tenant"], sizes, shards)
        self.registered_pools[name] = host_pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        # A hybrid model's anchor has no memory of its own.
        if self.zero_copy and getattr(mem_pool_host, "kv_buffer", None) is not None:
            self.add_pool("kv", mem_pool_host)
        elif not self.zero_copy:
            self.add_flat_pool(mem_pool_host)

    def add_flat_pool(self, host_pool: Any) -> None:
        """Pages of the copying interface: one flat tensor each."""
        page = host_pool.get_dummy_flat_data_page()
        # A flat page keeps the order of its pool's layout.
        identity = dict(self.identity("kv", host_pool), pool="flat")
        self.pools["kv"] = _Pool(self.url, identity, self.options["tenant"], [_bytes(page)])

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(host_pool_name)
        if name not in self.pools:
            self.add_pool(name, host_pool)

    def deadline(self, timeout: str) -> float:
        """The end of a call that begins now. All pools of the call share it."""
        return time.monotonic() + self.options[timeout]

    # Queries.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.find(keys, self.deadline("exists_timeout"))

    def find(self, keys: list[str], deadline: float) -> int:
        """Pages of the longest prefix that exists. Keeps them readable."""
        pool = self.pools["kv"]
        found = pool.client.lookup(pool.keys(keys), _left(deadline), hold=self.options["lease"])
        self.hold(found)
        pages = len(found) // pool.per_page
        self.remember("kv", keys[:pages])
        return pages

    def hold(self, found: Lookup) -> None:
        """Keeps a lookup until its lease has ended: the pages stay readable until SGLang reads them."""
        now = time.monotonic()
        while self.leases and self.leases[0][0] <= now:
            self.leases.popleft()
        self.leases.append((now + self.options["lease"], found))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Optional[list[Any]] = None, extra_info: Any = None
    ) -> PoolTransferResult:
        deadline = self.deadline("exists_timeout")
        usable = self.find(keys, deadline) if "kv" in self.pools else len(keys)
        hits: dict[Any, int] = {PoolName.KV: usable} if usable else {}
        restorable = list(range(1, usable + 1))
        for transfer in pool_transfers or []:
            pool = self.pools.get(str(transfer.name))
            if pool is None or usable == 0:
                restorable = []
                break
            exists = pool.client.exists(pool.keys(keys[:usable]), _left(deadline))
            pages = pool.pages(exists)
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                possible = [end for end in range(1, usable + 1) if all(pages[max(0, end - window) : end])]
            elif transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = list(range(1, (pages + [False]).index(False) + 1))
            else:
                # Block groups never gate the hit, and this backend does not serve them.
                continue
            if possible:
                hits[transfer.name] = possible[-1]
            restorable = [end for end in restorable if end in set(possible)]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    # Zero copy.

    def memory(self, name: str, keys: list[str], host_indices: Any) -> list[list[Pointer]]:
        """Buffers of these pages."""
        host_pool = self.registered_pools[name]
        addresses, sizes = self.page_buffers(name, host_pool, host_indices)
        pool = self.pools[name]
        if len(addresses) * pool.fragments != len(keys) * len(pool.sizes) * pool.per_page:
            raise ValueError(f"{len(keys)} keys, but {len(addresses)} buffers")
        return pool.buffers(addresses, sizes, host_pool)

    def read(self, name: str, keys: list[str], host_indices: Any, deadline: float) -> list[bool]:
        pool, buffers = self.pools[name], self.memory(name, keys, host_indices)
        tiers = pool.client.get_into(pool.keys(keys), buffers, _left(deadline), busy_retries=BUSY_RETRIES)
        return self.count_read(name, keys, pool.pages([tier is not None for tier in tiers]))

    def write(self, name: str, keys: list[str], host_indices: Any, extra_info: Any, deadline: float) -> list[bool]:
        return self.put(name, keys, self.memory(name, keys, host_indices), extra_info, deadline)

    def put(self, name: str, keys: list[str], buffers: list[Any], extra_info: Any, deadline: float) -> list[bool]:
        pool = self.pools[name]
        prefix = getattr(extra_info, "prefix_keys", None)
        place: dict[str, Any] = {}
        if prefix is not None and pool.per_page == 1 and pool.shards is None:
            place = {"parent": prefix[-1] if prefix else None, "position": len(prefix)}
        page_keys = pool.keys(keys)
        outcomes = pool.client.put_from(page_keys, buffers, _left(deadline), busy_retries=BUSY_RETRIES, **place)
        written = pool.pages([outcome in STORED for outcome in outcomes])
        self.counts["pages_written"] += sum(written)
        self.counts["pages_not_written"] += len(written) - sum(written)
        self.remember(name, [key for key, is_written in zip(keys, written) if is_written])
        return written

    def count_read(self, name: str, keys: list[str], read: list[bool]) -> list[bool]:
        self.counts["pages_read"] += sum(read)
        self.counts["pages_missed"] += len(read) - sum(read)
        self.remember(name, [key for key, is_read in zip(keys, read) if is_read])
        return read

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self.read("kv", keys, host_indices, self.deadline("get_timeout"))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self.write("kv", keys, host_indices, extra_info, self.deadline("set_timeout"))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        deadline = self.deadline("get_timeout")
        return {t.name: self.read(str(t.name), t.keys, t.host_indices, deadline) for t in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        deadline = self.deadline("set_timeout")
        return {t.name: self.write(str(t.name), t.keys, t.host_indices, extra_info, deadline) for t in transfers}

    # The copying interface: one flat tensor for each page.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        pool = self.pools["kv"]
        addresses = [tensor.data_ptr() for tensor in target_locations]
        buffers = pool.buffers(addresses, [_bytes(tensor) for tensor in target_locations], target_locations)
        tiers = pool.client.get_into(pool.keys(keys), buffers, self.options["get_timeout"], busy_retries=BUSY_RETRIES)
        read = self.count_read("kv", keys, pool.pages([tier is not None for tier in tiers]))
        return [tensor if is_read else None for tensor, is_read in zip(target_locations, read)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool = self.pools["kv"]
        tensors = [value.contiguous() for value in values]
        addresses = [tensor.data_ptr() for tensor in tensors]
        buffers = pool.buffers(addresses, [_bytes(tensor) for tensor in tensors], tensors)
        return all(self.put("kv", keys, buffers, None, self.deadline("set_timeout")))

    # Administration.

    def remember(self, name: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.known[(name, key)] = None
        while len(self.known) > KEYS_REMEMBERED:
            self.known.popitem(last=False)

    def clear(self) -> None:
        """Forgets the pages that this process has read, written or found. The store has no list of the others.

        Raises if not all pages are forgotten by the timeout. SGLang then reports a failure, and may call again.
        """
        deadline = self.deadline("set_timeout")
        self.leases.clear()
        known, self.known = self.known, OrderedDict()
        pages, remaining = list(known), 0
        for name, pool in self.pools.items():
            keys = [key for of, key in pages if of == name]
            for at in range(0, len(keys), FORGET_BATCH):
                batch = keys[at : at + FORGET_BATCH]
                if not pool.client.forget(pool.keys(batch), _left(deadline)).complete:
                    self.remember(name, batch)
                    remaining += len(batch)
        if remaining:
            raise TimeoutError(f"the store may still have {remaining} of {len(pages)} pages: clear again")

    def close(self) -> None:
        self.leases.clear()
        self.pools.clear()
        self.registered_pools.clear()

    def statistics(self) -> dict[str, int]:
        """Pages that were read, missed, written, and not written since the start.

        Pages that the store had, or that another rank was writing, count as written.
        """
        return dict(self.counts)


def _first_page(host_pool: Any) -> Any:
    """Indices of the first page of a pool, as SGLang passes them."""
    import torch

    return torch.arange(getattr(host_pool, "page_size", None) or 1, dtype=torch.int64)


def host_pool_heads(host_pool: Any) -> int:
    """Heads of a page, or 0 if the pool has none."""
    return int(getattr(host_pool, "head_num", 0) or 0)


def _left(deadline: float) -> float:
    """Seconds until `deadline`."""
    return max(0.0, deadline - time.monotonic())


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
