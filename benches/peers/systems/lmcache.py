"""LMCache: its `lm://` server, unmodified, and a client that does what its connector does.

The server answers a connection's requests one after the other, and does not answer puts, so a batch of puts ends with a
question. The client makes its messages with the package and receives into memory it has. It does two things for speed that
the connector does not: it sends a batch's requests at once, and has its kernel confirm at once what came, because the server
sends a page's head and bytes by themselves and waits for that (40 ms, for small pages).
"""

import socket
import sys

from processes import free_port

from . import System

ENV = {"LMCACHE_LOG_LEVEL": "ERROR"}


class LMCache(System):
    """One server."""

    client_env = ENV

    def start(self, children, _size):
        port = free_port()
        self.port = str(port)
        self.servers = [
            children.start_server("lmcache", port, [sys.executable, "-m", "systems.lmcache", "127.0.0.1", port], ENV)
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
        """A request, as bytes."""
        shape = self.torch.Size((length, 0, 0, 0))
        return self.protocol.ClientMetaMessage(command, key, length, self.format, self.torch.uint8, shape).serialize()

    def receive(self, into):
        """Fills `into`."""
        while into:
            received = self.socket.recv_into(into)
            if not received:
                raise RuntimeError("lmcache: the server has ended")
            into = into[received:]

    def answer(self):
        """The head of the next answer; what was asked for must be there."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self.receive(self.header)
        answer = self.protocol.ServerMetaMessage.deserialize(self.header)
        if answer.code != self.protocol.ServerReturnCode.SUCCESS:
            raise RuntimeError("lmcache: keys that were put are not there")
        return answer

    def prepare(self, cell):
        """Keys, a batch to put, and memory for one that is got."""
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
        """Puts a batch, and asks for the last of it."""
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
                raise RuntimeError("lmcache: a page of another length")
            self.receive(memory)

    def exists(self, cell, batch):
        """Asks for keys that are there, one by one, as there is no other way."""
        at = batch * cell.batch % (len(self.flat) - cell.batch + 1)
        ask = self.protocol.ClientCommand.EXIST
        self.socket.sendall(b"".join(self.message(ask, key) for key in self.flat[at : at + cell.batch]))
        for _ in range(cell.batch):
            self.answer()

    def check(self, cell, batch):
        """Compares what was got last."""
        if cell.op == "put":
            self.flat = [key for keys in self.keys[: batch + 1] for key in keys]
        if cell.op == "get" and self.memory != self.pages:
            raise RuntimeError("lmcache: other bytes than were put")

    def clear(self):
        """The server removes nothing: every page is replaced by one of a byte."""
        for key in self.flat:
            self.socket.sendall(self.message(self.protocol.ClientCommand.PUT, key, 1) + b"0")
        if self.flat:
            self.socket.sendall(self.message(self.protocol.ClientCommand.EXIST, self.flat[-1]))
            self.answer()


def serve():
    """The package's own server."""
    from . import no_torch

    no_torch.install()
    from lmcache.v1.server.__main__ import main

    main()


if __name__ == "__main__":
    serve()
