"""Mooncake Store: its master, and a process that lends memory. Zero-copy calls with registered buffers.

`mooncake` moves pages over TCP between two processes; `mooncake-shm` has clients without memory of their own, each of
which shares a pool with a `mooncake_client` on the same machine.
"""

import ctypes
import importlib.util
import mmap
import os
import sys

from processes import START_SECONDS, free_port

from . import System

# Larger writes than the default of 64 KiB: 5 to 15 % faster.
ENV = {"MC_TCP_SLICE_SIZE": str(1 << 20), "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
# Holds the largest data set, without evicting.
SEGMENT_BYTES = 3 << 30
BATCH_MAX = 64
# Of a pool, for what the library needs itself.
SPARE_BYTES = 16 << 20


def program(name):
    """Where the package keeps a program."""
    return os.path.join(os.path.dirname(importlib.util.find_spec("mooncake").origin), name)


class Mooncake(System):
    """Over TCP."""

    client_env = ENV

    def start(self, children, size):
        port = free_port()
        self.master = f"127.0.0.1:{port}"
        master = children.start_server(
            "mooncake-master",
            port,
            [
                program("mooncake_master"),
                f"--rpc_port={port}",
                f"--metrics_port={free_port()}",
                "--enable_metric_reporting=false",
                "--eviction_high_watermark_ratio=0.98",
                "--logtostderr",
            ],
            ENV,
        )
        self.servers = [master, self.lender(children, size)]

    def lender(self, children, _size):
        """The process whose memory pages lie in."""
        lender = children.start(
            "mooncake-lender", [sys.executable, "-m", "systems.mooncake", self.master, free_port()], ENV
        )
        while lender.hear(START_SECONDS) != "lends":
            pass
        return lender

    def client(self, index):
        """The command of a client."""
        return self.python("mooncake", index, "tcp", self.master)


class MooncakeShm(Mooncake):
    """Clients that share a pool of memory with the lender: of each, room for a batch to put and one that is got."""

    def lender(self, children, size):
        port = free_port()
        self.server = f"127.0.0.1:{port}"
        self.pool = 2 * BATCH_MAX * size + SPARE_BYTES
        return children.start_server(
            "mooncake-client",
            port,
            [
                program("mooncake_client"),
                "--host=127.0.0.1",
                f"--port={port}",
                f"--master_server_address={self.master}",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={SEGMENT_BYTES >> 20}MB",
                "--protocol=tcp",
                "--threads=4",
                "--logtostderr",
            ],
            ENV,
        )

    def client(self, index):
        """The command of a client."""
        return self.python("mooncake", index, "shm", self.server, str(self.pool))


def done(results, wanted):
    """Every page must have been moved."""
    if any(result != wanted for result in results):
        raise RuntimeError(f"mooncake answers {sorted(set(results))[:4]}")


class Client:
    """Zero-copy calls; keys and addresses are made before."""

    def __init__(self, index, kind, server, pool="0"):
        from mooncake.store import MooncakeDistributedStore

        self.index = index
        self.store = MooncakeDistributedStore()
        self.pool = int(pool)
        if kind == "shm":
            code = self.store.setup_dummy(self.pool, 1 << 20, server)
        else:
            code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", server)
        if code:
            raise RuntimeError(f"mooncake set-up: {code}")
        self.memory = None
        self.keys = []
        if kind == "shm":
            self.base = self.store.alloc_from_mem_pool(self.pool - SPARE_BYTES)
            if not self.base:
                raise RuntimeError("mooncake gives no memory of its pool")
            self.register(self.pool - SPARE_BYTES)

    def register(self, length):
        """Tells the library of memory that pages are moved from and to."""
        if code := self.store.register_buffer(self.base, length):
            raise RuntimeError(f"mooncake register_buffer: {code}")

    def prepare(self, cell):
        """Memory for a batch to put and one that is got."""
        from client import payload

        half = cell.size * cell.batch
        if not self.pool:
            if self.memory is not None:
                self.store.unregister_buffer(self.base)
            self.memory = mmap.mmap(-1, 2 * half)
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            self.register(2 * half)
        ctypes.memmove(self.base, payload(cell), half)
        ctypes.memset(self.base + half, 1, half)
        self.sources = [self.base + page * cell.size for page in range(cell.batch)]
        self.places = [address + half for address in self.sources]
        self.sizes = [cell.size] * cell.batch
        name = f"{cell.cell}-{self.index}"
        self.keys = [[f"{name}-{batch}-{page}" for page in range(cell.batch)] for batch in range(cell.batches)]
        done(self.store.batch_put_from([f"{name}-warm"], self.sources[:1], self.sizes[:1]), 0)
        done(self.store.batch_get_into([f"{name}-warm"], self.places[:1], self.sizes[:1]), cell.size)

    def put(self, _cell, batch):
        """Puts a batch."""
        done(self.store.batch_put_from(self.keys[batch], self.sources, self.sizes), 0)

    def get(self, cell, batch):
        """Gets a batch."""
        done(self.store.batch_get_into(self.keys[batch], self.places, self.sizes), cell.size)

    def exists(self, cell, batch):
        """Asks for keys that are there."""
        at = batch * cell.batch % (len(self.flat) - cell.batch + 1)
        done(self.store.batch_is_exist(self.flat[at : at + cell.batch]), 1)

    def check(self, cell, batch):
        """Compares what was got last."""
        if cell.op == "put":
            self.flat = [key for keys in self.keys[: batch + 1] for key in keys]
        if cell.op == "get":
            half = cell.size * cell.batch
            if ctypes.string_at(self.base, half) != ctypes.string_at(self.base + half, half):
                raise RuntimeError("mooncake: other bytes than were put")

    def clear(self):
        """Removes everything, also under a lease. One client does it for all."""
        if self.index == 0:
            self.store.remove_all(True)


def lend():
    """Lends memory until the standard input ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master, port = sys.argv[1:]
    if code := store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", SEGMENT_BYTES, 1 << 20, "tcp", "", master):
        raise RuntimeError(f"mooncake set-up: {code}")
    print("lends", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    lend()
