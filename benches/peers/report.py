"""Tables of the results, and the comparison with the targets."""

import os
import platform
import statistics

PEERS = ("mooncake", "lmcache", "redis")
# The targets.
BEST_PEER_TIMES = 2
STREAM_PART = 0.9
STREAM_CPU_TIMES = 1.2
CLIENTS_PART = 0.95
VIEW_TIMES = 3
COPIED_TIMES = 1.2
EXISTS_PER_SECOND = 2e6
# Targets hold from this page size on.
TARGET_SIZE_MIN = 64 << 10

NOT_MEASURED = "–"
FAILED = "failed"
# Marks medians of fewer rounds than asked for.
FEWER_ROUNDS = "*"
# Notes of clients, in words.
NOTES = {"busy": "refused as the node was busy, and put again", "copied": "copied instead of read in place"}


def machine():
    """CPUs and kernel of this machine."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return f"{os.cpu_count()} CPUs ({names[0] if names else platform.machine()}), Linux {platform.release()}"


def size_name(size):
    """A size with its unit."""
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


class Figures:
    """Medians of the rounds. A key is system, operation, page size, batch and number of clients."""

    def __init__(self, found, rounds, failed, ops):
        """`failed`: systems with a failed turn. `ops`: operations of each system that was to be measured."""
        self.found, self.rounds, self.failed, self.ops = found, rounds, failed, ops
        self.groups = {}
        for one in found:
            key = (one["system"], one["op"], one["size"], one["batch"], one["clients"])
            self.groups.setdefault(key, []).append(one)

    def median(self, field, *key):
        """Median of a field, or `None` if there is no measurement."""
        group = self.groups.get(key)
        return statistics.median(one[field] for one in group) if group else None

    def cpu(self, *key):
        """CPU seconds per GiB of clients and servers together."""
        client, server = self.median("client_cpu_s_per_gib", *key), self.median("server_cpu_s_per_gib", *key)
        return None if client is None else client + server

    def values(self, position):
        """All values at a position of the keys, in order."""
        return sorted({key[position] for key in self.groups})

    def cell(self, fields, form, *key):
        """Text of a table's cell: medians of `fields` in the format `form`, or why there are none."""
        group = self.groups.get(key)
        if not group:
            return FAILED if key[0] in self.failed else NOT_MEASURED
        mark = FEWER_ROUNDS if key[0] in self.failed and len(group) < self.rounds else ""
        return form(*(self.median(field, *key) for field in fields)) + mark


def number(value):
    """A figure with two or three decimals."""
    if value is None:
        return NOT_MEASURED
    return ("{:.2f}" if value >= 0.1 or value == 0 else "{:.3f}").format(value)


def table(head, rows):
    """Prints a table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def columns(figures, op):
    """Name, system and operation of each column in the tables of an operation."""
    names = ("tcp-stream", "tcp-rr", "memcpy", "larder", *PEERS, "larder-shm", "mooncake-shm")
    there = {key[:2] for key in figures.groups}
    there |= {(name, of) for name in figures.failed for of in figures.ops.get(name, ())}
    shown = []
    for name in names:
        if (name, op) in there:
            shown.append((name, name, op))
        if op == "get" and (name, "view") in there:
            shown.append((f"{name} in place", name, "view"))
    return shown


def show_operation(figures, op, clients):
    """Prints throughput, latency and CPU time of an operation."""
    shown = columns(figures, op)
    cells = [
        (size, batch)
        for size in figures.values(2)
        for batch in figures.values(3)
        if any((system, of, size, batch, clients) in figures.groups for _, system, of in shown)
    ]
    head = ["page", "pages per batch", *(name for name, _, _ in shown)]

    def show(title, fields, form):
        print(f"### {op}, {clients} client{'s' if clients > 1 else ''}: {title}\n")
        table(
            head,
            [
                [
                    size_name(size),
                    str(batch),
                    *(figures.cell(fields, form, system, of, size, batch, clients) for _, system, of in shown),
                ]
                for size, batch in cells
            ],
        )

    show("throughput, GB/s", ["gb_per_s"], number)
    show("latency of a batch, p50 / p99, ms", ["p50_ms", "p99_ms"], "{:.3g} / {:.3g}".format)
    cpu_fields = ["client_cpu_s_per_gib", "server_cpu_s_per_gib"]
    show("CPU s/GiB, clients + servers", cpu_fields, lambda client, server: f"{number(client)} + {number(server)}")


def show_exists(figures):
    """Prints the rates of existence checks."""
    found = sorted(key for key in figures.groups if key[1] == "exists")
    if not found:
        return
    print("### exists, 512 keys per batch: million keys/s\n")
    clients = sorted({key[4] for key in found})
    failed = {name for name in figures.failed if "exists" in figures.ops.get(name, ())}
    rows = []
    for system in sorted(failed.union(key[0] for key in found)):
        keys = {key[4]: key for key in found if key[0] == system}
        cells = (keys.get(count, (system, "exists", 0, 0, count)) for count in clients)
        rows.append([system, *(figures.cell(["keys_per_s"], lambda rate: f"{rate / 1e6:.3f}", *key) for key in cells)])
    table(["system", *(f"{count} clients" if count > 1 else "1 client" for count in clients)], rows)


def show_notes(figures):
    """Prints how often clients had to put or copy pages again."""
    notes = {}
    for one in figures.found:
        for note, times in one["notes"].items():
            cell = f"{one['op']} {size_name(one['size'])} × {one['batch']}, {one['clients']} clients"
            where = (f"{one['system']} {cell}", NOTES.get(note, note))
            notes[where] = notes.get(where, 0) + times
    for (cell, note), times in notes.items():
        print(f"- {cell}: {times} pages {note} (all rounds)")
    if notes:
        print()


def at_least(value, target):
    """`yes`, or the ratio to the target."""
    if value is None or target is None:
        return NOT_MEASURED
    return "yes" if value >= target else f"NO ({value / target:.2f})"


def at_most(value, target):
    """`yes`, or the ratio to the target."""
    if value is None or target is None:
        return NOT_MEASURED
    return "yes" if value <= target else f"NO ({value / target:.2f})"


def times(value, factor):
    """The product, or `None` without a value."""
    return None if value is None else value * factor


def tcp_target(figures, *cell):
    """Target of Larder's throughput over TCP in GB/s. Peers without a figure for this cell do not count."""
    peers = [figures.median("gb_per_s", peer, *cell) for peer in PEERS]
    peers = [peer for peer in peers if peer is not None]
    stream = figures.median("gb_per_s", "tcp-stream", *cell)
    targets = [BEST_PEER_TIMES * max(peers)] if peers else []
    if stream is not None:
        targets.append(STREAM_PART * stream)
    return min(targets) if targets else None


