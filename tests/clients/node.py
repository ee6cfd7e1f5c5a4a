"""Servers for the programs of this folder: a store node, and Redis to compare it with."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 120


def program():
    """The command `larder`: `LARDER`, or the release build. Ends the run if there is none."""
    path = pathlib.Path(os.environ.get("LARDER", ROOT / "target/release/larder"))
    if not os.access(path, os.X_OK):
        raise SystemExit(f"{path} is no program: run `cargo build --release --bin larder`, or set LARDER")
    return path


class Node:
    """A node with an empty data directory. A restart keeps its directory and its addresses.

    `data` places the data directory elsewhere than the output and the log.
    """

    def __init__(self, work, *arguments, data=None):
        self.directory = pathlib.Path(work) / "node"
        self.data, self.log = data or self.directory, self.directory / "log"
        for each in (self.directory, self.data):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True, exist_ok=True)
        self.arguments = arguments
        self.address, self.redis = "127.0.0.1:0", "127.0.0.1:0"
        self.start()

    def start(self):
        command = [program(), "store", "--listen", self.address, "--redis-listen", self.redis]
        command += ["--data-dir", self.data, *self.arguments]
        output = self.directory / "output"
        with open(output, "wb") as stdout, open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=stdout, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            text = output.read_text()
            found = [re.search(scheme + r"://([0-9.]+:[0-9]+)[/\n]", text) for scheme in ("larder", "redis")]
            if all(found):
                self.address, self.redis = (match[1] for match in found)
                return
            time.sleep(0.05)
        self.kill()
        raise SystemExit(f"the node does not start: see {self.log}")

    @property
    def url(self):
        return f"larder://{self.address}"

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """`kill -9`. A paused node dies too."""
        self.process.kill()
        self.process.wait()


class Redis:
    """Redis without persistence."""

    def __init__(self, work):
        port = free_port()
        self.address, log = f"127.0.0.1:{port}", work / "redis.log"
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with open(log, "wb") as output:
            self.process = subprocess.Popen([*command, "--dir", work], stdout=output, stderr=output)
        try:
            wait_for(port)
        except BaseException:
            self.kill()
            raise

    def kill(self):
        self.process.kill()
        self.process.wait()


def free_port():
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port):
    """Returns once a server listens on a port of this machine."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port} after {START_SECONDS} s")
