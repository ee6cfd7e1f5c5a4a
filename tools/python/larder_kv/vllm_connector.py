"""vLLM's prefill and decode through Larder: a `KVConnectorBase_V1` of vLLM 0.33.

    --kv-transfer-config '{"kv_connector": "LarderConnector", "kv_connector_module_path": "larder_kv.vllm_connector",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config":
        {"url": "larder://127.0.0.1:7700", "weights": "my-model, revision 3"}}'

A prefill engine publishes each layer of its blocks while it computes the next. A decode engine follows them. Both also
use the store as a cache of prefixes. Loads run between steps, so no step waits for the store, and none raises
because of it: a page that does not arrive is a block that vLLM computes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from . import _numerics
from ._client import Client
from ._vllm_model import attention_of, model_of
from ._vllm_pages import Load, Metadata, Options, Save, Shape, identity, page_keys
from ._vllm_store import RequestOptions, SchedulerStore, open_client
from ._vllm_worker import Worker

LOOKUP_KEYS = 8192
"""Keys of one lookup, so that hashing them takes a step of the scheduler a few milliseconds. Most prompts need fewer."""


@dataclass
class _Request(RequestOptions):
    """What the scheduler knows of a request and its blocks."""

    request: Any
    follow: bool = False
    hands_over: bool = False
    first: int = 0
    """First block that the last answer to vLLM was about."""
    found: Optional[tuple[int, int]] = None
    """Blocks that the store has: the first, and the one after the last."""
    is_asking: bool = False
    loaded: range = range(0)
    """Blocks that came from the store, and need not be published again."""
    saved: Optional[int] = None
    """Blocks that are published, or need not be. None before the first step."""

    @staticmethod
    def of(request: Any) -> "_Request":
        state = _Request(request)
        params = getattr(request, "kv_transfer_params", None) or {}
        ours = state.take(params)
        state.follow = params.get("do_remote_prefill") is True or ours.get("follow") is True
        state.hands_over = params.get("do_remote_decode") is True
        return state


@dataclass
class _Loading:
    """A load that the workers have not reported yet."""

    state: _Request
    blocks: set[int] = field(default_factory=set)


class Scheduler:
    """Scheduler side: decides which blocks are loaded and stored. No method waits."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options, shape: Shape) -> None:
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.options, self.shape = options, shape
        transfer = vllm_config.kv_transfer_config
        self.is_producer, self.is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        self.kernels = _numerics.numerics(options.numerics, "vllm", attention_of(vllm_config))
        self.model = model_of(vllm_config, options.weights)
        self.store = SchedulerStore(self.connect)
        self.identity: Optional[str] = None
        self.requests: dict[str, _Request] = {}
        self.loading: dict[str, _Loading] = {}
        self.loads: list[Load] = []

    def connect(self, none_hash: bytes) -> Client:
        names = identity(self.vllm_config, self.kv_cache_config, self.shape, self.model, none_hash, self.kernels)
        text, model = json.dumps(names, sort_keys=True), str(self.vllm_config.model_config.model)
        client = open_client(
            self.options.url, self.options.tenant, model, self.shape.page_bytes, text, "vllm-scheduler"
        )
        self.identity = text
        return client

    # Loads.

    def state(self, request: Any) -> _Request:
        state = self.requests.get(request.request_id)
        if state is None:
            state = self.requests[request.request_id] = _Request.of(request)
        return state

    def matched(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        """Tokens after the first `computed` ones that can be loaded. None if the store has not answered yet."""
        state = self.state(request)
        if not self.is_consumer or not state.load or self.store.attach() is None:
            return 0, False
        self.store.poll()
        if not self.store.is_connected:
            return None, False
        tokens = self.shape.block_tokens
        first, end = computed // tokens, min(len(request.block_hashes), request.num_tokens // tokens)
        if first < end and not state.follow:
            found = self.find(state, first, end)
            if found is None:
                return None, False
            end = min(end, found)
        state.first = first
        count = max(0, end - first)
        return count * tokens, count > 0

    def find(self, state: _Request, first: int, end: int) -> Optional[int]:
        """Block after the last one that the store has in a row from `first` on. None until the store has answered."""
        if state.found is not None and state.found[0] <= first:
            return max(first, state.found[1])
        if state.is_asking:
            return None
        # An answer about later blocks says nothing of these: vLLM's own cache has lost them since.
        state.is_asking, state.found = True, None
        self.ask(state, first, first, end)
        return None if state.found is None else max(first, state.found[1])

    def ask(self, state: _Request, first: int, start: int, end: int) -> None:
        """Asks for blocks from `start` on. The store has those from `first` on before them."""
        # The first and the last layer stand for all. If another is gone the load fails there, and vLLM computes.
        parts = sorted({0, self.shape.parts - 1})
        rows = self.shape.groups * len(parts)
        stop = min(end, start + max(1, LOOKUP_KEYS // rows))
        hashes = state.request.block_hashes[start:stop]
        asked = [page_keys(hashes, group, part) for group in range(self.shape.groups) for part in parts]

        def done(tiers: Any) -> None:
            whole = [all(tiers[at * rows : (at + 1) * rows]) for at in range(len(hashes))] if tiers else []
            count = next((at for at, is_whole in enumerate(whole) if not is_whole), len(whole))
            if count == len(hashes) and stop < end:
                self.ask(state, first, stop, end)
                return
            state.is_asking = False
            state.found = (first, start + count)

        keys = [key for block in zip(*asked) for key in block]
        self.store.call(done, "locate", keys, self.options.lookup_timeout)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Plans the load of `tokens` tokens into the blocks of a request."""
        state = self.state(request)
        # vLLM asks again after a preemption. The store can have more by then, such as the request's own blocks.
        state.found = None
        if tokens <= 0:
            return
        (table,) = blocks.get_block_ids()
        first, end = state.first, state.first + tokens // self.shape.block_tokens
        ids = list(table[first:end])
        self.loads.append(Load(request.request_id, state.follow, ids, list(request.block_hashes[first:end])))
        self.loading[request.request_id] = _Loading(state, set(ids))
        state.loaded = range(first, end)
        # A request follows once. If it is scheduled again, it takes what the store has by then.
        state.follow = False

    def reported(self, output: Any) -> None:
        """Takes the reports of the workers."""
        self.store.poll()
        # A worker reports its errors when it has ended. The request ends when all workers have.
        if output.invalid_block_ids:
            for loading in self.loading.values():
                if not loading.blocks.isdisjoint(output.invalid_block_ids):
                    # Another load of the same pages could fail for ever.
                    loading.state.load = False
                    loading.state.loaded = range(0)
                    # Blocks that a preempted request had published are gone, too.
                    loading.state.saved = None
        for request_id in output.finished_recving or ():
            self.loading.pop(request_id, None)

    # Stores.

    def metadata(self, scheduled: Any) -> Metadata:
        """What the workers have to do in this step."""
        self.store.poll()
        loads, self.loads = self.loads, []
        saves = list(self.saves(scheduled)) if self.is_producer and self.store.attach() is not None else []
        return Metadata(self.identity, loads, saves)

    def saves(self, scheduled: Any) -> Iterator[Save]:
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            state = self.requests.get(request_id)
            if state is not None and state.store and request_id in before:
                yield from self.saves_of(state, before[request_id], count, scheduled.kv_connector_block_state)

    def saves_of(self, state: _Request, before: int, count: int, tables: Any) -> Iterator[Save]:
        tokens, request = self.shape.block_tokens, state.request
        end = min((before + count) // tokens, len(request.block_hashes))
        if not self.options.save_decode:
            end = min(end, request.num_prompt_tokens // tokens)
        if state.saved is None:
            # Blocks of vLLM's own cache were published when they were computed. The store may have evicted them, and
            # a decode engine follows all, so they are published again for it.
            state.saved = 0 if state.hands_over else before // tokens
        if end <= state.saved:
            return
        ids = None if tables is None else tables.get_block_ids(request.request_id)
        if ids is None:
            return
        (table,) = ids
        end = min(end, len(table))
        start, state.saved = state.saved, max(state.saved, end)
        for run in (range(start, min(end, state.loaded.start)), range(max(start, state.loaded.stop), end)):
            if len(run):
                yield self.save(state, run, table)

    def save(self, state: _Request, run: range, table: Sequence[int]) -> Save:
        hashes = state.request.block_hashes
        parent = hashes[run.start - 1] if run.start else None
        blocks, names = list(table[run.start : run.stop]), list(hashes[run.start : run.stop])
        return Save(run.start, blocks, names, parent, state.ttl, self.tokens(state, run))

    def tokens(self, state: _Request, run: range) -> list[list[int]]:
        """Token ids of the blocks. Nothing if the content of the blocks depends on more than their tokens."""
        request, size = state.request, self.shape.block_tokens
        ids = getattr(request, "all_token_ids", None)
        others = (getattr(request, name, None) for name in ("mm_features", "lora_request", "cache_salt"))
        if ids is None or getattr(request, "prompt_embeds", None) is not None or any(others):
            return []
        blocks = [list(ids[block * size : (block + 1) * size]) for block in run]
        return blocks if all(len(block) == size and min(block) >= 0 for block in blocks) else []

    def ended(self, request: Any) -> Optional[dict[str, Any]]:
        """Forgets a request. Returns what a proxy passes to the decode engine."""
        state = self.requests.pop(request.request_id, None)
        if state is None or not state.hands_over:
            return None
        return {"do_remote_prefill": True, "do_remote_decode": False}


class LarderConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector to a Larder store. vLLM has one in its scheduler, and one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config)
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise ValueError('set "kv_load_failure_policy": "recompute": otherwise a lost page fails its request')
        shape = Shape.of(vllm_config, kv_cache_config, options.tensor_parallel_max)
        parallel = vllm_config.parallel_config
        # With micro-batches a layer is computed in pieces, so its call does not mean that it is complete.
        self.is_layerwise = options.layerwise and not getattr(parallel, "use_ubatching", False)
        self.scheduler: Optional[Scheduler] = None
        self.worker: Optional[Worker] = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = Scheduler(vllm_config, kv_cache_config, options, shape)
        else:
            model = str(vllm_config.model_config.model)
            rank = shape.rank(parallel.rank, parallel.tensor_parallel_size)
            self.worker = Worker(options, shape, model, kv_cache_config.num_blocks, rank)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Graphs of whole steps make no calls for layers."""
        return bool(extra_config.get("layerwise", True))

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not stored is a miss."""
        return False

    # Scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[Optional[int], bool]:
        assert self.scheduler is not None
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        assert self.scheduler is not None
        return self.scheduler.metadata(scheduler_output)

    def on_new_request(self, request: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.state(request)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.reported(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Blocks may be freed at once: the device reads them before later steps overwrite them."""
        assert self.scheduler is not None
        return False, self.scheduler.ended(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Optional[dict[str, Any]]]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> Optional[bool]:
        """The store keeps its pages, so a reset for new weights fails: restart with another `weights`."""
        return False if self.scheduler is not None else None

    # Workers.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.worker is not None
        self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        self.worker.start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns at once: a request is scheduled when all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self.is_layerwise and self.worker is not None:
            self.worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        assert self.worker is not None
        self.worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]], Optional[set[str]]]:
        assert self.worker is not None
        return None, self.worker.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.take_errors()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
