"""Rows of vLLM's device caches, and their copies in host memory.

A row is what one block has in the layers of one page, in vLLM's logical order: layer, head, token, content. A page has
the heads of one group, so a block has a row for each group of the rank. The order of the bytes in device memory does
not matter. All copies go through the current stream of the device, so a row is read before later steps of the engine
overwrite its block, and written before later steps read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch


class Staged:
    """Rows in host memory. Their bytes are valid after `wait`, which any threads may call."""

    def __init__(self, rows: Any, row_bytes: int, ready: Any, device: Any = None) -> None:
        self.rows, self.row_bytes, self.ready, self.device = rows, row_bytes, ready, device
        self.address = rows.data_ptr()

    def wait(self) -> None:
        """Waits until the device has written the rows. Releases the GIL."""
        ready = self.ready
        if ready is not None:
            # A thread begins on the first device, and would make a context there.
            torch.accelerator.set_device_index(self.device)
            ready.synchronize()
            self.ready = None


def wide(cache: Any) -> Any:
    """The same memory with the longest integers as elements: copies of bytes alone would be slow."""
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        try:
            return cache.view(dtype)
        except RuntimeError:
            continue
    raise ValueError("the content of a token is not contiguous in the cache of vLLM")


def blocks_of(cache: Any, num_blocks: int) -> Any:
    """The cache `[block, head, token, content]` by blocks of the scheduler. Those of the kernels may be smaller.

    A row has the same order for all sizes of kernel blocks, since engines may differ in them.
    """
    if cache.shape[0] == num_blocks:
        return cache
    cache = cache.unflatten(0, (num_blocks, -1))
    return cache.permute(0, 2, 1, 3, 4) if len(cache.shape) == 5 else cache


class LayerCaches:
    """Device caches of the layers of one worker. A page has `layers_per_page` consecutive layers of a head group."""

    def __init__(
        self, caches: Mapping[str, Any], names: Sequence[str], num_blocks: int, layers_per_page: int, groups: int
    ) -> None:
        layers = []
        for name in names:
            layers.append(wide(blocks_of(caches[name], num_blocks)).unflatten(1, (groups, -1)))
        first = layers[0]
        if any(layer.shape != first.shape or layer.dtype != first.dtype for layer in layers):
            raise ValueError("the layers of vLLM's cache have different shapes")
        self.shape, self.dtype, self.device = tuple(first.shape[1:]), first.dtype, first.device
        self.pages = [layers[at : at + layers_per_page] for at in range(0, len(layers), layers_per_page)]
        self.is_host = self.device.type == "cpu"
        self.row_bytes = first[0].numel() * first.element_size() * layers_per_page // groups
        self.indexed: tuple[Optional[Sequence[int]], Any] = (None, None)

    def index(self, blocks: Sequence[int]) -> Any:
        """Numbers of blocks on the device. The pages of a step have the same list, which is copied once."""
        if self.indexed[0] is not blocks:
            numbers = torch.tensor(blocks, dtype=torch.int64, pin_memory=not self.is_host)
            self.indexed = (blocks, numbers.to(self.device, non_blocking=True))
        return self.indexed[1]

    def read(self, part: int, blocks: Sequence[int]) -> Staged:
        """Copies all rows of `blocks` to host memory, after the work that is queued on the device now."""
        index = self.index(blocks)
        rows = torch.stack([layer.index_select(0, index) for layer in self.pages[part]], 2)
        if self.is_host:
            return Staged(rows, self.row_bytes, None)
        copy = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
        copy.copy_(rows, non_blocking=True)
        # Otherwise the thread that waits for it would spin.
        ready = torch.Event(self.device, blocking=True)
        ready.record()
        return Staged(copy, self.row_bytes, ready, self.device)

    def space(self, count: int) -> Staged:
        """Host memory for the rows of `count` blocks, with undefined content."""
        shape = (count, self.shape[0], len(self.pages[0]), *self.shape[1:])
        return Staged(torch.empty(shape, dtype=self.dtype, pin_memory=not self.is_host), self.row_bytes, None)

    def write(self, part: int, blocks: Sequence[int], staged: Staged) -> None:
        """Copies the first rows of `staged` into `blocks`, before the work that is queued on the device later."""
        index = self.index(blocks)
        rows = staged.rows[: len(blocks)].to(self.device, non_blocking=True)
        for at, layer in enumerate(self.pages[part]):
            layer.index_copy_(0, index, rows[:, :, at])
