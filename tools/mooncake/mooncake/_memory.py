"""Memory of the engine, which it registers before it passes addresses in it.

Only registered memory is touched, and only host memory can be registered. So a wrong address is an error code, and
device memory is refused instead of read.
"""

import bisect
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from larder_kv._values import Memory

RELEASE_SECONDS = 5.0
"""Longest time for which a region stays registered because a transfer still reads it."""


class Span(Memory):
    """Bytes of a registered region."""

    def __init__(self, address: int, length: int) -> None:
        self.owner, self.view = None, None
        self.address, self.length = address, length


def address_of(content: Any) -> int:
    """Address of writable bytes, of which there is at least one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


def gathered(addresses: list[int], sizes: list[int]) -> bytearray:
    """Copies pieces of memory into one. Releases the GIL."""
    content = bytearray(sum(sizes))
    at = address_of(content) if content else 0
    for address, size in zip(addresses, sizes):
        ctypes.memmove(at, address, size)
        at += size
    return content


def scatter(content: memoryview, addresses: list[int], sizes: list[int]) -> None:
    """Copies consecutive bytes to several places. Releases the GIL."""
    at = address_of(content)
    for address, size in zip(addresses, sizes):
        ctypes.memmove(address, at, size)
        at += size


def mappings() -> Iterator[tuple[int, int]]:
    """Ranges of addresses that the processor can read and write, in order."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            place, access = line.split(maxsplit=2)[:2]
            if access.startswith("rw"):
                start, end = place.split("-")
                yield int(start, 16), int(end, 16)


def is_host_memory(address: int, size: int) -> bool:
    at = address
    for start, end in mappings():
        if start <= at < end:
            at = end
        if at >= address + size:
            return True
    return False


class Regions:
    """Registered memory. For several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sizes: dict[int, int] = {}
        self.starts: list[int] = []

    def add(self, address: int, size: int) -> bool:
        """Registers memory. False if it is not host memory."""
        if size <= 0 or address <= 0 or not is_host_memory(address, size):
            return False
        with self.lock:
            if address not in self.sizes:
                bisect.insort(self.starts, address)
            self.sizes[address] = max(size, self.sizes.get(address, 0))
        return True

    def remove(self, address: int, reading: Callable[[], list[Memory]]) -> bool:
        """Unregisters memory once no transfer reads it. False if it is not registered, or if that takes too long."""
        with self.lock:
            size = self.sizes.get(address)
        if size is None:
            return False
        deadline = time.monotonic() + RELEASE_SECONDS
        while any(isinstance(each, Span) and address <= each.address < address + size for each in reading()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        with self.lock:
            self.sizes.pop(address, None)
            self.starts = sorted(self.sizes)
        return True

    def room(self, address: int) -> int:
        """Bytes from `address` to the end of its region. 0 if it is in none."""
        with self.lock:
            at = bisect.bisect_right(self.starts, address) - 1
            # Regions may lie within each other, so an earlier one may be the longest.
            return max((start + self.sizes[start] - address for start in self.starts[: at + 1]), default=0)

    def has(self, address: int, size: int) -> bool:
        return 0 < size <= self.room(address)
