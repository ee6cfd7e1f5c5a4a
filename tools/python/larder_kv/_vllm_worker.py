"""Worker side of the vLLM connector: moves rows between device caches and the store.

Invariants:
- Nothing raises or waits in a step of the engine, except while vLLM starts. A store that is away costs misses.
- Rows in host memory are bounded: `staging_bytes` for stores, and a window for loads. Rows beyond them are not stored,
  or are loaded later.
- A load ends exactly once, with the blocks that it has not filled.
"""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from vllm.logger import init_logger

from ._client import Client
from ._native import Pointer
from ._vllm_layers import LayerCaches, Staged
from ._vllm_pages import Load, Metadata, Options, Rank, Save, Shape, page_keys
from ._vllm_store import BUSY_RETRIES, StoreCalls, open_client

logger = init_logger("vllm.larder")

SPAN_BLOCKS = 128
"""Blocks of one call at most. Within a span the layers follow each other, as a prefill engine publishes them."""

SPAN_BYTES = 32 << 20
"""Bytes of one call, unless a single row is longer."""

LOAD_WINDOW_BYTES = 256 << 20
"""Rows of loads in host memory. A call that waits for many others would miss its timeout."""

FOLLOWED_PAGES_MAX = 4096
"""Pages that one worker follows at a time. A node bounds those that wait for their writers."""

BUSY_PAUSE = 0.05
"""Least time in seconds before pages are followed again that a node had no memory to follow."""

ARRIVED = ("L2", "L3", "sealed")
"""Results of the pages whose rows are valid. Those of all others are undefined."""

LOG_SECONDS = 10.0

PUBLISHERS = 4
"""Puts of one worker in flight. `staging_bytes` bounds their bytes."""


def pointers(staged: Staged, rows: Iterable[int], readonly: bool) -> list[Pointer]:
    """Memory of some rows. The rows stay referenced until no transfer can touch them."""
    size = staged.row_bytes
    return [Pointer(staged.address + row * size, size, staged.rows, readonly=readonly) for row in rows]


class Budget:
    """Bytes of rows in host memory."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.lock = threading.Lock()

    def take(self, size: int) -> bool:
        with self.lock:
            if size > self.left:
                return False
            self.left -= size
            return True

    def give(self, size: int) -> None:
        with self.lock:
            self.left += size


@dataclass
class _Publication:
    """Rows of one part of all blocks that a step has completed."""

    client: Client
    staged: Staged
    part: int
    size: int
    deadline: float
    puts: int
    """Puts that have not ended."""


@dataclass
class _Put:
    """Rows of one head group of consecutive blocks. `row` is the first of them, and `stride` leads to the next."""

    job: _Publication
    save: Save
    group: int
    row: int
    stride: int


class Publisher:
    """Threads that put rows, as soon as the device has written them. They begin in the order of `submit`.

    The engine queues the layers of a step faster than the device computes them, so its own thread cannot wait for each.
    """

    def __init__(self, groups: range, budget: Budget) -> None:
        self.groups, self.budget = groups, budget
        self.connected: Optional[Client] = None
        self.queue: queue.SimpleQueue[Optional[_Put]] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.lost = 0

    def submit(
        self, client: Client, staged: Staged, part: int, saves: Sequence[Save], size: int, deadline: float
    ) -> None:
        """Takes `size` bytes of the budget, which the caller has reserved."""
        if not self.threads:
            self.threads = [
                threading.Thread(target=self.run, name="larder-publisher", daemon=True) for _ in range(PUBLISHERS)
            ]
            for thread in self.threads:
                thread.start()
        stride = len(self.groups)
        job = _Publication(client, staged, part, size, deadline, len(saves) * stride)
        first = 0
        for save in saves:
            for at, group in enumerate(self.groups):
                self.queue.put(_Put(job, save, group, first * stride + at, stride))
            first += len(save.blocks)

    def run(self) -> None:
        while (put := self.queue.get()) is not None:
            try:
                lost = self.put(put)
            except Exception:
                logger.exception("Larder: pages could not be put")
                lost = len(put.save.blocks)
            with self.lock:
                self.lost += lost
                put.job.puts -= 1
                has_ended = put.job.puts == 0
            if has_ended:
                self.budget.give(put.job.size)

    def put(self, put: _Put) -> int:
        """Puts pages. Returns the number of those that the store does not have then."""
        job, save = put.job, put.save
        job.staged.wait()
        if self.connected is not job.client:
            # The first step may end before a node is connected. A put without a node is lost at once.
            job.client.ready(max(0.0, job.deadline - time.monotonic()))
            self.connected = job.client
        count = len(save.blocks)
        timeout = job.deadline - time.monotonic()
        if timeout <= 0:
            return count
        keys = page_keys(save.hashes, put.group, job.part)
        memory = pointers(job.staged, range(put.row, put.row + count * put.stride, put.stride), readonly=True)
        parent = None if save.parent is None else page_keys([save.parent], put.group, job.part)[0]
        # Once for each block: with all pages of a block, an indexer would count it several times.
        tokens = save.tokens if put.group == 0 and job.part == 0 else ()
        outcomes = job.client.put_from(
            keys,
            memory,
            timeout,
            parent=parent,
            position=save.first,
            tokens=tokens,
            ttl=save.ttl,
            busy_retries=BUSY_RETRIES,
        )
        return sum(outcome in ("busy", "lost") for outcome in outcomes)

    def close(self, timeout: float) -> None:
        """Waits for the puts that are queued, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.threads = []