def tcp_row(figures, op, size, batch, clients):
    """Comparison of one cell over TCP."""
    cell = (op, size, batch, clients)
    speed = figures.median("gb_per_s", "larder", *cell)
    one = figures.median("gb_per_s", "larder", op, size, batch, 1)
    scaling = NOT_MEASURED if clients == 1 else at_least(speed, times(one, CLIENTS_PART))
    return [
        op,
        size_name(size),
        str(batch),
        str(clients),
        number(speed),
        at_least(speed, tcp_target(figures, *cell)),
        scaling,
        at_most(figures.cpu("larder", *cell), times(figures.cpu("tcp-stream", *cell), STREAM_CPU_TIMES)),
    ]


def shm_row(figures, size, batch, clients):
    """Comparison of one cell over shared memory."""
    peer = figures.median("gb_per_s", "mooncake-shm", "get", size, batch, clients)
    view = figures.median("gb_per_s", "larder-shm", "view", size, batch, clients)
    copied = figures.median("gb_per_s", "larder-shm", "get", size, batch, clients)
    return [
        size_name(size),
        str(batch),
        str(clients),
        number(view),
        at_least(view, times(peer, VIEW_TIMES)),
        number(copied),
        at_least(copied, times(peer, COPIED_TIMES)),
    ]


def show_targets(figures):
    """Prints the targets and whether Larder reaches them."""
    groups = [key for key in figures.groups if key[2] >= TARGET_SIZE_MIN]
    cells = sorted(
        {key[1:] for key in groups if key[0] == "larder" and key[1] != "exists"},
        key=lambda key: (key[0], key[3], key[1], key[2]),
    )
    if cells:
        print("### Targets over TCP\n")
        table(
            [
                "",
                "page",
                "pages per batch",
                "clients",
                "larder GB/s",
                f"≥ min({BEST_PEER_TIMES} × best peer, {STREAM_PART} × tcp-stream)",
                f"≥ {CLIENTS_PART} × one client",
                f"CPU ≤ {STREAM_CPU_TIMES} × tcp-stream",
            ],
            [tcp_row(figures, *cell) for cell in cells],
        )
    shared = sorted(
        {key[2:] for key in groups if key[0] == "larder-shm" and key[1] == "view"},
        key=lambda key: (key[2], key[0], key[1]),
    )
    if shared:
        print("### Targets over shared memory\n")
        table(
            [
                "page",
                "pages per batch",
                "clients",
                "in place GB/s",
                f"≥ {VIEW_TIMES} × mooncake-shm",
                "copied out GB/s",
                f"≥ {COPIED_TIMES} × mooncake-shm",
            ],
            [shm_row(figures, *cell) for cell in shared],
        )
    for key in sorted(key for key in figures.groups if key[:2] == ("larder", "exists")):
        rate = figures.median("keys_per_s", *key)
        target = f"exists ≥ {EXISTS_PER_SECOND / 1e6:.0f} M keys/s, {key[4]} client{'s' if key[4] > 1 else ''}"
        print(f"{target}: {at_least(rate, EXISTS_PER_SECOND)}")


def show_failures(failures):
    """Prints each failure with its reason, which may have several lines."""
    if not failures:
        return
    print(f"\n### Failures ({FEWER_ROUNDS}: median of fewer rounds; targets leave failed peers out)\n")
    for one in failures:
        # Sizes and rounds are missing for a system that could not be installed.
        turn = f", {size_name(one['size'])}, round {one['round']}" if one["size"] else ""
        reason = "\n  ".join(line for line in one["reason"].splitlines() if line.strip())
        print(f"- {one['system']}{turn}: {reason}")


def show(figures):
    """Prints all tables."""
    rounds = f"{figures.rounds} round{'s' if figures.rounds > 1 else ''}"
    print(f"{machine()}; medians of {rounds}, GB = 1e9 bytes\n")
    for op in ("put", "get"):
        for clients in figures.values(4):
            show_operation(figures, op, clients)
    show_exists(figures)
    show_notes(figures)
    show_targets(figures)
