"""The limits: TCP streams between two processes, and copies in memory by one thread of each client."""

from . import Programs, System


class TcpStream(System):
    """A one-way TCP stream; no side waits for an answer."""

    exists = False
    options = ()

    def start(self, children, _size):
        server = children.start("tcp-server", [Programs.bench_client, "bare-server"])
        self.servers = [server]
        self.address = server.read_line().strip()

    def client(self, _index):
        """The command of a client."""
        return [Programs.bench_client, "bare", "--server", self.address, *self.options]


class TcpRoundTrip(TcpStream):
    """A TCP stream whose client requests each batch, or waits for its acknowledgement."""

    options = ("--round-trip",)


class Memcpy(System):
    """Copies in the client's memory; there is no server."""

    ops = ("get",)
    exists = False

    def start(self, _children, _size):
        pass

    def client(self, _index):
        """The command of a client."""
        return [Programs.bench_client, "copy"]
