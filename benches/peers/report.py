"""The tables and the verdict."""

import os
import platform
import statistics

PEERS = ("mooncake", "lmcache", "redis")
# What is aimed at.
BEST_PEER_TIMES = 2
BARE_PART = 0.9
BARE_CPU_TIMES = 1.2
CLIENTS_PART = 0.95
VIEW_TIMES = 3
COPIED_TIMES = 1.2
EXISTS_PER_SECOND = 2e6
VERDICT_SIZE_MIN = 64 << 10


def machine():
    """In words."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return f"{os.cpu_count()} CPUs ({names[0] if names else platform.machine()}), Linux {platform.release()}"


def kib(size):
    """A size in words."""
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


class Figures:
    """Medians."""

    def __init__(self, found):
        self.groups = {}
        for one in found:
            key = (one["system"], one["op"], one["size"], one["batch"], one["clients"])
            self.groups.setdefault(key, []).append(one)

    def of(self, what, *key):
        """Median of a figure; `None` if it was not measured."""
        group = self.groups.get(key)
        return statistics.median(one[what] for one in group) if group else None

    def cpu(self, *key):
        """Of both sides together, in seconds per GiB."""
        client, server = self.of("client_cpu_s_per_gib", *key), self.of("server_cpu_s_per_gib", *key)
        return None if client is None else client + server

    def values(self, place):
        """All that occur at a place of the keys, in order."""
        return sorted({key[place] for key in self.groups})


def text(value, form=None):
    """A figure, or that there is none."""
    if value is None:
        return "–"
    return (form or ("{:.2f}" if value >= 0.1 or value == 0 else "{:.3f}")).format(value)


def table(head, rows):
    """Prints a table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def columns(figures, op):
    """System and operation of each column of an operation's tables, with its name."""
    ours = [
        ("bare", op),
        ("asked", op),
        ("copy", op),
        ("larder", op),
        ("mooncake", op),
        ("lmcache", op),
        ("redis", op),
        ("larder-shm", op),
        ("larder-shm", "view"),
        ("mooncake-shm", op),
    ]
    there = {key[:2] for key in figures.groups}
    named = [
        (f"{system} in place" if of == "view" else system, system, of)
        for system, of in ours
        if op == "get" or of != "view"
    ]
    return [column for column in named if column[1:] in there]


def show_moves(figures, op, clients):
    """Three tables of an operation."""
    shown = columns(figures, op)
    cells = [
        (size, batch)
        for size in figures.values(2)
        for batch in figures.values(3)
        if any((system, of, size, batch, clients) in figures.groups for _, system, of in shown)
    ]

    def rows(show):
        return [
            [kib(size), str(batch), *(show(system, of, size, batch, clients) for _, system, of in shown)]
            for size, batch in cells
        ]

    head = ["page", "batch", *(name for name, _, _ in shown)]
    who = f"{op}, {clients} client{'s' if clients > 1 else ''}"
    print(f"### {who}: GB/s\n")
    table(head, rows(lambda *key: text(figures.of("gb_per_s", *key))))
    print(f"### {who}: p50 / p99 of a batch, ms\n")
    table(
        head,
        rows(
            lambda *key: text(figures.of("p50_ms", *key), "{:.3g}") + " / " + text(figures.of("p99_ms", *key), "{:.3g}")
        ),
    )
    print(f"### {who}: CPU s/GiB, clients + servers\n")
    table(
        head,
        rows(
            lambda *key: (
                text(figures.of("client_cpu_s_per_gib", *key)) + " + " + text(figures.of("server_cpu_s_per_gib", *key))
            )
        ),
    )


def show_exists(figures):
    """Keys asked for."""
    found = sorted(key for key in figures.groups if key[1] == "exists")
    if not found:
        return
    print("### exists, 512 keys at a time: million keys/s\n")
    clients = sorted({key[4] for key in found})
    rows = []
    for system in dict.fromkeys(key[0] for key in found):
        per_client = {key[4]: figures.of("keys_per_s", *key) / 1e6 for key in found if key[0] == system}
        rows.append([system, *(text(per_client.get(count), "{:.3f}") for count in clients)])
    table(["system", *(f"{count} clients" if count > 1 else "1 client" for count in clients)], rows)


def show_notes(found):
    """What happened beside."""
    notes = {}
    for one in found:
        for note, times in one["notes"].items():
            cell = f"{one['op']} {kib(one['size'])} × {one['batch']}, {one['clients']} clients"
            where = f"{one['system']} {cell}: {note}"
            notes[where] = notes.get(where, 0) + times
    for where, times in notes.items():
        print(f"- {where} {times} pages in all rounds")
    if notes:
        print()


