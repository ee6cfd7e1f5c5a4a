"""Mooncake Store: its master, and a process that contributes a memory segment. Clients use registered buffers.

`mooncake` moves pages over TCP between two processes. With `mooncake-shm` the clients contribute no segment. Each of
them shares a memory pool with a `mooncake_client` process on the same machine.
"""

import ctypes
import mmap
import sys

from processes import START_SECONDS, free_port

from . import Programs, System

# Writes of 1 MiB in place of the default of 64 KiB are 5 to 15 % faster.
ENV = {"MC_TCP_SLICE_SIZE": str(1 << 20), "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
# Holds the largest data set without eviction.
SEGMENT_BYTES = 3 << 30
BATCH_MAX = 64
# Part of a pool that the library needs for itself.
SPARE_BYTES = 16 << 20


def program(name):
    """Path of a program of the package."""
    return Programs.of_package("mooncake", name)


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
        self.servers = [master, self.start_segment(children, size)]

    def start_segment(self, children, _size):
        """Starts the process whose memory holds the pages."""
        segment = children.start(
            "mooncake-segment", [Programs.python, "-m", "systems.mooncake", self.master, free_port()], ENV
        )
        while segment.read_line(START_SECONDS) != "ready":
            pass
        return segment

    def client(self, index):
        """The command of a client."""
        return self.python("mooncake", index, "tcp", self.master)


class MooncakeShm(Mooncake):
    """Over shared memory. Each client shares a pool with room for a batch to put and a batch to get."""

    def start_segment(self, children, size):
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


def require(results, wanted):
    """Raises unless the library returned `wanted` for every page."""
    if any(result != wanted for result in results):
        raise RuntimeError(f"mooncake returned {sorted(set(results))[:4]}, expected {wanted}")


class Client:
    """Zero-copy calls. Keys and addresses are made before the clock starts."""

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
            raise RuntimeError(f"mooncake setup returned {code}")
        self.memory = None
        self.keys = []
        if kind == "shm":
            self.base = self.store.alloc_from_mem_pool(self.pool - SPARE_BYTES)
            if not self.base:
                raise RuntimeError("mooncake: alloc_from_mem_pool returned no memory")
            self.register(self.pool - SPARE_BYTES)

    def register(self, length):
        """Registers the memory that pages move from and to."""
        if code := self.store.register_buffer(self.base, length):
            raise RuntimeError(f"mooncake register_buffer returned {code}")

    def prepare(self, cell):
        """Makes the keys, and memory for a batch to put and a batch to get."""
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
        self.destinations = [address + half for address in self.sources]
        self.sizes = [cell.size] * cell.batch
        name = f"{cell.cell}-{self.index}"
        self.keys = [[f"{name}-{batch}-{page}" for page in range(cell.batch)] for batch in range(cell.batches)]
        require(self.store.batch_put_from([f"{name}-warm"], self.sources[:1], self.sizes[:1]), 0)
        require(self.store.batch_get_into([f"{name}-warm"], self.destinations[:1], self.sizes[:1]), cell.size)

    def put(self, _cell, batch):
        """Puts a batch."""
        require(self.store.batch_put_from(self.keys[batch], self.sources, self.sizes), 0)

    def get(self, cell, batch):
        """Gets a batch."""
        require(self.store.batch_get_into(self.keys[batch], self.destinations, self.sizes), cell.size)

    def exists(self, cell, batch):
        """Checks keys that exist."""
        at = batch * cell.batch % (len(self.flat) - cell.batch + 1)
        require(self.store.batch_is_exist(self.flat[at : at + cell.batch]), 1)

    def check(self, cell, batch):
        """Compares the last batch with the bytes that were put."""
        if cell.op == "put":
            self.flat = [key for keys in self.keys[: batch + 1] for key in keys]
        if cell.op == "get":
            half = cell.size * cell.batch
            if ctypes.string_at(self.base, half) != ctypes.string_at(self.base + half, half):
                raise RuntimeError("mooncake: the bytes differ from those that were put")

    def clear(self):
        """Removes all pages, leased ones too. The first client does so for all clients."""
        if self.index == 0:
            self.store.remove_all(True)


def serve_segment():
    """Contributes memory until the standard input ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master, port = sys.argv[1:]
    if code := store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", SEGMENT_BYTES, 1 << 20, "tcp", "", master):
        raise RuntimeError(f"mooncake setup returned {code}")
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve_segment()
