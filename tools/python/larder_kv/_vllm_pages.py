"""Pages of the vLLM connector: their shape, keys and namespace, and what the scheduler tells its workers.

A page is what one block has in some consecutive layers of one group of heads. Each has a key and is stored by itself,
so a prefill engine publishes a layer while it computes the next. A rank has some whole groups. Their size does not
depend on the number of ranks, so engines with other numbers find the pages.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from ._vllm_store import PAGE_BYTES_MAX, check_options

PAGE_BYTES_LEAST = 64 << 10
"""Layers are joined until a page has so many bytes: smaller pages cost more requests than they save time."""

SERVED = (FullAttentionSpec, MLAAttentionSpec)
"""Kinds of caches whose blocks only depend on the tokens before. Subclasses can differ: reference sliding windows (R-SWA)
treat prompts and generated tokens differently."""

SPLIT_MODES = ("NONE", "FP8_PER_TENSOR")
"""Modes of quantized KV in which a head's bytes depend on nothing of other heads."""


@dataclass(frozen=True)
class Options:
    """Keys of `kv_connector_extra_config`. Times are in seconds."""

    url: str
    weights: str = ""
    numerics: str = ""
    tenant: str = "default"
    lookup_timeout: float = 0.5
    load_timeout: float = 30.0
    follow_timeout: float = 5.0
    store_timeout: float = 5.0
    layerwise: bool = True
    save_decode: bool = True
    staging_bytes: int = 1 << 30
    tensor_parallel_max: int = 8
    """Most ranks of engines that share pages. The heads of a model make so many groups, if they can be divided."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> "Options":
        """Options of a configuration. Raises for wrong ones, while vLLM starts."""
        unknown = sorted(set(extra) - {each.name for each in fields(Options)})
        if unknown:
            raise ValueError(f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}")
        if "url" not in extra:
            raise ValueError("kv_connector_extra_config needs the url of a store")
        options = Options(**extra)
        timeouts = (options.lookup_timeout, options.load_timeout, options.follow_timeout, options.store_timeout)
        check_options(options.url, options.tenant, *timeouts)
        if options.staging_bytes < PAGE_BYTES_MAX:
            raise ValueError(f"staging_bytes must be at least {PAGE_BYTES_MAX}")
        if not 1 <= options.tensor_parallel_max <= 1024:
            raise ValueError("tensor_parallel_max must be 1 to 1024")
        return options


@dataclass(frozen=True)
class Rank:
    """Head groups of one rank."""

    groups: range
    is_writer: bool
    """False if another rank has the same KV and writes it."""


@dataclass(frozen=True)
class Shape:
    """Shape of the pages of an engine. The scheduler and its workers compute it alike."""

    layers: tuple[str, ...]
    layers_per_page: int
    layer_bytes: int
    """Bytes of one layer of one head group in a block."""
    block_tokens: int
    heads: int
    """Heads of a group."""
    groups: int
    """Head groups of the model. Each of `shards` has equally many."""
    shards: int
    """Ranks with different KV. The others have copies, load them, and write nothing."""

    @property
    def parts(self) -> int:
        """Number of pages of a block in one head group."""
        return len(self.layers) // self.layers_per_page

    @property
    def page_bytes(self) -> int:
        return self.layer_bytes * self.layers_per_page

    def page(self) -> list[int]:
        return [self.block_tokens, self.layers_per_page, self.layer_bytes]

    def is_of(self, names: Mapping[str, Any]) -> bool:
        """True if the namespace of these names has pages of this shape."""
        return (
            names["layers"] == list(self.layers)
            and names["page"] == self.page()
            and names["groups"] == [self.groups, self.heads]
        )

    def rank(self, number: int, ranks: int) -> Rank:
        """Head groups of one of `ranks` ranks. Those with the same KV follow each other."""
        copies, count = ranks // self.shards, self.groups // self.shards
        shard, copy = divmod(number % ranks, copies)
        return Rank(range(shard * count, (shard + 1) * count), copy == 0)

    @staticmethod
    def of(vllm_config: Any, kv_cache_config: Any, ranks_max: int) -> "Shape":
        """Shape of an engine's pages. Raises for a model or engine that the connector does not serve."""
        parallel = vllm_config.parallel_config
        others = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
        if any(getattr(parallel, name, 1) > 1 for name in others):
            raise ValueError("Larder's connector serves tensor and data parallelism only")
        if vllm_config.speculative_config is not None:
            raise ValueError("Larder's connector does not serve speculative decoding")
        groups = kv_cache_config.kv_cache_groups
        spec, layers = groups[0].kv_cache_spec, tuple(groups[0].layer_names)
        if len(groups) != 1 or type(spec) not in SERVED or spec.non_causal:
            raise ValueError("Larder's connector serves models with full causal attention in all layers")
        rank_bytes = int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
        ranks = int(parallel.tensor_parallel_size)
        count, shards = divided_heads(vllm_config, spec, ranks, ranks_max) or undivided_heads(kv_cache_config, ranks)
        layer_bytes = rank_bytes * shards // count
        if layer_bytes > PAGE_BYTES_MAX:
            raise ValueError(f"a block has {layer_bytes} bytes per layer, at most {PAGE_BYTES_MAX}: set --block-size")
        joined, heads = joined_layers(len(layers), layer_bytes), int(spec.num_heads) * shards // count
        return Shape(layers, joined, layer_bytes, int(spec.block_size), heads, count, shards)


