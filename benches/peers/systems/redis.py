"""Redis: SET in a pipeline and MGET, nothing on disk; redis-py with hiredis."""

import os

from processes import free_port

from . import System


def io_threads():
    """Number of I/O threads by the advice in redis.conf: one fewer than CPUs, at most eight; one below four CPUs."""
    cpus = os.cpu_count()
    return min(cpus - 1, 8) if cpus >= 4 else 1


class Redis(System):
    """One server process."""

    def start(self, children, _size):
        port = free_port()
        self.port = str(port)
        self.servers = [
            children.start_server(
                "redis",
                port,
                [
                    "redis-server",
                    "--port",
                    port,
                    "--bind",
                    "127.0.0.1",
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--io-threads",
                    io_threads(),
                    "--io-threads-do-reads",
                    "yes",
                    "--proto-max-bulk-len",
                    "64mb",
                    "--client-output-buffer-limit",
                    "normal 0 0 0",
                    "--dir",
                    children.logs,
                ],
            )
        ]

    def client(self, index):
        """The command of a client."""
        return self.python("redis", index, self.port)


class Client:
    """One connection."""

    def __init__(self, index, port):
        import redis

        self.index = index
        # redis-py reads 64 KiB at a time by default, which costs more system calls.
        self.redis = redis.Redis(port=int(port), socket_read_size=1 << 20, socket_timeout=60)
        self.keys = []
        self.got = []

    def prepare(self, cell):
        """Makes the keys and the pages of a batch."""
        from client import payload

        whole = payload(cell)
        self.pages = [whole[at : at + cell.size] for at in range(0, len(whole), cell.size)]
        name = f"{cell.cell}-{self.index}"
        self.keys = [[f"{name}-{batch}-{page}" for page in range(cell.batch)] for batch in range(cell.batches)]
        self.redis.set(f"{name}-warm", self.pages[0])
        self.redis.get(f"{name}-warm")

    def put(self, _cell, batch):
        """Puts a batch."""
        pipeline = self.redis.pipeline(transaction=False)
        for key, page in zip(self.keys[batch], self.pages):
            pipeline.set(key, page)
        pipeline.execute()

    def get(self, _cell, batch):
        """Gets a batch."""
        # Frees the last batch first, so that memory holds one batch at a time.
        self.got = None
        self.got = self.redis.mget(self.keys[batch])

    def exists(self, cell, batch):
        """Counts keys: the fastest check Redis has, although the answer does not tell which keys exist."""
        at = batch * cell.batch % (len(self.flat) - cell.batch + 1)
        if self.redis.exists(*self.flat[at : at + cell.batch]) != cell.batch:
            raise RuntimeError("redis: the server misses a key that was put")

    def check(self, cell, batch):
        """Compares the last batch with the bytes that were put."""
        if cell.op == "put":
            self.flat = [key for keys in self.keys[: batch + 1] for key in keys]
        if cell.op == "get" and self.got != self.pages:
            raise RuntimeError("redis: the bytes differ from those that were put")

    def clear(self):
        """Removes all keys. The first client does so for all clients."""
        self.got = []
        if self.index == 0:
            self.redis.flushall()
