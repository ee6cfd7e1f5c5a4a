"""Larder: one node, DRAM only, with its defaults but for its size.

`larder-shm` is the same with pages read from the node's memory.
"""

import os

from . import BUILT, System

# Data sets fit twice. Half of an eighth is for pages that are being put: in 4 GiB, one batch of 64 pages of 4 MiB.
L2_BYTES_MIN = 1 << 30
L2_BYTES_MAX = 4 << 30


def l2_bytes(size):
    """Enough for the batches of four clients, within limits."""
    return min(max(16 * 4 * 64 * size, L2_BYTES_MIN), L2_BYTES_MAX)


class Larder(System):
    """Over TCP."""

    transport = "tcp"

    def start(self, children, size):
        node = children.start(
            "larder",
            [
                os.path.join(BUILT, "larder"),
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
        self.url = node.hear().split()[-1] + "?transport=" + self.transport

    def client(self, index):
        """The command of a client."""
        return [os.path.join(BUILT, "bench-client"), "larder", "--index", index, "--url", self.url]


class LarderShm(Larder):
    """Pages are read where they lie (`view`), or copied from there (`get`)."""

    ops = ("put", "get", "view")
    transport = "shm"