def divided_heads(vllm_config: Any, spec: Any, ranks: int, ranks_max: int) -> Optional[tuple[int, int]]:
    """Head groups of a model, and ranks with different heads. None if the cache does not keep heads apart.

    vLLM gives each rank consecutive heads. If it has more ranks than heads, consecutive ranks have copies.
    """
    is_apart = type(spec) is FullAttentionSpec and spec.num_head_slots is None and spec.state_content_bytes is None
    if not is_apart or getattr(spec.kv_quant_mode, "name", spec.kv_quant_mode) not in SPLIT_MODES:
        return None
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    shards = min(heads, ranks)
    if heads % shards or ranks % shards or heads // shards != spec.num_kv_heads:
        return None
    groups = math.gcd(heads, ranks_max)
    return (shards if groups % shards else groups), shards


def undivided_heads(kv_cache_config: Any, ranks: int) -> tuple[int, int]:
    """The same for a cache whose ranks have one group each, or copies of it."""
    shards = max(1, ranks // int(getattr(kv_cache_config, "kv_tp_replicas", 1)))
    return shards, shards


def joined_layers(layers: int, layer_bytes: int) -> int:
    """Layers of a page: the least divisor of `layers` that makes pages long enough, but not too long."""
    fitting = [count for count in range(1, layers + 1) if layers % count == 0 and count * layer_bytes <= PAGE_BYTES_MAX]
    return next((count for count in fitting if count * layer_bytes >= PAGE_BYTES_LEAST), fitting[-1])


def identity(
    vllm_config: Any, kv_cache_config: Any, shape: Shape, model: dict[str, Any], none_hash: bytes, kernels: dict[str, Any]
) -> dict[str, Any]:
    """Everything that distinguishes the bytes of a page, and the meaning of its key."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return {
        "engine": "vllm-connector/2",
        "numerics": kernels,
        "model": vllm_config.model_config.model,
        "weights": model,
        "dtype": [str(vllm_config.cache_config.cache_dtype), str(spec.dtype), str(spec.kv_quant_mode)],
        "layout": kv_cache_config.kv_cache_layout,
        "heads": [spec.head_size, spec.head_size_v],
        # Backends place keys and values differently. vLLM chooses one also by its environment.
        "states": [spec.num_head_slots, int(spec.num_states), int(spec.state_content_size_bytes)],
        "layers": list(shape.layers),
        "page": shape.page(),
        "groups": [shape.groups, shape.heads],
        # The hash of the seed: it differs for other seeds, algorithms and encodings.
        "hash": none_hash.hex(),
    }


def page_keys(hashes: Iterable[bytes], group: int, part: int) -> list[bytes]:
    """Keys of one part of the blocks with `hashes`, for one head group."""
    place = group.to_bytes(4, "little") + part.to_bytes(4, "little")
    return [hashlib.sha256(block + place).digest() for block in hashes]


@dataclass
class Load:
    """Blocks that a worker has to fill. With `follow`, another engine may still be writing them."""

    request_id: str
    follow: bool
    blocks: list[int]
    hashes: list[bytes]


@dataclass
class Save:
    """Blocks that are complete after this step, from the block `first` of their sequence on."""

    first: int
    blocks: Sequence[int]
    hashes: Sequence[bytes]
    parent: Optional[bytes]
    ttl: Optional[float]
    tokens: Sequence[Sequence[int]] = ()
    """Token ids of each block, or nothing."""


@dataclass
class Metadata(KVConnectorMetadata):
    """What the scheduler tells the workers in one step."""

    namespace: Optional[str] = None
    """Identity of the namespace. None if the engine may not use the store."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
