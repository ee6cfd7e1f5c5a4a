"""Child processes: started, asked, timed, and always ended.

Every child ends with the block of `Children` that started it, however that ends, and with this process, even if it is
killed. Every wait has a deadline.
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
    """A child has ended, is silent, or says that something is wrong."""


def _before_exec():
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process that is spoken to by lines."""

    def __init__(self, command, log, env=None, heard=True):
        """What it says on standard output is heard, or goes to the log with the rest."""
        self.name = " ".join(map(str, command[:4]))
        self.log = log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if heard else errors,
                stderr=errors,
                bufsize=0,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_before_exec,
            )
        self.pending = b""
        self.selector = selectors.DefaultSelector()
        if heard:
            self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def cpu_seconds(self):
        """Processor time of all its threads: utime + stime of /proc/PID/stat, in nanoseconds instead of ticks."""
        return time.clock_gettime((~self.process.pid << 3) | CPUCLOCK_SCHED)

    def tell(self, line):
        """Writes a line."""
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except OSError as error:
            raise self.failed(str(error)) from error

    def hear(self, seconds=ANSWER_SECONDS):
        """The next line; raises if none comes in time."""
        end = time.monotonic() + seconds
        while b"\n" not in self.pending:
            if not self.selector.select(max(0, end - time.monotonic())):
                raise self.failed(f"says nothing for {seconds} s")
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            if not read:
                raise self.failed("has ended")
            self.pending += read
        line, self.pending = self.pending.split(b"\n", 1)
        return line.decode()

    def hear_json(self):
        """The next line that is a JSON object: some libraries log to standard output."""
        while not (line := self.hear()).startswith("{"):
            pass
        return json.loads(line)

    def failed(self, why):
        """What went wrong, with the end of the log."""
        with open(self.log, "rb") as log:
            end = log.read()[-600:].decode(errors="replace").strip()
        return Failed(f"{self.name}: {why}\n{end}")

    def ask_to_end(self):
        """Closes its input and tells it to end."""
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()

    def end(self):
        """Waits for its end, and kills it if that takes long."""
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
        for child in reversed(self.all):
            child.ask_to_end()
        for child in reversed(self.all):
            child.end()

    def start(self, name, command, env=None):
        """Starts a process; what it says on standard error is kept."""
        return self._start(Child(command, os.path.join(self.logs, name + ".log"), env))

    def start_server(self, name, port, command, env=None):
        """Starts a process, and waits until it listens. All that it says is kept."""
        child = self._start(Child(command, os.path.join(self.logs, name + ".log"), env, heard=False))
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return child
            except OSError:
                if child.process.poll() is not None or time.monotonic() > end:
                    raise child.failed("does not listen") from None
                time.sleep(0.02)

    def _start(self, child):
        self.all.append(child)
        return child


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
