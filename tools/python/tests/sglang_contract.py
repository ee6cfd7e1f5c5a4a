"""The part of SGLang 0.5.23 that a storage backend sees: types, and host pools with NumPy in place of PyTorch.

SGLang itself needs 7 GB of packages. The signatures, the enumerations and the address arithmetic of the pools follow its
documented interface.
"""

import enum
import hashlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: Optional[list] = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass(frozen=True)
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: Optional[list] = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host


@dataclass
class ExtraInfo:
    prefix_keys: Optional[list] = None


@dataclass
class Config:
    extra_config: dict
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str = "model"
    tp_lcm_size: Optional[int] = None
    should_split_heads: bool = False
    dcp_rank: int = 0
    dcp_size: int = 1


@dataclass
class HostPool:
    """A pool of `pages` pages: keys and values apart (`page_first`, `page_head`), per layer (`layer_first`), or latents.

    A page of `page_head` has the bytes of one head after the other.
    """

    layout: str = "page_first"
    page_size: int = 16
    pages: int = 64
    layers: int = 3
    token_bytes: int = 96
    dtype: str = "bfloat16"
    temporal_dtype: Optional[str] = None
    head_num: int = 4
    kv_buffer: Any = field(init=False)

    def __post_init__(self):
        copies = 1 if self.layout == "mla" else 2
        self.kv_buffer = numpy.zeros(copies * self.pages * self.page_bytes, numpy.uint8)

    @property
    def page_bytes(self):
        return self.page_size * self.layers * self.token_bytes

    def get_page_buffer_meta(self, indices):
        assert len(indices) % self.page_size == 0
        base, half = self.kv_buffer.ctypes.data, self.pages * self.page_bytes
        layer = self.pages * self.page_size * self.token_bytes
        addresses = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                for number in range(self.layers):
                    start = base + number * layer + index * self.token_bytes
                    addresses += [start, start + half]
            else:
                start = base + index * self.layers * self.token_bytes
                addresses += [start] if self.layout == "mla" else [start, start + half]
        size = self.page_bytes // (self.layers if self.layout == "layer_first" else 1)
        return addresses, [size] * len(addresses)

    def get_split_heads_page_buffer_meta(self, indices, split_factor):
        assert self.layout == "page_head" and self.head_num % split_factor == 0
        addresses, sizes = self.get_page_buffer_meta(indices)
        size = sizes[0] // split_factor
        # Keys and values of a group follow each other.
        pairs = zip(addresses[::2], addresses[1::2])
        split = [half + at * size for pair in pairs for at in range(split_factor) for half in pair]
        return split, [size] * len(split)

    def get_dummy_flat_data_page(self):
        return Tensor(numpy.zeros(2 * self.page_bytes, numpy.uint8))


class Tensor:
    """A tensor as the copying interface passes it."""

    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def contiguous(self):
        return self


def indices(pool, pages):
    """Token indices of pages, as SGLang allocates them."""
    return numpy.concatenate([numpy.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages])


def page_hashes(count, seed=0):
    """SGLang's chain of page keys."""
    hashes, previous = [], b""
    for number in range(count):
        previous = hashlib.sha256(previous + numpy.arange(16, dtype="<u4").tobytes() + bytes([seed, number])).digest()
        hashes.append(previous.hex())
    return hashes


MODEL = types.SimpleNamespace(
    model_path="organisation/model",
    revision="0" * 40,
    load_format="auto",
    dtype="auto",
    quantization=None,
    json_model_override_args="{}",
)
"""SGLang's configuration of the model, as it is in effect."""


def install():
    """Provides the modules that the backend imports."""
    storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    for item in (HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult):
        setattr(storage, item.__name__, item)
    torch = types.ModuleType("torch")
    torch.int64 = numpy.int64
    torch.arange = numpy.arange
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_model, context.get_exec = (lambda: MODEL), (lambda: types.SimpleNamespace())
    sys.modules[context.__name__] = context
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[storage.__name__] = storage
    sys.modules["torch"] = torch
