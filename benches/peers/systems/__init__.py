"""The systems under test, one module each.

A module has a `System`, which starts the servers. If the clients of a system are in Python, it also has a `Client`.
"""

import os


class Programs:
    """Paths of the programs that systems start. `bench.py` sets them before the first turn."""

    larder = ""
    bench_client = ""
    # Interpreter of the environment that has the peers' packages.
    python = ""

    @classmethod
    def of_package(cls, package, name):
        """Path of a program that a Python package of the peers ships."""
        version = os.listdir(os.path.join(os.path.dirname(cls.python), "../lib"))[0]
        site = os.path.join(os.path.dirname(cls.python), "../lib", version, "site-packages")
        return os.path.normpath(os.path.join(site, package, name))


class System:
    """A running system: `servers` are its processes, `client(index)` is the command that starts a client."""

    ops = ("put", "get")
    # True if the system answers existence checks.
    exists = True
    client_env = {}

    def __init__(self, children, size):
        """Starts the servers for pages of `size` bytes."""
        self.servers = []
        self.start(children, size)

    def python(self, module, index, *arguments):
        """The command of a client in Python."""
        return [Programs.python, "-m", "client", module, index, *arguments]
