"""LMCache: its unmodified `lm://` server, and a client that works like its connector.

The server answers the requests of a connection in order. It does not acknowledge puts, so a batch of puts ends with an
existence check. The client encodes messages with the package and receives into preallocated memory.

The client does two things for speed that the connector does not:
- It pipelines the requests of a batch.
- It sets TCP_QUICKACK. The server sends the header and the bytes of a page separately, and Nagle's algorithm holds the
  bytes until the header is acknowledged. With delayed acknowledgements a small page takes 40 ms.
"""

import socket

from processes import free_port

from . import Programs, System

ENV = {"LMCACHE_LOG_LEVEL": "ERROR"}


class LMCache(System):
    """One server process."""

    client_env = ENV

    def start(self, children, _size):
        port = free_port()
        self.port = str(port)
        self.servers = [
            children.start_server("lmcache", port, [Programs.python, "-m", "systems.lmcache", "127.0.0.1", port], ENV)
        ]

    def client(self, index):
        """The command of a client."""
        return self.python("lmcache", index, self.port)


class Client:
    """One connection."""

    def __init__(self, index, port):
        from . import no_torch

        no_torch.install()
        import torch
        from lmcache import utils
        from lmcache.v1 import memory_management, protocol

        self.index = index
        self.torch, self.utils, self.protocol = torch, utils, protocol
        self.format = memory_management.MemoryFormat(1)
        self.socket = socket.create_connection(("127.0.0.1", int(port)), 60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.header = memoryview(bytearray(protocol.ServerMetaMessage.packlength()))
        self.keys = []

    def message(self, command, key, length=0):
        """An encoded request."""
        shape = self.torch.Size((length, 0, 0, 0))
        return self.protocol.ClientMetaMessage(command, key, length, self.format, self.torch.uint8, shape).serialize()

    def receive(self, into):
        """Receives until `into` is full."""
        while into:
            received = self.socket.recv_into(into)
            if not received:
                raise RuntimeError("lmcache: the server closed the connection")
            into = into[received:]

    def answer(self):
        """The header of the next answer. Raises if the server does not have the page."""
        # The kernel clears this flag by itself, so it is set before each answer.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self.receive(self.header)
        answer = self.protocol.ServerMetaMessage.deserialize(self.header)
        if answer.code != self.protocol.ServerReturnCode.SUCCESS:
            raise RuntimeError("lmcache: the server misses a page that was put")
        return answer

    def prepare(self, cell):
        """Makes the keys, the pages of a batch, and memory to receive a batch."""
        from client import payload

        whole = memoryview(payload(cell))
        self.pages = [whole[at : at + cell.size] for at in range(0, len(whole), cell.size)]
        self.memory = [memoryview(bytearray(b"\1") * cell.size) for _ in range(cell.batch)]
        first = (cell.cell << 8 | self.index) << 40
        self.keys = [
            [
                self.utils.CacheEngineKey("bench", 1, 0, first + batch * cell.batch + page, self.torch.float16)
                for page in range(cell.batch)
            ]
            for batch in range(cell.batches)
        ]

    def put(self, cell, batch):
        """Puts a batch, and waits for it with an existence check of its last page."""
        for key, page in zip(self.keys[batch], self.pages):
            self.socket.sendall(self.message(self.protocol.ClientCommand.PUT, key, cell.size))
            self.socket.sendall(page)
        self.socket.sendall(self.message(self.protocol.ClientCommand.EXIST, self.keys[batch][-1]))
        self.answer()

    def get(self, cell, batch):
        """Gets a batch."""
        self.socket.sendall(b"".join(self.message(self.protocol.ClientCommand.GET, key) for key in self.keys[batch]))
        for memory in self.memory:
            if self.answer().length != cell.size:
                raise RuntimeError("lmcache: the length of a page is wrong")
            self.receive(memory)

    def exists(self, cell, batch):
        """Checks keys one by one, pipelined: the protocol has no batch for it."""
        at = batch * cell.batch % (len(self.flat) - cell.batch + 1)
        check = self.protocol.ClientCommand.EXIST
        self.socket.sendall(b"".join(self.message(check, key) for key in self.flat[at : at + cell.batch]))
        for _ in range(cell.batch):
            self.answer()

    def check(self, cell, batch):
        """Compares the last batch with the bytes that were put."""
        if cell.op == "put":
            self.flat = [key for keys in self.keys[: batch + 1] for key in keys]
        if cell.op == "get" and self.memory != self.pages:
            raise RuntimeError("lmcache: the bytes differ from those that were put")

    def clear(self):
        """Replaces every page by one of a single byte, as the server cannot remove pages."""
        for key in self.flat:
            self.socket.sendall(self.message(self.protocol.ClientCommand.PUT, key, 1) + b"0")
        if self.flat:
            self.socket.sendall(self.message(self.protocol.ClientCommand.EXIST, self.flat[-1]))
            self.answer()


def serve():
    """Runs the package's own server."""
    from . import no_torch

    no_torch.install()
    from lmcache.v1.server.__main__ import main

    main()


if __name__ == "__main__":
    serve()
