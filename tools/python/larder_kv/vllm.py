"""vLLM's tiered KV offloading on Larder: a `SecondaryTierManager` of vLLM 0.33.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers":
        [{"type": "LarderTier", "module_path": "larder_kv.vllm", "url": "larder://127.0.0.1:7700",
          "weights": "my-model, revision 3"}]}}'

A chunk of vLLM is a page of the store: one row of the host cache, with the blocks of all ranks. vLLM calls the tier
from its scheduler. No method waits, except `drain_jobs` and `shutdown`, and none raises because of the store. Calls run
on the client's threads, and each ends by its timeout: a store that is away is a miss.
"""

import hashlib
import json
import select
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Optional

import numpy
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.backpressure import EMABackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from . import _numerics
from ._client import Client, PutOutcome
from ._native import Pointer
from ._vllm_model import attention_of, engine_config, model_of
from ._vllm_store import (
    BUSY_RETRIES,
    PAGE_BYTES_MAX,
    RequestOptions,
    SchedulerStore,
    check_options,
    open_client,
)

logger = init_logger("vllm.larder")

FRAGMENTS_MAX = 64

# After "refused" the store has the page with other bytes: the numerics of an engine depend on its batches. The first
# writer's page is as good. After "in-progress" another engine writes it.
STORED: frozenset[PutOutcome] = frozenset({"stored", "already-there", "refused", "in-progress"})

RELEASE_SECONDS = 5.0
"""Longest time for which `shutdown` waits until no transfer can touch the host cache."""

# vLLM's detector drops stores to a tier that fails three times in a row, and probes it again after seconds. Pressure by
# latency is off: a job's latency has at least one step of the engine, which says nothing about the store.
FAILURES_UNTIL_PRESSURE = 3
NO_LATENCY_LIMIT = 60.0

HINTS = ("prefetch", "retain", "pin")
"""Hints that requests may give. `forget` is allowed only if the configuration names it."""


def fragments_of(row_bytes: int) -> int:
    """Number of equal store pages that hold one row of the host cache."""
    for count in range(1, FRAGMENTS_MAX + 1):
        if row_bytes % count == 0 and row_bytes // count <= PAGE_BYTES_MAX:
            return count
    raise ValueError(f"rows of {row_bytes} bytes cannot be cut into pages of the store: set another blocks_per_chunk")


