"""Child processes that are always ended.

Invariants:
- A child ends with the `with Children(…)` block that started it, also if that block raises.
- A child ends with this process, also if this process is killed.
- Every wait has a deadline.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import time

START_SECONDS = 30
ANSWER_SECONDS = 120
END_SECONDS = 5
PR_SET_PDEATHSIG = 1
CPUCLOCK_SCHED = 2
_libc = ctypes.CDLL(None)


class Failed(Exception):
    """A program cannot be started, has ended early, does not answer, or reports an error."""


def _before_exec():
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process that reads and writes lines."""

    def __init__(self, command, log, env=None, piped=True):
        """Starts it. Standard error goes to `log`, and so does standard output unless it is `piped` to this process."""
        self.name = " ".join(map(str, command[:4]))
        self.log = log
        with open(log, "ab") as errors:
            try:
                self.process = subprocess.Popen(
                    list(map(str, command)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if piped else errors,
                    stderr=errors,
                    bufsize=0,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                    preexec_fn=_before_exec,
                )
            except OSError as error:
                raise Failed(f"{self.name}: cannot be started: {error}") from error
        self.pending = b""
        self.selector = selectors.DefaultSelector()
        if piped:
            self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def cpu_seconds(self):
        """CPU time of all its threads, user and system. /proc/PID/stat has it only in ticks, which are too coarse."""
        try:
            # The id of a process's CPU clock, as the C library's clock_getcpuclockid makes it.
            return time.clock_gettime((~self.process.pid << 3) | CPUCLOCK_SCHED)
        except OSError as error:
            raise self.failed("ended early") from error

    def write_line(self, line):
        """Sends a line."""
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except OSError as error:
            raise self.failed(str(error)) from error

    def read_line(self, seconds=ANSWER_SECONDS):
        """Returns the next line. Raises `Failed` if none comes within `seconds`."""
        end = time.monotonic() + seconds
        while b"\n" not in self.pending:
            if not self.selector.select(max(0, end - time.monotonic())):
                raise self.failed(f"no answer for {seconds} s")
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            if not read:
                raise self.failed("ended early")
            self.pending += read
        line, self.pending = self.pending.split(b"\n", 1)
        return line.decode()

    def read_json(self):
        """Returns the next JSON object. Other lines are skipped, as some libraries log to standard output."""
        while not (line := self.read_line()).startswith("{"):
            pass
        return json.loads(line)

    def failed(self, why):
        """An error with its reason and the end of the log."""
        with open(self.log, "rb") as log:
            end = log.read()[-600:].decode(errors="replace").strip()
        return Failed(f"{self.name}: {why}\n{end}")

    def terminate(self):
        """Closes its input and sends SIGTERM."""
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()

    def end(self):
        """Waits for its end, and kills it after `END_SECONDS`."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.selector.close()
        if self.process.stdout:
            self.process.stdout.close()


class Children:
    """All processes of one system."""

    def __init__(self, logs):
        self.logs = logs
        self.all = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # All are told to end before any is waited for, so that they end at the same time.
        for child in reversed(self.all):
            child.terminate()
        for child in reversed(self.all):
            child.end()

    def start(self, name, command, env=None):
        """Starts a process whose standard output is piped. Standard error goes to NAME.log."""
        return self._start(Child(command, os.path.join(self.logs, name + ".log"), env))

    def start_server(self, name, port, command, env=None):
        """Starts a process and waits until it listens on `port`. All its output goes to NAME.log."""
        child = self._start(Child(command, os.path.join(self.logs, name + ".log"), env, piped=False))
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return child
            except OSError:
                if child.process.poll() is not None or time.monotonic() > end:
                    raise child.failed(f"does not listen on port {port}") from None
                time.sleep(0.02)

    def _start(self, child):
        self.all.append(child)
        return child


def free_port():
    """A TCP port that is free at the moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
