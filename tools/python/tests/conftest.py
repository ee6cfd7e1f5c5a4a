"""Store nodes for tests. `LARDER` names the program; the default is the release build of this checkout."""

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time

import larder_kv
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
LARDER = os.environ.get("LARDER", str(ROOT / "target/release/larder"))
START_SECONDS = 60
CHILD_SECONDS = 60

PATIENCE = 60.0
"""Seconds for a step that takes a moment. A step that takes longer hangs, however busy the machine is."""

LONG = 3600.0
"""A timeout that no test waits for: a call that has it and ends by itself was ended by something else."""


class Node:
    """A node on this machine, with its L3 in `directory`. A restart keeps address and pages."""

    def __init__(self, directory: pathlib.Path, *options: str) -> None:
        self.directory = directory
        self.options = options
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [LARDER, "store", "--listen", self.address, "--data-dir", str(self.directory)]
        command += ["--l2", "128MiB", "--l3-bytes", "256MiB", *self.options]
        log = open(self.directory / "log", "ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        assert "larder://" in line, (self.directory / "log").read_text()
        self.address = line.split("larder://")[1].strip().rstrip("/")

    def url(self, transport: str = "auto") -> str:
        return f"larder://{self.address}/?transport={transport}"

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        # The signal takes a moment. This returns when every thread has stopped.
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def stop(self) -> None:
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("shared"))
    yield node
    node.stop()


@pytest.fixture
def node(tmp_path):
    """A node of this test alone, which it may pause and kill."""
    node = Node(tmp_path)
    yield node
    node.stop()


@pytest.fixture
def crowded_node(tmp_path):
    """A node of this test alone, which has memory for few requests."""
    node = Node(tmp_path, "--request-memory", "1MiB")
    yield node
    node.stop()


@pytest.fixture(params=["tcp", "shm"])
def url(request, shared_node):
    return shared_node.url(request.param)


PAGE_BYTES = 200_000


@pytest.fixture
def namespace(request):
    """A namespace of this test: two parts, each longer than a chunk and not a multiple of anything."""
    return larder_kv.Namespace(PAGE_BYTES, parts=2, identity=request.node.nodeid)


def attach(url, namespace, **options):
    client = larder_kv.Client(url, namespace, **options)
    assert client.ready(START_SECONDS)
    return client


class Stalls:
    """Seconds for which this process stood still, as on a virtual machine that stops."""

    TICK_SECONDS = 0.05

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self.watch, name="stalls", daemon=True).start()

    def watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self.TICK_SECONDS)
            now = time.monotonic()
            self.seconds += max(0.0, now - last - 2 * self.TICK_SECONDS)
            last = now


@contextlib.contextmanager
def within(seconds: float):
    """Fails if its block takes longer. Stalls of this process do not count."""
    global stalls
    stalls = stalls or Stalls()
    began, before = time.monotonic(), stalls.seconds
    yield
    took = time.monotonic() - began
    if took >= seconds:
        # A stall that has just ended is known then.
        time.sleep(0.5)
    stood = stalls.seconds - before
    assert took - stood < seconds, f"{took:.1f} s, of which the process stood still for {stood:.1f} s"


stalls = None
"""The watch of this process, from the first use on."""


def where_threads_wait(pid: int) -> str:
    """Name, state, system call and place in the kernel of each thread of a process."""
    lines = []
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        texts = []
        for name in ("comm", "stat", "syscall", "wchan"):
            try:
                text = (thread / name).read_text().strip()
            except OSError as error:
                text = error.strerror
            # The state is the first field after the name, which may contain anything.
            texts.append(text.rpartition(") ")[2][:1] if name == "stat" else text)
        lines.append(f"{pid}/{thread.name}: {', '.join(texts)}")
    return "\n".join(lines)


def join(pid: int, name: str) -> None:
    """Waits for a forked child. Ends it, and tells where it waited, if it hangs."""
    end = time.monotonic() + CHILD_SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            waits = where_threads_wait(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"{name}: the child hangs:\n{waits}")
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"{name}: the child has ended with {code}"


def sockets() -> set:
    """Sockets that this process has open, by their inodes."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return {file[len("socket:[") : -1] for file in found if file.startswith("socket:")}


def payload(seed: int, size: int = PAGE_BYTES) -> bytes:
    return bytes((seed + at * 31) % 251 for at in range(997)) * (size // 997) + bytes([seed % 251]) * (size % 997)


def key(number: int) -> bytes:
    return larder_kv.page_key([number])


def is_durable(client) -> bool:
    """True if the log of the node has all its pages, and a kill leaves them."""
    tiers = client.status(20)[0]["status"]["tiers"]
    return tiers["l3"]["pages"] >= tiers["l2"]["pages"] > 0 and not tiers["l3"]["segments_unsynced"]


class NotedTimeouts:
    """A native client that notes the timeouts of its calls."""

    PLACES = {"locate": 1, "lookup": 1, "pin": 1, "warm": 1, "forget": 1, "get_into": 2, "put_from": 2, "follow": 2}

    def __init__(self, native, timeouts: list) -> None:
        self.native = native
        self.timeouts = timeouts

    def __getattr__(self, name: str):
        member = getattr(self.native, name)
        if name not in self.PLACES:
            return member

        def call(*args, **options):
            self.timeouts.append(args[self.PLACES[name]])
            return member(*args, **options)

        return call


def noted_timeouts(*clients) -> list:
    """The list to which these clients append the timeout of each of their calls from now on.

    A client ends a call by its timeout, which has tests of its own. So tests of engines ask which timeouts they give,
    and need not measure time.
    """
    timeouts: list = []
    for client in clients:
        client._native = NotedTimeouts(client._native, timeouts)
    return timeouts


def eventually(condition, seconds: float = PATIENCE):
    """Waits until `condition` returns something true, and returns that."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)
