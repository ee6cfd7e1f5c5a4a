"""Measures Larder beside its peers.

A turn is one system with pages of one size: its servers and clients are started, measured and ended. For each size
there are rounds, in which each system has a turn. The order of the systems changes with each round, so that no system
always runs first. Results are medians of the rounds.

A system that fails does not end the run. Its cells are marked as failed, and the exit code is 1.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback

import install
import report
from processes import Children, Failed
from systems import Programs, bare, larder, lmcache, mooncake, redis

TARGET = "target"
SYSTEMS = {
    "tcp-stream": bare.TcpStream,
    "tcp-rr": bare.TcpRoundTrip,
    "memcpy": bare.Memcpy,
    "larder": larder.Larder,
    "mooncake": mooncake.Mooncake,
    "lmcache": lmcache.LMCache,
    "redis": redis.Redis,
    "larder-shm": larder.LarderShm,
    "mooncake-shm": mooncake.MooncakeShm,
}
OURS = ("larder", "larder-shm")
UNITS = {"KIB": 1 << 10, "MIB": 1 << 20}
EXISTS_KEYS = 512
EXISTS_BATCHES = 2
PUT_SECONDS_MAX = 60
# Limits of one pass over a data set.
OPERATIONS_MAX = 20_000
PAGES_MAX = 1 << 16


def size(text):
    """Number of bytes of `64KiB` or `1MiB`."""
    for unit, factor in UNITS.items():
        if text.upper().endswith(unit) and text[:-3].isdigit():
            return int(text[:-3]) * factor
    raise argparse.ArgumentTypeError(f"'{text}' is not a size, such as 64KiB or 1MiB")


def listed(kind):
    """A parser of lists with commas."""
    return lambda text: [kind(item) for item in text.split(",")]


def system_name(text):
    """A name of `SYSTEMS`."""
    if text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(SYSTEMS)}")
    return text


def program(text):
    """Absolute path of an executable file."""
    if not (os.path.isfile(text) and os.access(text, os.X_OK)):
        raise argparse.ArgumentTypeError(f"'{text}' is not an executable file")
    return os.path.abspath(text)


def arguments():
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="benches/peers/run",
        description="Measures Larder beside Mooncake, LMCache and Redis on this machine, and compares the results with "
        "Larder's targets.",
        epilog="Exit codes: 0 all systems were measured, 1 a system failed (its cells are marked), 2 wrong arguments.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="pages of 64 KiB and 1 MiB, batches of 16, one client, one round; the options below still apply",
    )
    parser.add_argument("--sizes", type=listed(size), help="page sizes; default 4KiB,64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--batches", type=listed(int), help="numbers of pages per operation; default 1,16,64")
    parser.add_argument("--clients", type=listed(int), help="numbers of concurrent client processes; default 1,4")
    parser.add_argument("--rounds", type=int, help="measurements of each cell; the median is printed; default 3")
    parser.add_argument(
        "--only",
        metavar="SYSTEMS",
        type=listed(system_name),
        default=list(SYSTEMS),
        help=f"systems to measure; default all: {','.join(SYSTEMS)}",
    )
    parser.add_argument("--set", type=size, default=512 << 20, help="size of the data set; default 512MiB")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.35,
        help="maximum duration of a measurement; puts end earlier once the data set is complete; default 0.35",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every measurement and failure to FILE")
    parser.add_argument(
        "--larder",
        metavar="PATH",
        type=program,
        help="measure this `larder` program; by default the script builds one (profile dist)",
    )
    parser.add_argument(
        "--bench-client",
        metavar="PATH",
        type=program,
        help="use this `bench-client` program for the clients of Larder, TCP streams and copies; by default the script "
        "builds one",
    )
    args = parser.parse_args()
    full = {
        "sizes": [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
        "batches": [1, 16, 64],
        "clients": [1, 4],
        "rounds": 3,
    }
    quick = {"sizes": [64 << 10, 1 << 20], "batches": [16], "clients": [1], "rounds": 1}
    for name, value in (quick if args.quick else full).items():
        if not getattr(args, name):
            setattr(args, name, value)
    if any(page_bytes % 4096 or not 0 < page_bytes <= 4 << 20 for page_bytes in args.sizes):
        parser.error("--sizes: a page is a multiple of 4 KiB and at most 4 MiB")
    if not all(0 < batch <= 64 for batch in args.batches):
        parser.error("--batches: an operation has 1 to 64 pages")
    if not all(0 < count <= 4 for count in args.clients):
        parser.error("--clients: 1 to 4 clients are possible")
    return args


class Turn:
    """One system with pages of one size."""

    def __init__(self, args, name, page_bytes, found):
        self.args, self.name, self.page_bytes, self.found = args, name, page_bytes, found
        self.cells = 0

    def run(self, logs):
        """Starts the system, measures all its cells, and ends it."""
        with Children(logs) as children:
            system = SYSTEMS[self.name](children, self.page_bytes)
            clients = []
            for count in sorted(self.args.clients):
                while len(clients) < count:
                    command = system.client(len(clients))
                    clients.append(children.start(f"{self.name}-client", command, system.client_env))
                for batch in self.args.batches:
                    self.batch(system, clients, batch)
                set_bytes = EXISTS_KEYS * EXISTS_BATCHES * count * self.page_bytes
                # The rate hardly depends on the size of the pages, so one size is enough.
                if system.exists and self.page_bytes == min(self.args.sizes) and set_bytes <= self.args.set:
                    self.exists(system, clients)

    def batch(self, system, clients, batch):
        """Measures each operation with one batch size and these clients."""
        self.cells += 1
        per_client = self.args.set // len(clients)
        batches = min(per_client // (self.page_bytes * batch), PAGES_MAX // len(clients) // batch, OPERATIONS_MAX)
        cell = {"cell": self.cells, "size": self.page_bytes, "batch": batch, "batches": max(1, batches)}
        for op in system.ops:
            self.measure(system, clients, {**cell, "op": op, "seconds": self.args.seconds})
        self.measure(system, clients, {**cell, "op": "clear", "seconds": 0}, kept=False)

    def exists(self, system, clients):
        """Puts a data set without a time limit, then measures existence checks."""
        self.cells += 1
        cell = {"cell": self.cells, "size": self.page_bytes, "batch": EXISTS_KEYS, "batches": EXISTS_BATCHES}
        put = {
            **cell,
            "op": "put",
            "batch": 16,
            "batches": EXISTS_KEYS * EXISTS_BATCHES // 16,
            "seconds": PUT_SECONDS_MAX,
        }
        self.measure(system, clients, put, kept=False)
        self.measure(system, clients, {**cell, "op": "exists", "seconds": self.args.seconds})
        self.measure(system, clients, {**put, "op": "clear"}, kept=False)

    def measure(self, system, clients, cell, kept=True):
        """Runs a cell on all clients at once, and keeps the result if `kept`."""
        for client in clients:
            client.write_line(json.dumps(cell))
        # All clients are ready before any begins, so that none has the server for itself.
        for client in clients:
            client.read_json()
        before = [[child.cpu_seconds() for child in children] for children in (clients, system.servers)]
        for client in clients:
            client.write_line("go")
        results = [client.read_json() for client in clients]
        after = [[child.cpu_seconds() for child in children] for children in (clients, system.servers)]
        if not kept:
            return
        cpu = [sum(after) - sum(before) for after, before in zip(after, before)]
        latencies = sorted(latency for result in results for latency in result["latencies_ns"])
        moved = len(latencies) * cell["batch"] * cell["size"]
        seconds = max(result["seconds"] for result in results)
        notes = {}
        for result in results:
            for note, times in result["notes"].items():
                notes[note] = notes.get(note, 0) + times
        self.found.append(
            {
                "system": self.name,
                "op": cell["op"],
                "size": cell["size"],
                "batch": cell["batch"],
                "clients": len(clients),
                "operations": len(latencies),
                "seconds": seconds,
                "gb_per_s": moved / 1e9 / seconds,
                "keys_per_s": len(latencies) * cell["batch"] / seconds,
                "p50_ms": statistics.median(latencies) / 1e6,
                "p99_ms": latencies[len(latencies) * 99 // 100] / 1e6,
                "client_cpu_s_per_gib": cpu[0] / (moved / 2**30),
                "server_cpu_s_per_gib": cpu[1] / (moved / 2**30),
                "notes": notes,
            }
        )


class Run:
    """All turns, with the measurements and failures so far."""

    def __init__(self, args, logs):
        self.args, self.logs = args, logs
        self.found = []
        self.failures = []
        # Systems that will not be started again.
        self.dropped = set()

    def fail(self, name, reason, size=None, round=None):
        """Records a failure, and reports it at once."""
        self.failures.append({"system": name, "size": size, "round": round, "reason": reason})
        print(f"FAILED {name}: {reason}", file=sys.stderr)

    def turn(self, name, page_bytes, number):
        """Runs one turn. A failure ends the turn and not the run."""
        kept = len(self.found)
        try:
            Turn(self.args, name, page_bytes, self.found).run(self.logs)
            return
        except Failed as error:
            reason = str(error)
        # A client that answers with something else than expected is a failure of that system, too.
        except Exception:
            reason = traceback.format_exc()
        self.fail(name, reason, page_bytes, number + 1)
        # Without a single measurement it will hardly start the next time, and each try may cost minutes of waiting.
        if len(self.found) == kept:
            self.dropped.add(name)
            print(f"{name} is left out from here on", file=sys.stderr)

    def all(self):
        """Runs all turns."""
        args = self.args
        for page_bytes in args.sizes:
            for number in range(args.rounds):
                order = args.only[number % len(args.only) :] + args.only[: number % len(args.only)]
                for name in order if number % 2 == 0 else reversed(order):
                    if name in self.dropped:
                        continue
                    begin = time.monotonic()
                    self.turn(name, page_bytes, number)
                    took = time.monotonic() - begin
                    print(
                        f"{report.size_name(page_bytes)}, round {number + 1} of {args.rounds}: {name}, {took:.1f} s",
                        file=sys.stderr,
                    )


def prepare(args, run):
    """Finds or makes the programs of all systems. Systems that cannot be prepared are dropped from the run."""
    place = install.Place(TARGET)
    for name, reason in install.peers(place, args.only).items():
        run.fail(name, f"cannot be installed: {reason}")
        run.dropped.add(name)
    Programs.python = os.path.abspath(place.python)
    built = None
    needs_larder = any(name in OURS for name in args.only)
    needs_client = any(name not in install.PEERS for name in args.only)
    if needs_larder and not args.larder or needs_client and not args.bench_client:
        built = os.path.abspath(install.build(TARGET))
    Programs.larder = args.larder or built and os.path.join(built, "larder")
    Programs.bench_client = args.bench_client or built and os.path.join(built, "bench-client")


def main():
    """Measures, prints the report, and returns the exit code."""
    # As exceptions, these signals end the children with their blocks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    args = arguments()
    place = os.path.join(TARGET, "peers")
    os.makedirs(place, exist_ok=True)
    logs = tempfile.mkdtemp(prefix="logs-", dir=os.path.abspath(place))
    run = Run(args, logs)
    prepare(args, run)
    run.all()
    if args.json:
        content = {
            "machine": report.machine(),
            "rounds": args.rounds,
            "measurements": run.found,
            "failures": run.failures,
        }
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(content, out, indent=1)
    ops = {name: SYSTEMS[name].ops + (("exists",) if SYSTEMS[name].exists else ()) for name in args.only}
    report.show(report.Figures(run.found, args.rounds, {one["system"] for one in run.failures}, ops))
    report.show_failures(run.failures)
    if run.failures:
        print(f"The output of the failed programs is in {logs}.", file=sys.stderr)
        return 1
    shutil.rmtree(logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
