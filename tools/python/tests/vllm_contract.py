"""The part of vLLM 0.33 that a secondary tier sees: types, and a small stand-in for its tiering manager.

vLLM itself needs 7 GB of packages. The stand-in makes the calls of the real manager in the same order, with the same
arguments. `tests/clients/vllm` runs the real one.
"""

import sys
import types
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Optional

import numpy


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class Action:
    action_type: str
    payload: dict
    action_id: str = "1"
    action_version: str = "1"


@dataclass
class Envelope:
    actions: list


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: Optional[dict] = None
    kv_hints: Optional[Envelope] = None
    _offload_key_positions: dict = field(default_factory=dict)


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: Optional[float] = None
    transfer_bytes: Optional[int] = None


class EMABackpressureDetector:
    def __init__(self, high_water_s, low_water_s, failure_threshold=None):
        self.failure_threshold = failure_threshold


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.block_size_bytes = primary_kv_view.strides[0]
        self.bp_detector = backpressure_detector


@dataclass
class Group:
    group_id: int = 0
    tokens_per_block: int = 16
    sliding_window_size_in_chunks: Optional[int] = None
    layer_names: tuple = ("layers.0", "layers.1")


@dataclass
class Parallel:
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = False


class HfConfig:
    """A model's configuration, from a repository or a directory."""

    def __init__(self, commit: Optional[str] = None, **values: Any) -> None:
        self._commit_hash, self.values = commit, {"hidden_size": 512, **values}

    def to_dict(self) -> dict:
        return {**self.values, "_name_or_path": "anything", "transformers_version": "any"}


@dataclass
class ModelConfig:
    """vLLM's `ModelConfig`, with the fields that change KV."""

    model: str = "model"
    model_weights: str = ""
    revision: Optional[str] = None
    code_revision: Optional[str] = None
    hf_config_path: Optional[str] = None
    hf_config: HfConfig = field(default_factory=lambda: HfConfig("0" * 40))
    hf_overrides: Any = field(default_factory=dict)
    dtype: str = "torch.bfloat16"
    quantization: Optional[str] = None
    quantization_config: Any = None
    model_impl: str = "auto"
    model_class_overrides: dict = field(default_factory=dict)
    disable_sliding_window: bool = False
    max_model_len: int = 4096
    heads: int = 4

    def get_total_num_kv_heads(self) -> int:
        return self.heads


def engine_config(load_format: str = "auto", backend: Optional[str] = None, **model: Any) -> types.SimpleNamespace:
    """`VllmConfig`, with its parts that tell the model and its kernels."""
    return types.SimpleNamespace(
        model_config=ModelConfig(**model),
        load_config=types.SimpleNamespace(load_format=load_format),
        attention_config=types.SimpleNamespace(backend=backend),
    )


@dataclass
class Config:
    """`OffloadingConfig`, with its parts that the tier reads."""

    name: str = "model"
    dtype: str = "bfloat16"
    kv_cache_layout: str = "BLNHC"
    canonical_layout: bool = False
    replicated_layout: bool = False
    blocks_per_chunk: int = 1
    tokens_per_hash: int = 16
    worker_kv_bytes_per_block: int = 4096
    groups: tuple = (Group(),)
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def model(self):
        return types.SimpleNamespace(name=self.name, dtype=self.dtype)

    @property
    def cache(self):
        return types.SimpleNamespace(tokens_per_hash=self.tokens_per_hash, blocks_per_chunk=self.blocks_per_chunk)


def key(number, group=0, seed=0):
    """An offload key: hash of a block, and index of its group."""
    return bytes([seed]) * 24 + number.to_bytes(8, "big") + group.to_bytes(4, "big")


class Host:
    """The host cache of an engine, and the manager's calls to its tier."""

    def __init__(self, tier_class, config=None, chunks=16, row_bytes=65536, model=None, **options):
        # A caller of the tier has this, as in vLLM.
        vllm_config = engine_config(**(model or {}))
        self.rows = numpy.zeros((chunks, row_bytes), numpy.uint8)
        self.view = memoryview(self.rows)
        spec = types.SimpleNamespace(config=config or Config())
        assert vllm_config.model_config
        # Keywords, as vLLM's factory passes them.
        self.tier = tier_class(
            offloading_spec=spec,
            primary_kv_view=self.view,
            tier_type="LarderTier",
            backpressure_detector=None,
            **options,
        )
        self.jobs = 0

    def begin(self, name="request", **options):
        context = ReqContext(name, **options)
        self.tier.on_new_request(context)
        return context

    def step(self):
        """The end of a step of the engine."""
        results = list(self.tier.get_finished_jobs())
        self.tier.on_schedule_end(None)
        return results

    def job(self, keys, chunks, context, is_promotion):
        self.jobs += 1
        chunk_ids = numpy.array(chunks, dtype=numpy.int32)
        return TransferJob(self.jobs, keys, chunk_ids, is_promotion, context)

    def store(self, keys, chunks, context):
        self.tier.submit_store(self.job(keys, chunks, context, False))

    def load(self, keys, chunks, context):
        self.tier.submit_load(self.job(keys, chunks, context, True))

    def finish(self):
        """Waits for all jobs, and returns their results."""
        self.tier.drain_jobs()
        return list(self.tier.get_finished_jobs())

    def release(self):
        """The end of the engine, as in vLLM's primary tier. Raises if something still uses the memory."""
        self.tier.shutdown()
        self.view.release()


class Platform:
    device_type = "cuda"

    def get_device_name(self, device_id=0):
        return "NVIDIA H100 80GB HBM3"

    def get_device_capability(self, device_id=0):
        return 9, 0


def install():
    """Provides the modules that the tier imports, once: other modules keep what they have imported."""
    if "vllm" in sys.modules:
        return
    provided = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.logger": {"init_logger": __import__("logging").getLogger},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"NONE_HASH": bytes(32)},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            item.__name__: item for item in (Locality, LookupResult, Medium, RequestOffloadingContext)
        },
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.backpressure": {"EMABackpressureDetector": EMABackpressureDetector},
        "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
    }
    for name, items in provided.items():
        module = types.ModuleType(name)
        module.__dict__.update(items)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