def verdict(of, against):
    """`yes`, or how far it is."""
    if of is None or against is None:
        return "–"
    return "yes" if of >= against else f"NO ({of / against:.2f})"


def at_most(of, against):
    """The other way round."""
    if of is None or against is None:
        return "–"
    return "yes" if of <= against else f"NO ({of / against:.2f})"


def times(value, factor):
    """A multiple, if there is something to multiply."""
    return None if value is None else value * factor


def speed_wanted(figures, *cell):
    """What Larder is to reach over TCP."""
    peers = [figures.of("gb_per_s", peer, *cell) for peer in PEERS]
    peers = [peer for peer in peers if peer is not None]
    bare = figures.of("gb_per_s", "bare", *cell)
    wanted = [BEST_PEER_TIMES * max(peers)] if peers else []
    if bare is not None:
        wanted.append(BARE_PART * bare)
    return min(wanted) if wanted else None


def tcp_row(figures, op, size, batch, clients):
    """The verdict over TCP."""
    cell = (op, size, batch, clients)
    speed = figures.of("gb_per_s", "larder", *cell)
    one = figures.of("gb_per_s", "larder", op, size, batch, 1)
    steady = "–" if clients == 1 else verdict(speed, times(one, CLIENTS_PART))
    return [
        op,
        kib(size),
        str(batch),
        str(clients),
        text(speed),
        verdict(speed, speed_wanted(figures, *cell)),
        steady,
        at_most(figures.cpu("larder", *cell), times(figures.cpu("bare", *cell), BARE_CPU_TIMES)),
    ]


def shm_row(figures, size, batch, clients):
    """The verdict over shared memory."""
    peer = figures.of("gb_per_s", "mooncake-shm", "get", size, batch, clients)
    view = figures.of("gb_per_s", "larder-shm", "view", size, batch, clients)
    copied = figures.of("gb_per_s", "larder-shm", "get", size, batch, clients)
    return [
        kib(size),
        str(batch),
        str(clients),
        text(view),
        verdict(view, times(peer, VIEW_TIMES)),
        text(copied),
        verdict(copied, times(peer, COPIED_TIMES)),
    ]


def show_verdict(figures):
    """What is aimed at, and whether it is reached."""
    cells = sorted(
        {key[1:] for key in figures.groups if key[0] == "larder" and key[1] != "exists" and key[2] >= VERDICT_SIZE_MIN},
        key=lambda key: (key[0], key[3], key[1], key[2]),
    )
    if cells:
        print("### Verdict: TCP\n")
        table(
            [
                "",
                "page",
                "batch",
                "clients",
                "larder GB/s",
                f"≥ min({BEST_PEER_TIMES} × best peer, {BARE_PART} × bare)",
                f"≥ {CLIENTS_PART} × one client",
                f"CPU ≤ {BARE_CPU_TIMES} × bare",
            ],
            [tcp_row(figures, *cell) for cell in cells],
        )
    shared = sorted(
        {
            key[2:]
            for key in figures.groups
            if key[0] == "larder-shm" and key[1] == "view" and key[2] >= VERDICT_SIZE_MIN
        },
        key=lambda key: (key[2], key[0], key[1]),
    )
    if shared:
        print("### Verdict: shared memory\n")
        table(
            [
                "page",
                "batch",
                "clients",
                "in place GB/s",
                f"≥ {VIEW_TIMES} × mooncake-shm",
                "copied GB/s",
                f"≥ {COPIED_TIMES} × mooncake-shm",
            ],
            [shm_row(figures, *cell) for cell in shared],
        )
    for key in sorted(key for key in figures.groups if key[:2] == ("larder", "exists")):
        speed = figures.of("keys_per_s", *key)
        print(
            f"exists ≥ {EXISTS_PER_SECOND / 1e6:.0f} M keys/s, clients: {key[4]}: {verdict(speed, EXISTS_PER_SECOND)}"
        )


def show(found, rounds):
    """Prints everything."""
    figures = Figures(found)
    print(f"{machine()}; medians of {rounds} round{'s' if rounds > 1 else ''}, GB = 1e9 bytes\n")
    for op in ("put", "get"):
        for clients in figures.values(4):
            show_moves(figures, op, clients)
    show_exists(figures)
    show_notes(found)
    show_verdict(figures)