@dataclass
class _Refused:
    """Rest of a span that the node had no memory to follow. It is lost at `until`."""

    first: int
    count: int
    part: int
    until: float


@dataclass
class _Transfer:
    """A load in progress. Only blocks before `good` may still be filled."""

    load: Load
    deadline: float
    spans: Iterator[tuple[int, int, int]]
    good: int
    calls: int = 0
    is_drained: bool = False
    refused: deque[_Refused] = field(default_factory=deque)
    again_at: float = 0.0
    """Earliest time to follow the refused pages again. No other call of the load begins before them."""


@dataclass
class _Call:
    """Rows of one part of a span, which the client is reading."""

    transfer: _Transfer
    part: int
    first: int
    count: int
    staged: Staged
    size: int
    until: float


def spans(blocks: int, parts: int, length: int) -> Iterator[tuple[int, int, int]]:
    """First block, number of blocks, and part of each call for at most `length` blocks."""
    for first in range(0, blocks, length):
        for part in range(parts):
            yield first, min(length, blocks - first), part


@dataclass
class _Step:
    """What a step has to publish, and the parts that it has published already."""

    saves: Sequence[Save] = ()
    blocks: list[int] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Worker:
    """Moves rows of one rank. All methods are for the thread of the engine."""

    def __init__(self, options: Options, shape: Shape, model: str, num_blocks: int, rank: Rank) -> None:
        self.options, self.shape, self.model, self.num_blocks = options, shape, model, num_blocks
        self.groups, self.is_writer = rank.groups, rank.is_writer
        self.block_bytes = shape.page_bytes * len(rank.groups)
        joined = shape.layers_per_page
        self.part_of = {name: at // joined for at, name in enumerate(shape.layers)}
        self.names = [shape.layers[part * joined : (part + 1) * joined] for part in range(shape.parts)]
        self.caches: Optional[LayerCaches] = None
        self.store = StoreCalls()
        self.identity: Optional[str] = None
        self.publisher = Publisher(self.groups, Budget(options.staging_bytes))
        self.step = _Step()
        self.dropped, self.logged = 0, 0.0

        self.calls = 0
        self.transfers: deque[_Transfer] = deque()
        self.span_blocks = max(1, min(SPAN_BLOCKS, SPAN_BYTES // self.block_bytes))
        self.room, self.followed = LOAD_WINDOW_BYTES, 0
        self.finished: set[str] = set()
        self.errors: set[int] = set()

    def register(self, caches: Mapping[str, Any]) -> None:
        """Takes the device caches. Raises if they do not have the shape that the scheduler expects."""
        layers = LayerCaches(caches, self.shape.layers, self.num_blocks, self.shape.layers_per_page, len(self.groups))
        if layers.row_bytes != self.shape.page_bytes:
            raise ValueError(f"a page of vLLM's cache has {layers.row_bytes} bytes instead of {self.shape.page_bytes}")
        self.caches = layers

    def attached(self, metadata: Metadata) -> Optional[Client]:
        """The client for the namespace that the scheduler names. None if its pages have another shape."""
        if metadata.namespace is not None and metadata.namespace != self.identity:
            self.identity, self.store.client = metadata.namespace, None
            try:
                if not self.shape.is_of(json.loads(metadata.namespace)):
                    raise ValueError("scheduler and worker of vLLM have different layers")
                self.store.open(
                    open_client(
                        self.options.url,
                        self.options.tenant,
                        self.model,
                        self.shape.page_bytes,
                        metadata.namespace,
                        "vllm-worker",
                    )
                )
            except Exception:
                logger.exception("Larder: the worker loads and stores nothing")
        return self.store.client

    # Stores.

    def begin(self, metadata: Metadata) -> None:
        """Begins a step of the engine."""
        self.attached(metadata)
        saves = metadata.saves if self.is_writer and self.store.client is not None else ()
        self.step = _Step(saves, [block for save in saves for block in save.blocks])

    def layer_computed(self, name: str) -> None:
        """Publishes the part that ends with this layer."""
        part = self.part_of.get(name)
        if part is None or not self.step.blocks:
            return
        self.step.seen.add(name)
        if all(layer in self.step.seen for layer in self.names[part]):
            self.publish(part)

    def end(self) -> None:
        """Publishes what no layer has published: CUDA graphs make no calls for their layers."""
        if self.step.blocks:
            for part in range(self.shape.parts):
                self.publish(part)
        self.step = _Step()

    def publish(self, part: int) -> None:
        if part in self.step.done or self.caches is None or self.store.client is None:
            return
        self.step.done.add(part)
        size = len(self.step.blocks) * self.block_bytes
        budget = self.publisher.budget
        if not budget.take(size):
            self.drop(len(self.step.blocks) * len(self.groups))
            return
        try:
            staged = self.caches.read(part, self.step.blocks)
        except Exception:
            budget.give(size)
            logger.exception("Larder: rows of part %d could not be copied", part)
            return
        deadline = time.monotonic() + self.options.store_timeout
        self.publisher.submit(self.store.client, staged, part, self.step.saves, size, deadline)

    def drop(self, pages: int) -> None:
        """Counts pages that are not stored because the store is slower than the engine."""
        self.dropped += pages
        if time.monotonic() - self.logged > LOG_SECONDS:
            self.logged = time.monotonic()
            logger.warning("Larder: %d pages were not stored: staging_bytes is used up", self.dropped)

    # Loads.

    def start(self, metadata: Metadata) -> None:
        """Starts the loads of a step."""
        for load in metadata.loads:
            deadline = time.monotonic() + self.options.load_timeout
            count = len(load.blocks)
            good = count if self.store.client is not None and self.caches is not None else 0
            calls = spans(count, self.shape.parts, self.span_blocks)
            self.transfers.append(_Transfer(load, deadline, calls, good))
        self.pump()

    def pump(self) -> None:
        """Starts calls while there is room, one transfer after the other, and ends those without calls."""
        if self.store.client is not None and not self.store.is_connected:
            # A call without a node would be a miss at once.
            return
        for _ in range(len(self.transfers)):
            transfer = self.transfers.popleft()
            while not transfer.is_drained and self.start_call(transfer):
                pass
            if transfer.is_drained and not transfer.calls:
                self.finished.add(transfer.load.request_id)
                self.errors.update(transfer.load.blocks[transfer.good :])
            else:
                self.transfers.append(transfer)

    def start_call(self, transfer: _Transfer) -> bool:
        """Starts the next call of a transfer. False if it has to wait."""
        load = transfer.load
        is_full = self.room < self.span_blocks * self.block_bytes
        is_full |= load.follow and self.followed + self.span_blocks * len(self.groups) > FOLLOWED_PAGES_MAX
        if is_full and self.calls:
            return False
        now = time.monotonic()
        if transfer.refused:
            if now < transfer.again_at:
                return False
            refused = transfer.refused.popleft()
            first, count, part, until = refused.first, refused.count, refused.part, refused.until
        else:
            span = next(transfer.spans, None)
            if span is None:
                transfer.is_drained = True
                return True
            first, count, part = span
            until = min(now + self.options.follow_timeout, transfer.deadline)
        if first >= transfer.good:
            return True
        if now >= until:
            transfer.good = min(transfer.good, first)
            return True
        try:
            self.call(transfer, first, count, part, until)
        except Exception:
            logger.exception("Larder: a load could not start")
            transfer.good = min(transfer.good, first)
        return True

    def call(self, transfer: _Transfer, first: int, count: int, part: int, until: float) -> None:
        assert self.caches is not None
        timeout = max(0.0, until - time.monotonic())
        load, pages = transfer.load, count * len(self.groups)
        staged = self.caches.space(count)
        hashes = load.hashes[first : first + count]
        keys = [key for block in zip(*(page_keys(hashes, group, part) for group in self.groups)) for key in block]
        memory = pointers(staged, range(pages), readonly=False)
        call = _Call(transfer, part, first, count, staged, count * self.block_bytes, until)
        self.calls += 1
        self.room -= call.size
        transfer.calls += 1
        if load.follow:
            self.followed += pages

        def done(results: Any) -> None:
            self.call_ended(call, results or ())

        if load.follow:
            self.store.call(done, "follow", keys, memory, timeout)
        else:
            self.store.call(done, "get_into", keys, memory, timeout, busy_retries=BUSY_RETRIES)

    def poll(self) -> None:
        """Takes the results of finished calls, and starts others."""
        self.store.poll()
        self.pump()

    def call_ended(self, call: _Call, results: Sequence[Any]) -> None:
        transfer, load = call.transfer, call.transfer.load
        self.calls -= 1
        transfer.calls -= 1
        self.room += call.size
        if load.follow:
            self.followed -= call.count * len(self.groups)
        lost = next((at for at, result in enumerate(results) if result not in ARRIVED), len(results))
        arrived = lost // len(self.groups)
        count = min(arrived, max(0, transfer.good - call.first))
        if lost < len(results) and results[lost] == "busy":
            self.refuse(call, arrived)
        elif count < call.count:
            transfer.good = min(transfer.good, call.first + arrived)
        if not count:
            return
        try:
            assert self.caches is not None
            self.caches.write(call.part, load.blocks[call.first : call.first + count], call.staged)
        except Exception:
            logger.exception("Larder: rows of part %d could not be copied", call.part)
            transfer.good = min(transfer.good, call.first)

    def refuse(self, call: _Call, arrived: int) -> None:
        """Follows the rest of a call again. The node finds memory when other follows end.

        Pages that have arrived give the rest another `follow_timeout`. Without one, the rest has what is left.
        """
        transfer, now = call.transfer, time.monotonic()
        until = min(now + self.options.follow_timeout, transfer.deadline) if arrived else call.until
        transfer.refused.append(_Refused(call.first + arrived, call.count - arrived, call.part, until))
        transfer.again_at = now + BUSY_PAUSE
        transfer.is_drained = False

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        self.poll()
        finished, self.finished = self.finished, set()
        return finished

    def take_errors(self) -> set[int]:
        """Blocks that those loads have not filled."""
        errors, self.errors = self.errors, set()
        return errors

    def close(self) -> None:
        """Waits until no transfer touches rows. The timeouts bound this."""
        self.publisher.close(self.options.store_timeout + 1.0)
        deadline = time.monotonic() + self.options.load_timeout + 1.0
        while self.transfers and time.monotonic() < deadline:
            for transfer in self.transfers:
                transfer.good = 0
            self.poll()
            time.sleep(0.01)
        self.store.client = self.caches = None
