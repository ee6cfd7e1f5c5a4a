"""The part of vLLM 0.33 and PyTorch that the connector sees, and a small stand-in for vLLM's scheduler and worker.

The stand-in makes the calls of vLLM's scheduler and of its model runner in the same order, with the same arguments. It
computes blocks from the hashes of their tokens, so that each byte of a loaded page is checked. `tests/clients/vllm`
runs the real scheduler and the real PyTorch.
"""

import enum
import hashlib
import pickle
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy
import vllm_contract

BLOCK_TOKENS = 16
LAYERS = ("layers.0", "layers.1", "layers.2", "layers.3")


class Tensor:
    """A tensor in host memory: the operations that the connector uses."""

    device = types.SimpleNamespace(type="cpu")

    def __init__(self, array: numpy.ndarray) -> None:
        self.array = array

    @property
    def shape(self) -> tuple:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def view(self, dtype: Any) -> "Tensor":
        try:
            return Tensor(self.array.view(dtype))
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def unflatten(self, dim: int, sizes: tuple) -> "Tensor":
        view = self.array.reshape(*self.array.shape[:dim], *sizes, *self.array.shape[dim + 1 :])
        assert numpy.shares_memory(view, self.array)
        return Tensor(view)

    def permute(self, *dims: int) -> "Tensor":
        return Tensor(self.array.transpose(dims))

    def index_select(self, dim: int, index: "Tensor") -> "Tensor":
        return Tensor(numpy.take(self.array, index.array, axis=dim))

    def index_copy_(self, dim: int, index: "Tensor", source: "Tensor") -> None:
        assert dim == 0 and source.shape == (len(index.array), *self.array.shape[1:])
        self.array[index.array] = source.array

    def to(self, device: Any, non_blocking: bool = False) -> "Tensor":
        return self

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def __getitem__(self, at: Any) -> "Tensor":
        return Tensor(self.array[at])


def torch_module() -> types.ModuleType:
    module = types.ModuleType("torch")
    for name in ("int64", "int32", "int16", "uint8"):
        setattr(module, name, getattr(numpy, name))
    module.tensor = lambda values, dtype, pin_memory: Tensor(numpy.array(values, dtype))
    module.stack = lambda tensors, dim: Tensor(numpy.stack([tensor.array for tensor in tensors], dim))
    module.empty = lambda shape, dtype, pin_memory: Tensor(numpy.empty(shape, dtype))
    return module


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class SupportsHMA:
    pass


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK_TOKENS
    num_kv_heads: int = 4
    head_size: int = 128
    head_size_v: int = 128
    dtype: str = "bfloat16"
    kv_quant_mode: str = "NONE"
    non_causal: bool = False

    num_head_slots: Optional[int] = None
    state_content_bytes: Optional[int] = None

    @property
    def num_heads(self):
        return self.num_head_slots or self.num_kv_heads

    @property
    def num_states(self):
        return self.block_size

    @property
    def state_content_size_bytes(self):
        return self.state_content_bytes or (self.head_size + self.head_size_v) * 2

    @property
    def page_size_bytes(self):
        return self.num_heads * self.num_states * self.state_content_size_bytes

    unpadded_page_size_bytes = page_size_bytes


class MLAAttentionSpec(FullAttentionSpec):
    pass


class RSWASpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    pass


@dataclass
class Group:
    layer_names: tuple = LAYERS
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)


@dataclass
class KVCacheConfig:
    num_blocks: int = 64
    kv_cache_groups: tuple = field(default_factory=lambda: (Group(),))
    kv_cache_layout: str = "LBNHC"
    kv_tp_replicas: int = 1


def vllm_config(
    url, role="kv_both", policy="recompute", tp=1, rank=0, heads=None, name="model", dtype="auto", model=None, **extra
):
    """`VllmConfig`, with its parts that the connector reads."""
    transfer = types.SimpleNamespace(
        kv_connector_extra_config={"url": url, **extra},
        kv_load_failure_policy=policy,
        is_kv_producer=role in ("kv_producer", "kv_both"),
        is_kv_consumer=role in ("kv_consumer", "kv_both"),
    )
    parallel = types.SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        rank=rank,
        use_ubatching=False,
    )
    config = vllm_contract.engine_config(model=name, heads=heads or 4 * tp, **(model or {}))
    config.kv_transfer_config, config.parallel_config = transfer, parallel
    config.speculative_config, config.cache_config = None, types.SimpleNamespace(cache_dtype=dtype)
    return config