def identity(
    config: Any, row_bytes: int, model: dict[str, Any], none_hash: bytes, kernels: dict[str, Any]
) -> dict[str, Any]:
    """Everything that distinguishes the bytes of a page, and the meaning of its key."""
    parallel = config.parallel
    groups = [
        [group.group_id, group.tokens_per_block, group.sliding_window_size_in_chunks, list(group.layer_names)]
        for group in config.groups
    ]
    ranks = [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    # vLLM then orders the bytes of a row as one rank would. It refuses to start if it cannot.
    is_portable = config.canonical_layout and parallel.is_parallelism_agnostic
    return {
        "engine": "vllm/2",
        "numerics": kernels,
        "model": config.model.name,
        "weights": model,
        "dtype": config.model.dtype,
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "groups": groups,
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "bytes": [0 if is_portable else config.worker_kv_bytes_per_block, row_bytes],
        "ranks": None if is_portable else ranks,
        # The hash of the seed: it differs for other seeds, algorithms and encodings.
        "hash": none_hash.hex(),
    }


@dataclass
class _Verdict:
    """Answer to the lookup of a key, shared by the requests that ask for it."""

    found: Optional[bool] = None
    requests: set[str] = field(default_factory=set)


@dataclass
class _Job:
    """A transfer of chunks between the host cache and the store."""

    number: int
    keys: list[bytes]
    is_load: bool
    request: "_Request"
    began: float = field(default_factory=time.monotonic)
    calls: int = 0
    moved: set[bytes] = field(default_factory=set)


@dataclass
class _Request(RequestOptions):
    """Options of a request, and what the tier knows of its chunks."""

    hints: dict[str, float] = field(default_factory=dict)
    asked: set[bytes] = field(default_factory=set)
    pages: set[bytes] = field(default_factory=set)
    at: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    stores: int = 0
    finished: bool = False

    def note_positions(self, positions: dict[bytes, int]) -> None:
        """Adds the keys that the scheduler has placed since the last call. The table of the scheduler only grows."""
        for key, end in islice(positions.items(), len(self.at), None):
            self.at[key[-4:], end] = key


class LarderTier(SecondaryTierManager):
    """A secondary tier in a Larder store. vLLM calls it under one lock."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str,
        weights: str = "",
        numerics: str = "",
        tenant: str = "default",
        locality: Optional[str] = None,
        lookup_timeout: float = 0.5,
        load_timeout: float = 5.0,
        store_timeout: float = 5.0,
        hints: Sequence[str] = HINTS,
    ) -> None:
        if backpressure_detector is None:
            backpressure_detector = EMABackpressureDetector(
                NO_LATENCY_LIMIT, NO_LATENCY_LIMIT, failure_threshold=FAILURES_UNTIL_PRESSURE
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not primary_kv_view.c_contiguous:
            raise ValueError("the host cache of vLLM is not contiguous")
        self.locality = None if locality is None else Locality(locality)
        self.config = offloading_spec.config
        self.url, self.tenant, self.hints = url, tenant, frozenset(hints)
        vllm_config = engine_config()
        self.model = model_of(vllm_config, weights)
        self.kernels = _numerics.numerics(numerics, "vllm", attention_of(vllm_config))
        self.timeouts = float(lookup_timeout), float(load_timeout), float(store_timeout)
        check_options(url, tenant, *self.timeouts)
        self.memory: Any = numpy.frombuffer(primary_kv_view, numpy.uint8)
        self.address = self.memory.ctypes.data
        self.fragments = fragments_of(self.block_size_bytes)
        self.page_bytes = self.block_size_bytes // self.fragments
        self.row_count = primary_kv_view.shape[0]
        self.store_chunks_max = max(1, self.row_count // 2)
        self.store_chunks = 0

        self.store = SchedulerStore(self.connect)
        self.jobs: dict[int, _Job] = {}
        self.results: list[JobResult] = []
        self.verdicts: dict[bytes, _Verdict] = {}
        self.batch: list[bytes] = []
        self.requests: dict[str, _Request] = {}

    def connect(self, none_hash: bytes) -> Client:
        names = identity(self.config, self.block_size_bytes, self.model, none_hash, self.kernels)
        text, model = json.dumps(names, sort_keys=True), str(self.config.model.name)
        return open_client(self.url, self.tenant, model, self.page_bytes, text, "vllm")

    def page_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        """Keys of the store: one for each fragment of each chunk."""
        numbers = [number.to_bytes(4, "little") for number in range(self.fragments)]
        return [hashlib.sha256(key + number).digest() for key in keys for number in numbers]

    def memory_of(self, chunks: Iterable[int]) -> list[Pointer]:
        """Memory of each fragment of the chunks."""
        starts = (self.address + int(chunk) * self.block_size_bytes for chunk in chunks)
        size, offsets = self.page_bytes, range(0, self.block_size_bytes, self.page_bytes)
        return [Pointer(start + offset, size, self.memory) for start in starts for offset in offsets]

    def whole(self, keys: Sequence[bytes], fragments: Sequence[bool]) -> Iterator[bytes]:
        """Keys of the chunks that have all their fragments."""
        count = self.fragments
        return (key for at, key in enumerate(keys) if all(fragments[at * count : (at + 1) * count]))

    # Requests.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self.store.attach()
        request = self.request(req_context)
        request.take(req_context.kv_transfer_params)
        for action in getattr(req_context.kv_hints, "actions", ()):
            seconds = action.payload.get("duration_s", 0)
            if action.action_type in self.hints and isinstance(seconds, (int, float)) and 0 <= seconds < 1e9:
                request.hints[action.action_type] = float(seconds)
            else:
                logger.debug("Larder: hint %s of type %s is not taken", action.action_id, action.action_type)
        return RequestOffloadingContext()

    def request(self, req_context: Any) -> _Request:
        return self.requests.setdefault(req_context.req_id, _Request())

    def on_request_finished(self, req_context: Any) -> None:
        request = self.requests.pop(req_context.req_id, None)
        if request is None:
            return
        for key in request.asked:
            verdict = self.verdicts[key]
            verdict.requests.discard(req_context.req_id)
            if not verdict.requests:
                del self.verdicts[key]
        request.finished = True
        self.apply_hints(request)

    def apply_hints(self, request: _Request) -> None:
        """Executes the hints for the chunks of a request that has ended. Later stores would escape them."""
        if not request.finished or request.stores or not request.pages or self.store.client is None:
            return
        keys, timeout = self.page_keys(request.pages), self.timeouts[2]
        for hint, kind in (("retain", "soft"), ("pin", "hard")):
            if request.hints.get(hint):
                self.store.call(ignore, "pin", keys, timeout, ttl=request.hints[hint], kind=kind)
        if "forget" in request.hints:
            self.store.call(ignore, "forget", keys, timeout)

    # Lookups: one call for all keys of a step.

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        request = self.request(req_context)
        if not request.load or self.store.attach() is None:
            return LookupResult.MISS
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.verdicts[key] = _Verdict()
            self.batch.append(key)
        verdict.requests.add(req_context.req_id)
        request.asked.add(key)
        if verdict.found is None:
            return LookupResult.RETRY
        if verdict.found and request.hints:
            request.pages.add(key)
        return LookupResult.HIT if verdict.found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self.store.poll()
        if not self.store.is_connected or not self.batch:
            return
        # A key that was asked for again has two entries. Requests that have ended leave entries without verdict.
        asked = {key: self.verdicts[key] for key in self.batch if key in self.verdicts}
        self.batch.clear()
        keys = list(asked)

        def done(found: Any) -> None:
            hits = set() if found is None else set(self.whole(keys, found))
            for key, verdict in asked.items():
                verdict.found = key in hits
            self.prefetch(asked, hits)

        if keys:
            self.store.call(done, "locate", self.page_keys(keys), self.timeouts[0])

    def prefetch(self, asked: dict[bytes, _Verdict], hits: set[bytes]) -> None:
        """Brings chunks from L3 to L2 before the scheduler asks for them."""
        hinted = {name for name, request in self.requests.items() if "prefetch" in request.hints}
        wanted = [key for key in hits if not hinted.isdisjoint(asked[key].requests)]
        if wanted:
            self.store.call(ignore, "warm", self.page_keys(wanted), self.timeouts[1])

    # Transfers.

    def submit_store(self, job_metadata: Any) -> None:
        request = self.request(job_metadata.req_context)
        job = _Job(job_metadata.job_id, list(job_metadata.keys), False, request)
        places = dict(zip(job.keys, job_metadata.chunk_ids))
        if not request.store:
            self.results.append(JobResult(job.number, True))
            return
        is_full = self.store_chunks and self.store_chunks + len(places) > self.store_chunks_max
        if is_full or not self.can_move(job_metadata):
            # Chunks in flight cannot leave the host cache, so a slow store would take all of it.
            self.results.append(JobResult(job.number, False))
            return
        self.store_chunks += len(job.keys)
        request.stores += 1
        if request.hints:
            request.pages.update(job.keys)
        runs = list(self.runs(job.keys, job_metadata.req_context))
        self.start(job, len(runs))
        for run, place in runs:
            self.put(job, run, places, place)

    def put(self, job: _Job, run: list[bytes], places: dict[bytes, int], place: dict[str, Any]) -> None:
        def done(outcomes: Any) -> None:
            stored = [outcome in STORED for outcome in outcomes or [None] * (len(run) * self.fragments)]
            self.end_call(job, self.whole(run, stored))

        memory = self.memory_of(places[key] for key in run)
        options = dict(place, ttl=job.request.ttl, busy_retries=BUSY_RETRIES)
        self.store.call(done, "put_from", self.page_keys(run), memory, self.timeouts[2], **options)

    def runs(self, keys: list[bytes], req_context: Any) -> Iterator[tuple[list[bytes], dict[str, Any]]]:
        """Cuts keys into runs of consecutive chunks, with the place of each run in its sequence. Eviction uses it."""
        positions = getattr(req_context, "_offload_key_positions", {})
        if self.fragments > 1 or any(key not in positions for key in keys):
            yield keys, {}
            return
        request = self.request(req_context)
        request.note_positions(positions)
        blocks = self.config.cache.blocks_per_chunk
        spans = {group.group_id.to_bytes(4, "big"): group.tokens_per_block * blocks for group in self.config.groups}
        run: list[bytes] = []
        for key in sorted(keys, key=lambda key: (key[-4:], positions[key])):
            group, end = key[-4:], positions[key]
            span = spans.get(group, end)
            if run and (run[-1][-4:] != group or positions[run[-1]] + span != end):
                yield run, self.place(request, run[0], positions, spans)
                run = []
            run.append(key)
        if run:
            yield run, self.place(request, run[0], positions, spans)

    def place(
        self, request: _Request, key: bytes, positions: dict[bytes, int], spans: dict[bytes, int]
    ) -> dict[str, Any]:
        group, end = key[-4:], positions[key]
        span = spans.get(group, end)
        parent = request.at.get((group, end - span))
        if parent is None and end > span:
            return {}
        return {"parent": self.page_keys([parent])[0] if parent else None, "position": max(0, end // span - 1)}

    def submit_load(self, job_metadata: Any) -> None:
        job = _Job(job_metadata.job_id, list(job_metadata.keys), True, self.request(job_metadata.req_context))
        if not self.can_move(job_metadata):
            self.results.append(JobResult(job.number, False))
            return

        def done(tiers: Any) -> None:
            read = [tier is not None for tier in tiers or [None] * (len(job.keys) * self.fragments)]
            self.end_call(job, self.whole(job.keys, read))

        self.start(job, 1)
        memory = self.memory_of(job_metadata.chunk_ids)
        self.store.call(done, "get_into", self.page_keys(job.keys), memory, self.timeouts[1], busy_retries=BUSY_RETRIES)

    def can_move(self, job_metadata: Any) -> bool:
        """False if there is no client, or if the job has chunks outside of the host cache."""
        chunks = job_metadata.chunk_ids
        if len(chunks) != len(job_metadata.keys) or any(not 0 <= int(chunk) < self.row_count for chunk in chunks):
            logger.error("Larder: job %s names chunks that do not exist", job_metadata.job_id)
            return False
        return self.store.attach() is not None

    def start(self, job: _Job, calls: int) -> None:
        self.jobs[job.number] = job
        job.calls = calls
        if not calls:
            self.end(job)

    def end_call(self, job: _Job, moved: Iterable[bytes]) -> None:
        job.moved.update(moved)
        job.calls -= 1
        if job.calls == 0:
            self.end(job)

    def end(self, job: _Job) -> None:
        del self.jobs[job.number]
        failed = [key for key in job.keys if key not in job.moved]
        successful: Optional[Collection[bytes]] = None
        if job.is_load:
            successful = tuple(job.moved) if failed and job.moved else None
            for key in failed:
                # Otherwise the scheduler would ask for the same load for ever.
                if key in self.verdicts:
                    self.verdicts[key].found = False
        else:
            self.store_chunks -= len(job.keys)
            job.request.stores -= 1
            self.apply_hints(job.request)
        seconds, moved_bytes = time.monotonic() - job.began, len(job.moved) * self.block_size_bytes
        self.results.append(JobResult(job.number, not failed, successful, seconds, moved_bytes))

    def get_finished_jobs(self) -> list[JobResult]:
        self.store.poll()
        results, self.results = self.results, []
        return results

    def drain_jobs(self) -> None:
        """Waits until all jobs have ended. Their timeouts bound this."""
        while self.jobs:
            select.select([self.store.completions.fileno()], [], [], 1.0)
            self.store.poll()

    def shutdown(self) -> None:
        """Ends all jobs, and returns once no transfer can touch the host cache. Raises if that takes too long."""
        self.drain_jobs()
        self.store.close()
        if self.memory is None:
            return
        memory = weakref.ref(self.memory)
        self.memory = None
        deadline = time.monotonic() + RELEASE_SECONDS
        while memory() is not None:
            if time.monotonic() > deadline:
                raise RuntimeError("a transfer still holds the host cache; vLLM must not unmap it")
            time.sleep(0.01)
            # References that threads of the client dropped end when a thread of Python enters the module.
            self.store.completions.drain()


def ignore(_: Any) -> None:
    """Result of a hint: losing it costs time, not correctness."""
