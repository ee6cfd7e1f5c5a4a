"""Faults for a store node while an engine uses it: `--chaos SECONDS` of the programs in this folder.

`Chaos` repeats these faults in rounds, each round in a random order:

- `kill`: SIGKILL, then a start on the same data directory
- `pause`: SIGSTOP, then SIGCONT
- `cut`: a proxy between engine and node holds back bytes, resets connections, or lets bytes pass one way only
- `full`: a ballast file takes the rest of the file system of the data directory, then goes
- `restart`: SIGTERM, then a start

The node shares memory with clients of its machine in every other life of it. Such clients bypass the proxy, so a cut
first restarts a node that shares memory. `Load` is the other side, in the process of the engine: it times calls, and
counts what they answered. A fault that never occurred, a wrong answer and a call beyond its limit fail the run.
"""

import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from node import Node

KINDS = ("kill", "pause", "cut", "full", "restart")
CUTS = ("stall", "reset", "one-way")
FAULT_SECONDS = (1, 8)
"""Range of a fault's length. Most clients give up after 5 s, so some faults outlast their calls."""

CALM_SECONDS = (1, 4)
STOP_SECONDS = 90
"""Longest time from SIGTERM to the end of a node, which may write pages for 60 s."""

ALLOWANCE_SECONDS = 3
"""Time that a call may take beyond its deadline: a second in which the client verifies pages that have arrived, and
two for a machine whose processors are busy."""

RECOVERY_SECONDS = 60
REPORT_SECONDS = 180
DISK_BYTES = 1 << 30
NODE_OPTIONS = ("--l2", "128MiB", "--l3-bytes", "4GiB")
"""L3 may be larger than its file system. So the log grows until the ballast stops it, or until it fills the disk."""

CHUNK_BYTES = 64 << 10
CONNECT_SECONDS = 5


