"""The clients for threads and for asyncio. Both call the same native methods."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Optional, TypeVar, Union

from . import _native
from ._native import Buffer, Lookup, Namespace

Key = Union[bytes, str]
"""32 bytes, or 64 hexadecimal digits."""

Memory = Any
"""A bytes-like object, an object with `__dlpack__`, a `Pointer`, or a `Buffer`; contiguous and in host memory."""

Page = Union[Memory, Sequence[Memory]]
"""Memory of one page: one run of bytes, or a list with one run for each part."""

Tier = Literal["L2", "L3"]
PinKind = Literal["soft", "hard", "none"]
HintKind = Literal["none", "retain", "demote", "session-ended"]
FollowEnd = Literal["sealed", "aborted", "miss", "busy"]
PutOutcome = Literal["stored", "already-there", "refused", "forgotten", "retired", "in-progress", "busy", "lost"]

_T = TypeVar("_T")


class Pinned(NamedTuple):
    """Result of `pin`."""

    pages: int
    """Pages that are pinned now, or whose pins have ended."""
    refused: Optional[str]
    """First reason of a node to refuse. That node has pinned none of the pages."""
    complete: bool
    """True if every node that the call needs has answered."""


class Forgotten(NamedTuple):
    """Result of `forget`."""

    pages: int
    """Pages that existed."""
    complete: bool
    """True if every node has durably forgotten the pages. Otherwise a page may still be served: try again."""


class Client:
    """A store client of one namespace, for threads. Every method releases the GIL while it waits.

    Returns at once; connections are made in the background, and again whenever they are lost. A forked child may
    use the client: it attaches anew. `memory_bytes` bounds the shared memory for `buffer`.

    Memory that is passed stays referenced until no transfer can touch it. No other code may access the target of a
    get, or write to the source of a put, during the call. A call ends by its timeout, give or take a second in
    which a page that has arrived is verified.
    """

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        *,
        name: str = "python",
        memory_bytes: int = 256 << 20,
        connect_timeout: float = 1.0,
    ) -> None:
        self._native = _native.Client(
            url, namespace, name=name, memory_bytes=memory_bytes, connect_timeout=connect_timeout
        )

    @property
    def page_bytes(self) -> int:
        """Length of a page in bytes."""
        return self._native.page_bytes

    @property
    def part_bytes(self) -> list[int]:
        """Length of each part of a page in bytes."""
        return self._native.part_bytes

    @property
    def nodes_connected(self) -> int:
        """Nodes that are connected now. Never waits."""
        return self._native.nodes_connected

    def ready(self, timeout: float) -> bool:
        """Waits until the nodes are connected. False if none is after `timeout` seconds."""
        return self._native.ready(timeout)

    def buffer(self, size: int) -> Buffer:
        """Allocates `size` bytes of shared memory, or heap memory if that is used up.

        A put from it saves a copy if the node is on this machine or reachable by RDMA. Its content is undefined.
        """
        return self._native.buffer(size)

    def exists(self, keys: Sequence[Key], timeout: float) -> list[bool]:
        """Tells for each key if its page exists. False if its node does not answer in time."""
        return [tier is not None for tier in self.locate(keys, timeout)]

    def locate(self, keys: Sequence[Key], timeout: float) -> list[Optional[Tier]]:
        """Tier of each page; None if the page does not exist, or its node does not answer in time."""
        return self._native.locate(keys, timeout)

    def lookup(self, keys: Sequence[Key], timeout: float, *, hold: float = 0.0) -> Lookup:
        """Finds the longest prefix of `keys` that exists, and keeps it readable for `hold` seconds, at most 60.

        `release`, the end of a `with` block, and the end of the object end the hold early.
        """
        return self._native.lookup(keys, timeout, hold=hold)

    def get_into(
        self, keys: Sequence[Key], buffers: Sequence[Page], timeout: float, *, busy_retries: int = 0
    ) -> list[Optional[Tier]]:
        """Reads pages into memory. Returns the tier of each page, or None for a miss, whose memory is undefined.

        The call requests pages that a busy node refused once more, as long as each request brings pages.
        `busy_retries` is the number of retries after requests that bring none. Each request waits as the node
        suggests, up to 10 s and within the timeout.
        """
        return self._native.get_into(keys, buffers, timeout, busy_retries=busy_retries)

    def put_from(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Page],
        timeout: float,
        *,
        parent: Optional[Key] = None,
        position: Optional[int] = None,
        tokens: Optional[Sequence[Sequence[int]]] = None,
        ttl: Optional[float] = None,
        busy_retries: int = 0,
    ) -> list[PutOutcome]:
        """Writes pages from memory, and returns the outcome of each.

        With `position`, the keys are consecutive pages of one sequence, from that page on, and `parent` is the key
        of the page before them. Eviction uses both. The pages become misses after `ttl` seconds.

        `tokens` are the token ids of each page, for indexers that follow the node's KV events. Lists of more than 256
        are left out.

        `busy_retries` is the number of retries at a busy node. Each waits as the node suggests, up to 10 s and within
        the timeout.
        """
        return self._native.put_from(
            keys,
            buffers,
            timeout,
            parent=parent,
            position=position,
            tokens=tokens,
            ttl=ttl,
            busy_retries=busy_retries,
        )

    def follow(self, keys: Sequence[Key], buffers: Sequence[Memory], timeout: float) -> list[FollowEnd]:
        """Reads pages that exist, or that another client writes before `timeout`. Only "sealed" memory is valid.

        "busy" means that the node has no memory for this follow now. It has some again when another one ends. A caller
        that cannot wait treats it as a miss.
        """
        return self._native.follow(keys, buffers, timeout)

    def pin(self, keys: Sequence[Key], timeout: float, *, ttl: float, kind: PinKind = "soft") -> Pinned:
        """Keeps pages in L2 for `ttl` seconds. `kind="none"` ends their pins."""
        return Pinned(*self._native.pin(keys, timeout, ttl=ttl, kind=kind))

    def hint(
        self,
        keys: Sequence[Key],
        timeout: float,
        *,
        kind: HintKind = "none",
        generated: Optional[int] = None,
        retain: Optional[float] = None,
    ) -> int:
        """Tells the nodes about the further use of the pages of a sequence. Returns how many are in L2.

        With `generated`, it reports that a generation of so many tokens has ended, which used these pages. Report
        each end once, when the pages are put. "retain" keeps them for `retain` seconds, "demote" lets them leave
        first, and "session-ended" those that no other sequence continues.
        """
        return self._native.hint(keys, timeout, kind=kind, generated=generated, retain=retain)

    def warm(self, keys: Sequence[Key], timeout: float) -> int:
        """Brings pages from L3 to L2. Returns the pages that are in L2 afterwards."""
        return self._native.warm(keys, timeout)

    def forget(self, keys: Sequence[Key], timeout: float) -> Forgotten:
        """Deletes pages durably, at every node."""
        return Forgotten(*self._native.forget(keys, timeout))

    def status(self, timeout: float) -> list[dict[str, Any]]:
        """Status of every node of the URL. `status` is None for a node that does not answer in time."""
        return json.loads(self._native.status(timeout))

    def stats(self) -> dict[str, int]:
        """Counters of this client, in pages. A get of pages in parts counts each part."""
        return self._native.stats()


class _Loop:
    """Finished calls of one event loop, and the futures that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.completions = _native.Completions()
        self.futures: dict[int, asyncio.Future[Any]] = {}

    def drain(self) -> None:
        for number, succeeded, value in self.completions.drain():
            future = self.futures.pop(number)
            if future.done():
                continue
            if succeeded:
                future.set_result(value)
            else:
                future.set_exception(value)
        if not self.futures:
            self.loop.remove_reader(self.completions.fileno())

    async def wait(self, pending: _native.Pending) -> Any:
        if not self.futures:
            self.loop.add_reader(self.completions.fileno(), self.drain)
        future = self.loop.create_future()
        self.futures[pending.id] = future
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The caller may reuse its memory as soon as this returns, so the transfer ends first.
            pending.cancel()
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise


