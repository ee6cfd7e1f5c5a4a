"""What is measured: a module each.

It has a `System` for the side that starts servers and, if its clients are in Python, a `Client`.
"""

import os
import sys

TARGET = os.environ.get("PEERS_TARGET", "target")
BUILT = os.path.join(TARGET, "dist")


class System:
    """One of them, while it runs: `servers` are its processes, `client(index)` is the command of a client."""

    ops = ("put", "get")
    # Whether it answers whether keys exist.
    exists = True
    client_env = {}

    def __init__(self, children, size):
        """`size`: bytes of a page."""
        self.servers = []
        self.start(children, size)

    def python(self, module, index, *arguments):
        """The command of a client in Python."""
        return [sys.executable, "-m", "client", module, index, *arguments]