class Proxy:
    """Forwards TCP connections to a node, except while it is cut off."""

    def __init__(self, target):
        self.target, self.mode = target, "pass"
        self.changed, self.pairs = threading.Condition(), set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.connect, args=(client,), daemon=True).start()

    def connect(self, client):
        host, port = self.target.split(":")
        try:
            if self.mode == "reset":
                raise ConnectionResetError
            node = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError:
            reset(client)
            return
        node.settimeout(None)
        with self.changed:
            self.pairs.add((client, node))
        directions = ((client, node, ("stall",)), (node, client, ("stall", "one-way")))
        threads = [threading.Thread(target=self.forward, args=each, daemon=True) for each in directions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.changed:
            self.pairs.discard((client, node))
        client.close()
        node.close()

    def forward(self, source, target, held):
        try:
            while data := source.recv(CHUNK_BYTES):
                with self.changed:
                    self.changed.wait_for(lambda: self.mode not in held)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for each in (source, target):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def set(self, mode):
        """Changes the mode: `pass` or one of CUTS. `reset` also ends all connections."""
        with self.changed:
            self.mode = mode
            self.changed.notify_all()
            pairs = list(self.pairs) if mode == "reset" else []
        for pair in pairs:
            for each in pair:
                reset(each, is_read=True)


def reset(connection, is_read=False):
    """Ends a connection by RST. If a thread reads from it, that thread closes it."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR) if is_read else connection.close()
    except OSError:
        pass


class Disk:
    """A small file system in a file. Needs root."""

    def __init__(self, work):
        if os.geteuid() != 0:
            raise SystemExit("--chaos mounts a small file system, which needs root")
        self.place, image = work / "disk", work / "disk.image"
        subprocess.run(["umount", "--quiet", "--lazy", self.place], stderr=subprocess.DEVNULL)
        self.place.mkdir(parents=True, exist_ok=True)
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.place], check=True)

    def fill(self):
        """Takes all free blocks. Returns their bytes."""
        taken = 0
        with open(self.place / "ballast", "wb") as file:
            for piece in (64 << 20, 1 << 20, 4 << 10):
                while True:
                    try:
                        os.posix_fallocate(file.fileno(), taken, piece)
                    except OSError:
                        break
                    taken += piece
        return taken

    def free(self):
        (self.place / "ballast").unlink(missing_ok=True)

    def close(self):
        self.free()
        subprocess.run(["umount", "--lazy", self.place], check=True)


class Chaos(threading.Thread):
    """A node with proxies before its ports, and the thread that makes its faults for SECONDS."""

    def __init__(self, work, seconds, seed=None):
        super().__init__(daemon=True)
        self.seconds = seconds
        self.seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.random = random.Random(self.seed)
        self.counts, self.failure, self.began = dict.fromkeys(KINDS, 0), None, time.monotonic()
        self.ended = threading.Event()
        self.work = pathlib.Path(work)
        self.disk = Disk(self.work)
        try:
            self.shares = False
            self.node = Node(self.work, *NODE_OPTIONS, "--share-memory", "never", data=self.disk.place / "data")
        except BaseException:
            self.disk.close()
            raise
        self.data, self.redis = Proxy(self.node.address), Proxy(self.node.redis)
        self.url = f"larder://{self.data.address}"
        print(f"chaos: seed {self.seed}, {seconds} s", flush=True)

    def log(self, text):
        print(f"chaos: {time.monotonic() - self.began:6.1f} s: {text}", flush=True)

    def run(self):
        self.began = time.monotonic()
        end = self.began + self.seconds
        try:
            while time.monotonic() < end and not self.ended.is_set():
                for kind in self.random.sample(KINDS, len(KINDS)):
                    calm = self.random.uniform(*CALM_SECONDS)
                    # The first round is whole, also on a machine where starts take long.
                    if (time.monotonic() < end or not self.counts[kind]) and not self.ended.wait(calm):
                        getattr(self, kind)(self.random.uniform(*FAULT_SECONDS))
                        self.counts[kind] += 1
                        self.check()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.log(self.failure)
        self.log("the last fault is over")

    def check(self):
        if self.node.process.poll() is not None:
            raise SystemExit(f"the node has ended with {self.node.process.returncode}: see {self.node.log}")

    def start_node(self):
        self.shares = not self.shares
        self.node.arguments = (*NODE_OPTIONS, "--share-memory", "always" if self.shares else "never")
        self.node.start()
        return f"back, {'with' if self.shares else 'without'} shared memory"

    def kill(self, seconds):
        self.check()
        self.node.kill()
        self.log(f"kill -9 for {seconds:.1f} s")
        time.sleep(seconds)
        self.log(self.start_node())

    def pause(self, seconds):
        self.node.pause()
        self.log(f"pause for {seconds:.1f} s")
        time.sleep(seconds)
        self.node.resume()

    def cut(self, seconds):
        if self.shares:
            self.restart(0)
        mode = self.random.choice(CUTS)
        self.log(f"cut off ({mode}) for {seconds:.1f} s")
        for proxy in (self.data, self.redis):
            proxy.set(mode)
        time.sleep(seconds)
        for proxy in (self.data, self.redis):
            proxy.set("pass")

    def full(self, seconds):
        taken = self.disk.fill()
        self.log(f"disk full for {seconds:.1f} s, by {taken >> 20} MiB")
        time.sleep(seconds)
        self.disk.free()

    def restart(self, seconds):
        self.check()
        self.node.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        try:
            code = self.node.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the node does not stop within {STOP_SECONDS} s of SIGTERM") from None
        if code:
            raise SystemExit(f"the node has ended with {code} after SIGTERM: see {self.node.log}")
        self.log(f"stopped within {time.monotonic() - began:.1f} s, for {seconds:.1f} s")
        time.sleep(seconds)
        self.log(self.start_node())

    def close(self):
        """Ends the node and prints the counts. Returns failures of the faults."""
        failures = [f"chaos: {self.failure}"] if self.failure else []
        failures += [f"chaos: no {kind} occurred" for kind, count in self.counts.items() if not count]
        print(f"chaos: seed {self.seed}: {self.counts}", flush=True)
        for proxy in (self.data, self.redis):
            proxy.listener.close()
        self.node.resume()
        self.node.kill()
        self.disk.close()
        return failures


def under_faults(name, chaos, command, environment):
    """Runs `command`, whose `Load` ends after a line of input, during faults. Returns failures.

    The engine must live to its report, have hits during the faults and after them, and no wrong answer.
    """
    log, answers = chaos.work / "engine.log", chaos.work / "engine.out"
    # A pipe could fill up with log lines, and the engine would wait for their reader.
    with open(log, "ab") as errors, open(answers, "wb") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": errors, "text": True}
        process = subprocess.Popen(list(map(str, command)), env=environment, **pipes)
    try:
        chaos.start()
        while chaos.is_alive() and process.poll() is None:
            chaos.join(1)
        is_dead = process.poll() is not None
        # The thread ends with its fault. It must not start a node that is never ended.
        chaos.ended.set()
        chaos.join()
        if is_dead:
            return [f"{name}: the engine has ended with {process.returncode} during the faults: see {log}"]
        process.communicate("\n", timeout=REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{name}: the engine does not end within {REPORT_SECONDS} s after the last fault"]
    finally:
        process.kill()
        process.wait()
    reports = [json.loads(line) for line in answers.read_text().splitlines() if line.startswith('{"calls"')]
    if process.returncode or not reports:
        return [f"{name}: the engine has ended with {process.returncode} and {len(reports)} reports: see {log}"]
    return judge(name, reports[-1])


def judge(name, report):
    """Failures of a report of `Load`. Prints the report."""
    print(f"{name}: {json.dumps({key: value for key, value in report.items() if key != 'problems'})}", flush=True)
    failures = [f"{name}: {problem}" for problem in report["problems"]]
    if not report["counts"].get("hits"):
        failures.append(f"{name}: no hit during the faults")
    return failures


class Load:
    """Calls of an engine. `limits` has the deadline of each kind of call in seconds. For several threads."""

    PROBLEMS_MAX = 20

    def __init__(self, limits):
        self.limits, self.lock, self.ended = limits, threading.Lock(), threading.Event()
        self.calls, self.longest = dict.fromkeys(limits, 0), dict.fromkeys(limits, 0.0)
        self.counts, self.problems, self.recovered = {}, [], None

    def until_input(self):
        """Lets `is_running` be false after a line of input, or its end."""
        threading.Thread(target=lambda: (sys.stdin.readline(), self.ended.set()), daemon=True).start()

    @property
    def is_running(self):
        return not self.ended.is_set()

    def call(self, kind, function, *arguments, **options):
        began = time.monotonic()
        try:
            return function(*arguments, **options)
        finally:
            seconds = time.monotonic() - began
            with self.lock:
                self.calls[kind] += 1
                self.longest[kind] = max(self.longest[kind], seconds)
            if seconds > self.limits[kind] + ALLOWANCE_SECONDS:
                self.problem(f"{kind} took {seconds:.1f} s, and may take {self.limits[kind]} + {ALLOWANCE_SECONDS} s")

    def count(self, what, number=1):
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + number

    def problem(self, text):
        with self.lock:
            self.counts["problems"] = self.counts.get("problems", 0) + 1
            if len(self.problems) < self.PROBLEMS_MAX:
                self.problems.append(f"{time.strftime('%H:%M:%S')}: {text}")

    def recover(self, is_right):
        """Repeats `is_right`, which stores and finds again, until it succeeds. It must within RECOVERY_SECONDS."""
        began = time.monotonic()
        while not is_right():
            if time.monotonic() - began > RECOVERY_SECONDS:
                self.problem(f"no hits within {RECOVERY_SECONDS} s after the last fault")
                break
            time.sleep(0.5)
        self.recovered = round(time.monotonic() - began, 2)

    def report(self):
        longest = {kind: round(seconds, 2) for kind, seconds in self.longest.items()}
        report = {"calls": self.calls, "longest": longest, "counts": self.counts, "recovered": self.recovered}
        return dict(report, problems=self.problems)

    def print_report(self):
        print(json.dumps(self.report()), flush=True)


def add_options(parser, compares=True):
    """Options of a program with faults and, unless it `compares` nothing, with a comparison."""
    parser.add_argument("--chaos", type=int, metavar="SECONDS", help="only run the engine during faults of the node")
    parser.add_argument("--seed", type=int, help="of the faults; random if left out")
    if compares:
        parser.add_argument("--compare", action="store_true", help="only measure the store beside others")
        parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of the comparison, at least 1")
