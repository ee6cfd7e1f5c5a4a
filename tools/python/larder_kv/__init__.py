"""Client of Larder, a store for the KV cache of language models.

    import larder_kv

    namespace = larder_kv.Namespace(1 << 20, identity="my-model-v1/bf16/page_first")
    client = larder_kv.Client("larder://127.0.0.1:7700", namespace)
    client.ready(timeout=5)

    key = larder_kv.page_key([1, 2, 3])
    page = bytearray(1 << 20)
    client.put_from([key], [page], timeout=1)        # ["stored"]
    client.get_into([key], [page], timeout=1)        # ["L2"], or [None] for a miss

The store is a cache: a page that does not arrive in time is a miss, and a page that cannot be stored is lost.
Methods raise for wrong arguments only, before any transfer begins. `AsyncClient` has the same methods for asyncio.
"""

import os as _os

from . import _native
from ._client import AsyncClient, Client, Forgotten, FollowEnd, HintKind, PinKind, Pinned, PutOutcome, Tier
from ._native import Buffer, Lookup, Namespace, Pointer, page_key

__all__ = [
    "AsyncClient",
    "Buffer",
    "Client",
    "FollowEnd",
    "Forgotten",
    "Lookup",
    "Namespace",
    "HintKind",
    "PinKind",
    "Pinned",
    "Pointer",
    "PutOutcome",
    "Tier",
    "page_key",
    "view",
]

_os.register_at_fork(
    before=_native._before_fork,
    after_in_parent=_native._after_fork_in_parent,
    after_in_child=_native._after_fork_in_child,
)


def view(buffer: Buffer) -> memoryview:
    """The bytes of a buffer. The view keeps the buffer's memory."""
    import ctypes

    array = (ctypes.c_ubyte * buffer.size).from_address(buffer.address)
    array._larder_owner = buffer  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
