"""Larder: one node with DRAM only. Every option but the size of L2 has its default.

`larder` moves pages over TCP. `larder-shm` has clients that map the node's memory.
"""

import re

from processes import START_SECONDS

from . import Programs, System

# Each data set fits twice. Puts in progress may use half of an eighth of L2, in 4 GiB one batch of 64 pages of 4 MiB.
L2_BYTES_MIN = 1 << 30
L2_BYTES_MAX = 4 << 30


def l2_bytes(size):
    """Room for the batches of four clients, within limits."""
    return min(max(16 * 4 * 64 * size, L2_BYTES_MIN), L2_BYTES_MAX)


class Larder(System):
    """Over TCP."""

    transport = "tcp"

    def start(self, children, size):
        node = children.start(
            "larder",
            [
                Programs.larder,
                "store",
                "--listen",
                "127.0.0.1:0",
                "--l2",
                l2_bytes(size),
                "--share-memory",
                "always",
            ],
        )
        self.servers = [node]
        while not (url := re.search(r"larder://[^\s,]+", node.read_line(START_SECONDS))):
            pass
        self.url = url[0] + "?transport=" + self.transport

    def client(self, index):
        """The command of a client."""
        return [Programs.bench_client, "larder", "--index", index, "--url", self.url]


class LarderShm(Larder):
    """Over shared memory: `view` reads pages in place, `get` copies them out."""

    ops = ("put", "get", "view")
    transport = "shm"
