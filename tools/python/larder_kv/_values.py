"""Values of any length over pages of fixed lengths, for engines that name no length when they read.

A value has a *head* page, which names its length, its layout and a random number, and *pieces*, whose keys come from
the key and that number. The pieces are written first, so a head that exists was complete. Two writers of a key never
mix: the first head wins, and the pieces of the other leave by eviction. A value is a hit only if all its pieces are.

No method raises because of the store, and each ends by its deadline.
"""

import ctypes
import hashlib
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

from ._client import Client
from ._native import Lookup, Namespace, Pointer

HEAD_BYTES = 1024
PIECE_BYTES = (1 << 20, 1 << 14)
"""Lengths of pieces, longest first. The last piece of a value is padded, so a value wastes less than 16 KiB."""

VALUE_BYTES_MAX = 1 << 32
HEADS_REMEMBERED = 65536
CONNECT_SECONDS = 1.0
"""Longest time for which the constructor waits for the connections to the store."""

RELEASE_SECONDS = 5.0
"""Longest time for which `close` waits until no transfer can read memory of the caller."""

BUSY_RETRIES = 1000
"""A large batch exceeds a node's budget, so the rest waits in turns. The deadline bounds this."""


class Memory:
    """Bytes of the caller: those of `owner`, a tensor in host memory or an object with the buffer protocol."""

    def __init__(self, owner: Any, length: int) -> None:
        self.owner, self.length = owner, length
        self.view: Optional[memoryview] = None
        if not hasattr(owner, "data_ptr"):
            self.view = memoryview(owner).cast("B")
            size = len(self.view)
        elif owner.device.type == "cpu" and owner.is_contiguous():
            self.address, size = owner.data_ptr(), owner.numel() * owner.element_size()
        else:
            raise ValueError("a tensor must be contiguous and in host memory")
        if not 0 < length <= size:
            raise ValueError(f"{length} bytes of memory with {size}")

    def part(self, start: int, length: int) -> Any:
        if self.view is not None:
            return self.view[start : start + length]
        return Pointer(self.address + start, length, self)

    def write(self, start: int, content: memoryview) -> None:
        if self.view is not None:
            self.view[start : start + len(content)] = content
        else:
            ctypes.memmove(self.address + start, bytes(content), len(content))

    def read(self, start: int, length: int) -> bytes:
        if self.view is not None:
            return bytes(self.view[start : start + length])
        return ctypes.string_at(self.address + start, length)


@dataclass(frozen=True)
class Head:
    """Content of a head page."""

    length: int
    number: str
    layout: Any

    def encode(self) -> Optional[bytes]:
        """The head page. None if the layout is too long for it."""
        text = json.dumps([self.length, self.number, self.layout]).encode()
        return text.ljust(HEAD_BYTES) if len(text) <= HEAD_BYTES else None

    @staticmethod
    def decode(page: bytes) -> Optional["Head"]:
        try:
            length, number, layout = json.loads(page)
        except ValueError:
            return None
        if not isinstance(length, int) or not 0 < length <= VALUE_BYTES_MAX or not isinstance(number, str):
            return None
        return Head(length, number, layout)


@dataclass
class _Batch:
    """Pieces of one length of several values: their keys, and the value and range of each."""

    size: int
    keys: list[bytes] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)


def pieces(keys: Sequence[bytes], heads: Sequence[Optional[Head]]) -> list[_Batch]:
    """Pieces of the values that have a head. No batch is empty."""
    batches = [_Batch(size) for size in PIECE_BYTES]
    for index, (key, head) in enumerate(zip(keys, heads)):
        if head is None:
            continue
        start, prefix = 0, hashlib.sha256(key + head.number.encode())
        for batch in batches:
            is_last = batch is batches[-1]
            while head.length - start >= batch.size or (is_last and start < head.length):
                end = min(head.length, start + batch.size)
                name = prefix.copy()
                name.update(start.to_bytes(8, "little"))
                batch.keys.append(name.digest())
                batch.places.append((index, start, end))
                start = end
    return [batch for batch in batches if batch.keys]


def left(deadline: float) -> float:
    """Seconds until `deadline`."""
    return max(0.0, deadline - time.monotonic())