class Request:
    """A request with a prompt. Equal seeds begin equally."""

    def __init__(self, name: str, tokens: int, seed: int = 0, params: Optional[dict] = None) -> None:
        self.request_id, self.num_tokens, self.num_prompt_tokens = name, tokens, tokens
        self.kv_transfer_params = params
        self.all_token_ids = list(range(seed, seed + tokens))
        self.block_hashes = []
        previous = seed.to_bytes(32, "big")
        for _ in range(tokens // BLOCK_TOKENS):
            previous = hashlib.sha256(previous).digest()
            self.block_hashes.append(previous)


@dataclass
class Blocks:
    ids: list

    def get_block_ids(self):
        return (self.ids,)


@dataclass
class Tables:
    """`KVConnectorBlockState`."""

    tables: dict

    def get_block_ids(self, request_id):
        return (self.tables[request_id],) if request_id in self.tables else None


@dataclass
class Output:
    """`KVConnectorOutput`."""

    finished_recving: Optional[set] = None
    invalid_block_ids: set = field(default_factory=set)


class Engine:
    """Scheduler and workers of one engine. `kernel_blocks` is the number of kernel blocks in a block."""

    def __init__(self, connector_class, config, kv_config=None, kernel_blocks=1, ranks=1):
        self.kv_config = kv_config or KVCacheConfig()
        self.scheduler = connector_class(config(0), KVConnectorRole.SCHEDULER, kv_cache_config=self.kv_config)
        self.workers = [
            connector_class(config(rank), KVConnectorRole.WORKER, kv_cache_config=self.kv_config)
            for rank in range(ranks)
        ]
        self.ranks, self.total_heads = ranks, config(0).model_config.heads
        self.heads = self.kv_config.kv_cache_groups[0].kv_cache_spec.num_kv_heads
        count, tokens = self.kv_config.num_blocks * kernel_blocks, BLOCK_TOKENS // kernel_blocks
        shape = (count, self.heads, tokens, 256)
        self.caches = [{name: numpy.zeros(shape, numpy.uint16) for name in LAYERS} for _ in range(ranks)]
        for worker, caches in zip(self.workers, self.caches):
            worker.register_kv_caches({name: Tensor(cache) for name, cache in caches.items()})
        self.per_block = kernel_blocks
        self.free = list(range(1, self.kv_config.num_blocks))
        self.reports = {}
        self.computed = 0

    def content(self, rank, layer, block_hash):
        """Bytes that this engine computes for a block in a layer: those of the heads of the rank, one after the other."""
        first, size = rank * self.total_heads // self.ranks, BLOCK_TOKENS * 256 * 2
        seeds = [f"{head} {layer}".encode() + block_hash for head in range(first, first + self.heads)]
        return numpy.frombuffer(b"".join(hashlib.shake_128(seed).digest(size) for seed in seeds), numpy.uint16)

    def rows(self, rank, layer, block):
        first = block * self.per_block
        return self.caches[rank][layer][first : first + self.per_block]

    def forward(self, metadata, compute):
        """A step of the workers. `compute` has the blocks to compute, and the hash of each."""
        output = Output()
        metadata = pickle.loads(pickle.dumps(metadata))
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(metadata)
            for layer in LAYERS:
                if not compute:
                    break
                worker.wait_for_layer_load(layer)
                for block, block_hash in compute:
                    self.rows(rank, layer, block).reshape(-1)[:] = self.content(rank, layer, block_hash)
                worker.save_kv_layer(layer, None, None)
            worker.start_load_kv(None)
            worker.wait_for_save()
            sent, received = worker.get_finished(set())
            assert sent is None
            for name in received or ():
                # vLLM's aggregator reports a request when all workers have.
                self.reports[name] = self.reports.get(name, 0) + 1
                assert self.reports[name] <= len(self.workers)
                if self.reports[name] == len(self.workers):
                    del self.reports[name]
                    output.finished_recving = (output.finished_recving or set()) | {name}
            output.invalid_block_ids |= worker.get_block_ids_with_load_errors()
            worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return output

    def schedule(self, new=(), cached=(), counts=None, tables=None):
        scheduled = types.SimpleNamespace(
            scheduled_new_reqs=[types.SimpleNamespace(req_id=n, num_computed_tokens=c) for n, c in new],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=[n for n, _ in cached], num_computed_tokens=[c for _, c in cached]
            ),
            num_scheduled_tokens=counts or {},
            kv_connector_block_state=Tables(tables or {}),
        )
        return self.scheduler.build_connector_meta(scheduled)

    def match(self, request, local=0, seconds=60.0):
        """Asks in every step until there is an answer, as the scheduler does."""
        end = time.monotonic() + seconds
        while True:
            count, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
            if count is not None:
                assert is_async == (count > 0)
                return count
            assert time.monotonic() < end, "no answer in time"
            self.forward(self.schedule(), [])
            time.sleep(0.002)

    def load(self, request, table, tokens, seconds=60.0):
        """Loads `tokens` tokens. Returns the tokens that are valid afterwards."""
        self.scheduler.update_state_after_alloc(request, Blocks(table), tokens)
        end = time.monotonic() + seconds
        metadata, invalid = self.schedule(), set()
        while True:
            output = self.forward(metadata, [])
            invalid |= output.invalid_block_ids
            if output.finished_recving:
                assert output.finished_recving == {request.request_id}
                break
            assert time.monotonic() < end, "the load does not end"
            metadata = self.schedule()
            time.sleep(0.002)
        bad = [at for at, block in enumerate(table) if block in invalid]
        return (bad[0] if bad else len(table)) * BLOCK_TOKENS

    def run(self, request, chunk=None, local=0):
        """Runs the prompt of a request. Returns its table, and the tokens that were loaded."""
        self.scheduler.on_new_request(request)
        blocks = -(-request.num_tokens // BLOCK_TOKENS)
        table = [self.free.pop(0) for _ in range(blocks)]
        done = local
        matched = self.match(request, local)
        if matched:
            loaded = self.load(request, table[: (local + matched) // BLOCK_TOKENS], matched)
            done = max(local, min(loaded, request.num_tokens - 1))
        self.scheduler.update_state_after_alloc(request, Blocks(table), 0)
        hit, is_new = done - local, True
        while done < request.num_tokens:
            count = min(chunk or request.num_tokens, request.num_tokens - done)
            name, place = request.request_id, [(request.request_id, done)]
            metadata = self.schedule(
                place if is_new else (), () if is_new else place, {name: count}, {name: table}
            )
            whole = range(done // BLOCK_TOKENS, (done + count) // BLOCK_TOKENS)
            self.forward(metadata, [(table[at], request.block_hashes[at]) for at in whole])
            self.computed += count
            done, is_new = done + count, False
        return table, hit

    def finish(self, request, table):
        delay, params = self.scheduler.request_finished_all_groups(request, (table,))
        assert delay is False
        # The blocks are reused at once.
        for rank in range(len(self.workers)):
            for layer in LAYERS:
                for block in table:
                    self.rows(rank, layer, block)[:] = 0xDEAD
        self.free = table + self.free
        return params

    def is_right(self, request, table, blocks):
        """True if the first blocks of a request have the bytes that an engine computes."""
        return all(
            (self.rows(rank, layer, table[at]).reshape(-1) == self.content(rank, layer, request.block_hashes[at])).all()
            for rank in range(len(self.workers))
            for layer in LAYERS
            for at in range(blocks)
        )

    def settle(self):
        """Waits until all pages are put."""
        for worker in self.workers:
            publisher = worker.worker.publisher
            size = worker.worker.options.staging_bytes
            end = time.monotonic() + 60
            while publisher.budget.left < size:
                assert time.monotonic() < end
                time.sleep(0.002)

    def close(self):
        for worker in self.workers:
            worker.shutdown()


def install():
    """Provides the modules that the connector imports, beside those of the tier. Returns the connector's module."""
    vllm_contract.install()
    base = (KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA)
    provided = {
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {item.__name__: item for item in base},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": FullAttentionSpec,
            "MLAAttentionSpec": MLAAttentionSpec,
        },
    }
    for name, items in provided.items():
        module = types.ModuleType(name)
        module.__dict__.update(items)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    others = sys.modules.get("torch")
    sys.modules["torch"] = torch_module()
    try:
        import larder_kv.vllm_connector as connector
    finally:
        # Other contracts have their own.
        if others is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = others
    return connector