class AsyncClient:
    """The same calls as `Client`, for asyncio. A cancelled call ends once its memory is free.

    It can be used in several event loops. Methods have the meaning and the arguments of `Client`.
    """

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        *,
        name: str = "python",
        memory_bytes: int = 256 << 20,
        connect_timeout: float = 1.0,
    ) -> None:
        self.sync = Client(url, namespace, name=name, memory_bytes=memory_bytes, connect_timeout=connect_timeout)
        """The client for threads. Both share connections."""
        self._native = self.sync._native
        self._loop: Optional[_Loop] = None

    def _current(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.loop is not loop:
            self._loop = _Loop(loop)
        return self._loop

    async def ready(self, timeout: float) -> bool:
        loop = self._current()
        return await loop.wait(self._native.ready(timeout, queue=loop.completions))

    def buffer(self, size: int) -> Buffer:
        return self._native.buffer(size)

    async def exists(self, keys: Sequence[Key], timeout: float) -> list[bool]:
        return [tier is not None for tier in await self.locate(keys, timeout)]

    async def locate(self, keys: Sequence[Key], timeout: float) -> list[Optional[Tier]]:
        loop = self._current()
        return await loop.wait(self._native.locate(keys, timeout, queue=loop.completions))

    async def lookup(self, keys: Sequence[Key], timeout: float, *, hold: float = 0.0) -> Lookup:
        loop = self._current()
        return await loop.wait(self._native.lookup(keys, timeout, hold=hold, queue=loop.completions))

    async def get_into(
        self, keys: Sequence[Key], buffers: Sequence[Page], timeout: float, *, busy_retries: int = 0
    ) -> list[Optional[Tier]]:
        loop = self._current()
        call = self._native.get_into(keys, buffers, timeout, busy_retries=busy_retries, queue=loop.completions)
        return await loop.wait(call)

    async def put_from(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Page],
        timeout: float,
        *,
        parent: Optional[Key] = None,
        position: Optional[int] = None,
        tokens: Optional[Sequence[Sequence[int]]] = None,
        ttl: Optional[float] = None,
        busy_retries: int = 0,
    ) -> list[PutOutcome]:
        loop = self._current()
        call = self._native.put_from(
            keys,
            buffers,
            timeout,
            parent=parent,
            position=position,
            tokens=tokens,
            ttl=ttl,
            busy_retries=busy_retries,
            queue=loop.completions,
        )
        return await loop.wait(call)

    async def follow(self, keys: Sequence[Key], buffers: Sequence[Memory], timeout: float) -> list[FollowEnd]:
        loop = self._current()
        return await loop.wait(self._native.follow(keys, buffers, timeout, queue=loop.completions))

    async def pin(self, keys: Sequence[Key], timeout: float, *, ttl: float, kind: PinKind = "soft") -> Pinned:
        loop = self._current()
        return Pinned(*await loop.wait(self._native.pin(keys, timeout, ttl=ttl, kind=kind, queue=loop.completions)))

    async def hint(
        self,
        keys: Sequence[Key],
        timeout: float,
        *,
        kind: HintKind = "none",
        generated: Optional[int] = None,
        retain: Optional[float] = None,
    ) -> int:
        loop = self._current()
        return await loop.wait(
            self._native.hint(
                keys, timeout, kind=kind, generated=generated, retain=retain, queue=loop.completions
            )
        )

    async def warm(self, keys: Sequence[Key], timeout: float) -> int:
        loop = self._current()
        return await loop.wait(self._native.warm(keys, timeout, queue=loop.completions))

    async def forget(self, keys: Sequence[Key], timeout: float) -> Forgotten:
        loop = self._current()
        return Forgotten(*await loop.wait(self._native.forget(keys, timeout, queue=loop.completions)))

    async def status(self, timeout: float) -> list[dict[str, Any]]:
        loop = self._current()
        return json.loads(await loop.wait(self._native.status(timeout, queue=loop.completions)))

    def stats(self) -> dict[str, int]:
        return self._native.stats()
