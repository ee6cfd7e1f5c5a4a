"""The limits: bare sockets between two processes, and a copy by one thread in each."""

import os

from . import BUILT, System

CLIENT = os.path.join(BUILT, "bench-client")


class Bare(System):
    """A stream: nobody waits for anybody."""

    exists = False
    options = ()

    def start(self, children, _size):
        server = children.start("bare", [CLIENT, "bare-server"])
        self.servers = [server]
        self.address = server.hear().strip()

    def client(self, _index):
        """The command of a client."""
        return [CLIENT, "bare", "--server", self.address, *self.options]


class BareAsked(Bare):
    """The client asks for each batch, or waits until it has arrived."""

    options = ("--asked",)


class Copy(System):
    """No server."""

    ops = ("get",)
    exists = False

    def start(self, _children, _size):
        pass

    def client(self, _index):
        """The command of a client."""
        return [CLIENT, "copy"]
