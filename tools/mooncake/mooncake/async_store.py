"""The store for asyncio: `async_NAME` runs the call `NAME` on a thread."""

import asyncio
import functools
from typing import Any

from .store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """The same calls as `MooncakeDistributedStore`, and each again with the prefix `async_`."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("async_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        call = getattr(self, name.removeprefix("async_"))

        @functools.wraps(call)
        async def on_thread(*args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(call, *args, **options)

        return on_thread
