"""Objects through `mooncake.store`, during faults of the store or with a clock. `tests/clients/mooncake` runs it.

    mooncake_load.py chaos ADDRESS       ends after a line of input, and prints a report of `chaos.Load`
    mooncake_load.py measure ADDRESS     for each line of input, prints the rates of one round
    mooncake_load.py segment ADDRESS     lends memory to Mooncake until its input ends

`measure` runs on Mooncake's own module too. ADDRESS is that of a node, or of Mooncake's master.
"""

import ctypes
import hashlib
import json
import mmap
import os
import random
import sys
import threading
import time

from chaos import Load
from mooncake.store import MooncakeDistributedStore

TIMEOUT = float(os.environ.get("LARDER_TIMEOUT", "5"))
LIMITS = {name: TIMEOUT for name in ("put", "put_from", "get", "get_into", "is_exist", "remove")}
LENGTHS = (100, 70_000, 1 << 20, (5 << 20) + 3)
THREADS, KEYS = 2, 64
SEGMENT_BYTES = 1 << 30
PAGE_BYTES, PAGES = 1 << 20, 64


def connect(address, lent=0):
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", lent, 16 << 20, "tcp", "", address)
    if code:
        raise SystemExit(f"setup answers {code}")
    return store


def content(key, length):
    block = hashlib.sha256(key.encode()).digest() * 32
    return (block * (length // len(block) + 1))[:length]


class Buffer:
    """Registered memory."""

    def __init__(self, store, size):
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if code := store.register_buffer(self.address, size):
            raise SystemExit(f"register_buffer answers {code}")


class User:
    """One thread's calls. Each key has one content, so every hit has one right answer."""

    def __init__(self, load, store, number):
        self.load, self.store, self.source = load, store, random.Random(number)
        self.put_buffer, self.get_buffer = Buffer(store, LENGTHS[-1]), Buffer(store, LENGTHS[-1])
        self.prefix = f"user {number}"

    def key(self):
        number = self.source.randrange(KEYS)
        key = f"{self.prefix} object {number}"
        return key, content(key, LENGTHS[number % len(LENGTHS)])

    def put(self, key, data):
        if self.source.random() < 0.5:
            code = self.load.call("put", self.store.put, key, data)
        else:
            self.put_buffer.memory[: len(data)] = data
            address = self.put_buffer.address
            code = self.load.call("put_from", self.store.put_from, key, address, len(data))
        self.load.count("puts" if code == 0 else f"put {code}")

    def get(self, key, data):
        """True for a hit with the right bytes."""
        if self.source.random() < 0.5:
            found = self.load.call("get", self.store.get, key)
        else:
            # A hit that leaves the memory as it was would show.
            self.get_buffer.memory[: len(data)] = bytes(len(data))
            address = self.get_buffer.address
            length = self.load.call("get_into", self.store.get_into, key, address, len(data))
            found = self.get_buffer.memory[:length] if length > 0 else b""
        if found and found != data:
            self.load.problem(f"{key}: {len(found)} wrong bytes, not the {len(data)} that were put")
        self.load.count("hits" if found else "misses")
        return found == data

    def step(self):
        key, data = self.key()
        if self.source.random() < 0.05:
            self.load.call("remove", self.store.remove, key)
        if self.load.call("is_exist", self.store.is_exist, key) != 1:
            self.put(key, data)
        self.get(*self.key())

    def has_hits(self):
        pairs = [self.key() for _ in range(8)]
        for key, data in pairs:
            self.put(key, data)
        return all([self.get(key, data) for key, data in pairs])


def run(load, user):
    try:
        while load.is_running:
            user.step()
            time.sleep(0.002)
    except BaseException as error:
        load.problem(f"a call has raised: {type(error).__name__}: {error}")


def chaos(address):
    load, store = Load(LIMITS), connect(address)
    users = [User(load, store, number) for number in range(THREADS)]
    threads = [threading.Thread(target=run, args=(load, user), daemon=True) for user in users]
    load.until_input()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.recover(lambda: all([user.has_hits() for user in users]))
    if code := store.close():
        load.problem(f"close answers {code}")
    load.print_report()


def measure(address):
    store = connect(address)
    source, target = Buffer(store, PAGES * PAGE_BYTES), Buffer(store, PAGES * PAGE_BYTES)
    sizes = [PAGE_BYTES] * PAGES
    places = [[each.address + at * PAGE_BYTES for at in range(PAGES)] for each in (source, target)]
    print("ready", flush=True)
    for _ in sys.stdin:
        source.memory[:] = data = random.randbytes(PAGES * PAGE_BYTES)
        keys = [f"{random.getrandbits(64):x}" for _ in range(PAGES)]
        began = time.monotonic()
        put = store.batch_put_from(keys, places[0], sizes)
        stored = time.monotonic()
        read = store.batch_get_into(keys, places[1], sizes)
        ended = time.monotonic()
        if any(put) or read != sizes or target.memory[:] != data:
            raise SystemExit(f"wrong answers: {set(put)}, {set(read)}")
        store.batch_remove(keys, True) if hasattr(store, "batch_remove") else [store.remove(key) for key in keys]
        size = PAGES * PAGE_BYTES / 1e6
        print(json.dumps({"rates": {"put": size / (stored - began), "get": size / (ended - stored)}}), flush=True)


def segment(address):
    store = connect(address, SEGMENT_BYTES)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    {"chaos": chaos, "measure": measure, "segment": segment}[sys.argv[1]](sys.argv[2])
