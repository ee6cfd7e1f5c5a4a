"""Measures Larder beside its peers. `run` installs what this needs.

For each size of pages, in rounds: each system in turn, with its servers and clients started anew, in another order each
round. A turn measures each number of clients with each batch: puts of new pages, then gets of them. The medians of the
rounds count.
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

import report
from processes import Children, Failed
from systems import TARGET, bare, larder, lmcache, mooncake, redis

SYSTEMS = {
    "bare": bare.Bare,
    "asked": bare.BareAsked,
    "copy": bare.Copy,
    "larder": larder.Larder,
    "mooncake": mooncake.Mooncake,
    "lmcache": lmcache.LMCache,
    "redis": redis.Redis,
    "larder-shm": larder.LarderShm,
    "mooncake-shm": mooncake.MooncakeShm,
}
UNITS = {"KIB": 1 << 10, "MIB": 1 << 20}
EXISTS_KEYS = 512
EXISTS_BATCHES = 2
PUT_SECONDS_MAX = 60
# Most operations of a pass, and most pages.
OPERATIONS_MAX = 20_000
PAGES_MAX = 1 << 16


def size(text):
    """Bytes of `64KiB` or `1MiB`."""
    for unit, factor in UNITS.items():
        if text.upper().endswith(unit) and text[:-3].isdigit():
            return int(text[:-3]) * factor
    raise argparse.ArgumentTypeError(f"'{text}' is not a size, such as 64KiB or 1MiB")


def listed(kind):
    """A list with commas."""
    return lambda text: [kind(item) for item in text.split(",")]


def system_name(text):
    """One of the systems."""
    if text not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(SYSTEMS)}")
    return text


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(prog="benches/peers/run", description="Larder beside Mooncake, LMCache and Redis.")
    parser.add_argument("--quick", action="store_true", help="64 KiB and 1 MiB, batches of 16, one client, one round")
    parser.add_argument("--sizes", type=listed(size), help="bytes of a page; default 4KiB,64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--batches", type=listed(int), help="pages in an operation; default 1,16,64")
    parser.add_argument("--clients", type=listed(int), help="client processes at a time; default 1,4")
    parser.add_argument("--rounds", type=int, help="the median of so many counts; default 3")
    parser.add_argument("--only", type=listed(system_name), default=list(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--set", type=size, default=512 << 20, help="data set of a measurement; default 512MiB")
    parser.add_argument(
        "--seconds", type=float, default=0.35, help="of one measurement; puts end with the data set before"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every single measurement there")
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
        parser.error("sizes are multiples of 4 KiB up to 4 MiB")
    if not all(0 < batch <= 64 for batch in args.batches) or not all(0 < count <= 4 for count in args.clients):
        parser.error("there are 1 to 64 pages in an operation, and 1 to 4 clients")
    return args


class Turn:
    """One system with pages of one size."""

    def __init__(self, args, name, page_bytes, found):
        self.args, self.name, self.page_bytes, self.found = args, name, page_bytes, found
        self.cells = 0

    def run(self, logs):
        """Starts it, measures, ends it."""
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
                if system.exists and self.page_bytes == min(self.args.sizes) and set_bytes <= self.args.set:
                    self.exists(system, clients)

    def batch(self, system, clients, batch):
        """All measurements of a batch size and these clients."""
        self.cells += 1
        per_client = self.args.set // len(clients)
        batches = min(per_client // (self.page_bytes * batch), PAGES_MAX // len(clients) // batch, OPERATIONS_MAX)
        cell = {"cell": self.cells, "size": self.page_bytes, "batch": batch, "batches": max(1, batches)}
        for op in system.ops:
            self.measure(system, clients, {**cell, "op": op, "seconds": self.args.seconds})
        self.measure(system, clients, {**cell, "op": "clear", "seconds": 0}, kept=False)

    def exists(self, system, clients):
        """Puts pages, however long it takes, and asks whether they are there."""
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
        """All clients do the same at the same time; whether what is seen counts."""
        for client in clients:
            client.tell(json.dumps(cell))
        for client in clients:
            client.hear_json()
        before = [[child.cpu_seconds() for child in children] for children in (clients, system.servers)]
        for client in clients:
            client.tell("go")
        seen = [client.hear_json() for client in clients]
        after = [[child.cpu_seconds() for child in children] for children in (clients, system.servers)]
        if not kept:
            return
        cpu = [sum(after) - sum(before) for after, before in zip(after, before)]
        latencies = sorted(latency for client in seen for latency in client["latencies_ns"])
        moved = len(latencies) * cell["batch"] * cell["size"]
        seconds = max(client["seconds"] for client in seen)
        notes = {}
        for client in seen:
            for note, times in client["notes"].items():
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


def measure_all(args, logs):
    """All measurements, and how many turns failed."""
    found, failed = [], 0
    for page_bytes in args.sizes:
        for number in range(args.rounds):
            order = args.only[number % len(args.only) :] + args.only[: number % len(args.only)]
            for name in order if number % 2 == 0 else reversed(order):
                begin = time.monotonic()
                turn = Turn(args, name, page_bytes, found)
                try:
                    turn.run(logs)
                except Failed as error:
                    failed += 1
                    print(f"FAILED {name}: {error}", file=sys.stderr)
                took = time.monotonic() - begin
                print(
                    f"{page_bytes >> 10} KiB, round {number + 1} of {args.rounds}: {name}, {took:.1f} s",
                    file=sys.stderr,
                )
    return found, failed


def main():
    """Measures and prints."""
    # So that what was started is ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    args = arguments()
    place = os.path.join(TARGET, "peers")
    os.makedirs(place, exist_ok=True)
    logs = tempfile.mkdtemp(prefix="logs-", dir=place)
    found, failed = measure_all(args, logs)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"machine": report.machine(), "rounds": args.rounds, "measurements": found}, out, indent=1)
    report.show(found, args.rounds)
    if failed:
        sys.exit(f"{failed} turns failed; what the processes said is in {logs}")
    shutil.rmtree(logs)


if __name__ == "__main__":
    main()