class Values:
    """Values of one identity: everything that distinguishes the meaning of keys and bytes. For several threads."""

    def __init__(self, url: str, identity: dict[str, Any], *, tenant: str, name: str) -> None:
        def client(size: int) -> Client:
            text = json.dumps(dict(identity, format=1, page=size), sort_keys=True)
            label = str(identity.get("model", name))[:64]
            namespace = Namespace(size, identity=text, model=label, tenant=tenant)
            return Client(url, namespace, name=name, memory_bytes=0)

        self.head_client = client(HEAD_BYTES)
        self.clients = {size: client(size) for size in PIECE_BYTES}
        self.lock = threading.Lock()
        self.known: OrderedDict[bytes, Head] = OrderedDict()
        self.reading: weakref.WeakSet[Memory] = weakref.WeakSet()
        deadline = time.monotonic() + CONNECT_SECONDS
        for each in (self.head_client, *self.clients.values()):
            each.ready(left(deadline))

    # Heads.

    def heads(self, keys: Sequence[bytes], deadline: float) -> list[Optional[Head]]:
        """Heads of the values that have one. Their pieces may be gone."""
        with self.lock:
            found = [self.known.get(key) for key in keys]
        absent = [at for at, head in enumerate(found) if head is None]
        if absent:
            pages = [bytearray(HEAD_BYTES) for _ in absent]
            names = [keys[at] for at in absent]
            tiers = self.head_client.get_into(names, pages, left(deadline), busy_retries=BUSY_RETRIES)
            for at, page, tier in zip(absent, pages, tiers):
                found[at] = Head.decode(page) if tier is not None else None
            self.remember(keys, found)
        return found

    def remember(self, keys: Sequence[bytes], heads: Sequence[Optional[Head]]) -> None:
        with self.lock:
            for key, head in zip(keys, heads):
                if head is not None:
                    self.known[key] = head
            while len(self.known) > HEADS_REMEMBERED:
                self.known.popitem(last=False)

    def forget_heads(self, keys: Sequence[bytes], absent: Sequence[bool]) -> None:
        """Drops what is known of values with missing pieces: another writer may have replaced them."""
        with self.lock:
            for key, is_absent in zip(keys, absent):
                if is_absent:
                    self.known.pop(key, None)

    # Calls.

    def find(self, keys: Sequence[bytes], deadline: float, hold: float = 0.0) -> tuple[list[bool], list[Lookup]]:
        """Tells for each value if it has all its pieces. The lookups keep them readable for `hold` seconds."""
        heads = self.heads(keys, deadline)
        found = [head is not None for head in heads]
        lookups = []
        for batch in pieces(keys, heads):
            client, count = self.clients[batch.size], 0
            if hold:
                lookups.append(client.lookup(batch.keys, left(deadline), hold=hold))
                count = len(lookups[-1])
            rest = batch.keys[count:]
            exists = [True] * count + (client.exists(rest, left(deadline)) if rest else [])
            for (index, _, _), is_there in zip(batch.places, exists):
                found[index] = found[index] and is_there
        self.forget_heads(keys, [not is_found for is_found in found])
        return found, lookups

    def get(
        self,
        keys: Sequence[bytes],
        heads: Sequence[Optional[Head]],
        targets: Sequence[Optional[Memory]],
        deadline: float,
    ) -> list[bool]:
        """Reads values into memory of their lengths. The memory of a miss is undefined."""
        heads = [head if target is not None else None for head, target in zip(heads, targets)]
        for head, target in zip(heads, targets):
            if head is not None and target is not None and head.length != target.length:
                raise ValueError(f"memory of {target.length} bytes for a value of {head.length}")
        read = [head is not None for head in heads]
        for batch in pieces(keys, heads):
            buffers: list[Any] = []
            padded: list[tuple[Memory, int, int, bytearray]] = []
            for index, start, end in batch.places:
                target = targets[index]
                assert target is not None
                if end - start == batch.size:
                    buffers.append(target.part(start, batch.size))
                else:
                    padded.append((target, start, end, bytearray(batch.size)))
                    buffers.append(padded[-1][3])
            client = self.clients[batch.size]
            tiers = client.get_into(batch.keys, buffers, left(deadline), busy_retries=BUSY_RETRIES)
            for (index, _, _), tier in zip(batch.places, tiers):
                read[index] = read[index] and tier is not None
            for target, start, end, page in padded:
                target.write(start, memoryview(page)[: end - start])
        self.forget_heads(keys, [not is_read for is_read in read])
        return read

    def put(
        self, keys: Sequence[bytes], sources: Sequence[Memory], layouts: Sequence[Any], deadline: float
    ) -> list[bool]:
        """Writes values. True for those that the store has afterwards, from this writer or another."""
        old = self.heads(keys, deadline)
        stored, _ = self.find(keys, deadline)
        heads: list[Optional[Head]] = []
        for is_there, source, layout in zip(stored, sources, layouts):
            head = Head(source.length, os.urandom(16).hex(), layout)
            heads.append(None if is_there or head.encode() is None else head)
        written = self.put_pieces(keys, heads, sources, deadline)
        # The head of a value that has lost pieces stays until it is forgotten: the first writer wins.
        broken = [key for key, head, is_written in zip(keys, old, written) if head is not None and is_written]
        if broken and not self.head_client.forget(broken, left(deadline)).complete:
            written = [is_written and head is None for head, is_written in zip(old, written)]
        self.put_heads(keys, heads, written, stored, deadline)
        return stored

    def put_pieces(
        self, keys: Sequence[bytes], heads: Sequence[Optional[Head]], sources: Sequence[Memory], deadline: float
    ) -> list[bool]:
        written = [head is not None for head in heads]
        for batch in pieces(keys, heads):
            buffers = []
            for index, start, end in batch.places:
                source = sources[index]
                if end - start == batch.size:
                    buffers.append(source.part(start, batch.size))
                    with self.lock:
                        self.reading.add(source)
                else:
                    buffers.append(source.read(start, end - start).ljust(batch.size, b"\0"))
            client = self.clients[batch.size]
            outcomes = client.put_from(batch.keys, buffers, left(deadline), busy_retries=BUSY_RETRIES)
            for (index, _, _), outcome in zip(batch.places, outcomes):
                # No other writer has these keys, so every other outcome is a loss.
                written[index] = written[index] and outcome in ("stored", "already-there")
        return written

    def put_heads(
        self,
        keys: Sequence[bytes],
        heads: Sequence[Optional[Head]],
        written: Sequence[bool],
        stored: list[bool],
        deadline: float,
    ) -> None:
        """Makes values visible whose pieces are written, and notes them in `stored`."""
        complete = [at for at, is_written in enumerate(written) if is_written]
        if not complete:
            return
        pages = [(heads[at] or Head(0, "", None)).encode() for at in complete]
        names = [keys[at] for at in complete]
        outcomes = self.head_client.put_from(names, pages, left(deadline), busy_retries=BUSY_RETRIES)
        for at, outcome in zip(complete, outcomes):
            # After the others, the store has the value of another writer.
            stored[at] = outcome in ("stored", "already-there", "refused", "in-progress")
        self.remember(names, [heads[at] if outcome == "stored" else None for at, outcome in zip(complete, outcomes)])

    def delete(self, keys: Sequence[bytes], deadline: float) -> list[Optional[int]]:
        """Forgets values durably. Returns the length of each that existed. All are None if a node did not answer."""
        heads = self.heads(keys, deadline)
        self.forget_heads(keys, [True] * len(keys))
        if not self.head_client.forget(keys, left(deadline)).complete:
            return [None] * len(keys)
        for batch in pieces(keys, heads):
            # A piece that stays is unreachable for those who do not remember the head, and leaves by eviction.
            self.clients[batch.size].forget(batch.keys, left(deadline))
        return [None if head is None else head.length for head in heads]

    def close(self) -> None:
        """Returns once no transfer can read memory of the caller. Raises if that takes too long."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while True:
            # References that threads of the client dropped end when a thread of Python enters the native module.
            self.head_client.nodes_connected
            with self.lock:
                if not len(self.reading):
                    return
            if time.monotonic() > deadline:
                raise RuntimeError("a transfer still reads memory of the engine")
            time.sleep(0.01)


class Workers:
    """Threads that run calls in order. At most `waiting_max` calls wait or run; others are refused."""

    def __init__(self, name: str, threads: int, waiting_max: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.free = threading.BoundedSemaphore(waiting_max)

    def submit(self, call: Callable[..., Any], *args: Any) -> Optional["Future[Any]"]:
        """The future of a call, or None if too many wait."""
        if not self.free.acquire(blocking=False):
            return None
        try:
            future = self.pool.submit(call, *args)
        except RuntimeError:
            self.free.release()
            return None
        future.add_done_callback(lambda _: self.free.release())
        return future

    def close(self) -> None:
        """Waits for the calls that run. Their deadlines bound this."""
        self.pool.shutdown(wait=True, cancel_futures=True)
