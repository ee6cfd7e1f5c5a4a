"""redis-py during faults of a store node. Usage: redis_chaos.py HOST:PORT SEED; `tests/clients/redis --chaos` runs it.

Each key has one writer, which counts versions up. What holds for each answer, as docs/attach/redis.md promises it:

- A GET gives a value of its key as it was set, whole, or nothing: a cache may lose a value at any time.
- It gives no version older than the last SET or DEL that was answered before the GET began. A SET replaces other bytes
  only after the device has the deletion of the old ones, so this holds across `kill -9` too.
- A SET or DEL without an answer may happen at any later time, or never. So its key is retired after the next reads.
"""

import random
import sys
import threading
import time

import redis
from chaos import Load
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis_conformance import value

CONNECT_SECONDS, SOCKET_SECONDS = 2, 5
CALL_SECONDS = CONNECT_SECONDS + 2 * SOCKET_SECONDS
"""redis-py has a timeout for connecting, and one for each step on the socket: sending, and receiving."""

LENGTHS = (20, 5000, 70_000, 3 << 20)
WRITERS, KEYS_OF_WRITER, READERS = 2, 12, 2


class Key:
    """Versions of one key. Version 0 is its absence."""

    def __init__(self, slot, length):
        self.slot, self.length, self.lock = slot, length, threading.Lock()
        self.generation = 0
        self.renew()

    def renew(self):
        self.generation += 1
        self.name = f"{self.slot}:{self.generation}"
        self.oldest = self.newest = 0
        self.doubtful = set()

    def data(self, name, version):
        return b"%d:" % version + value(f"{name}:{version}", self.length + version % 7)


def write(load, client, key, source):
    """Sets or deletes a key, and notes what may be read from now on."""
    with key.lock:
        if key.doubtful:
            key.renew()
        name, is_removal = key.name, source.random() < 0.1
        key.newest += 1
        version = key.newest
    data = key.data(name, version)
    try:
        if is_removal:
            load.call("DEL", client.delete, name)
        else:
            load.call("SET", client.set, name, data)
    except redis.RedisError as error:
        load.count(type(error).__name__)
        with key.lock:
            key.doubtful.add(version)
        return False
    load.count("sets")
    with key.lock:
        key.oldest = version
    return True


def read(load, client, key):
    """Reads a key and judges the answer. True for a hit."""
    with key.lock:
        name, oldest = key.name, key.oldest
    try:
        found = load.call("GET", client.get, name)
    except redis.RedisError as error:
        load.count(type(error).__name__)
        return False
    if found is None:
        load.count("misses")
        return False
    with key.lock:
        newest = key.newest if name == key.name else None
    head = found.split(b":", 1)[0]
    version = int(head) if head.isdigit() and len(head) < 10 else -1
    if version < 1 or found != key.data(name, version):
        load.problem(f"GET {name}: {len(found)} bytes that were never set, version {version}")
    elif version < oldest:
        load.problem(f"GET {name}: version {version}, after {oldest} was acknowledged")
    elif newest is not None and version > newest:
        load.problem(f"GET {name}: version {version}, but {newest} is the last that was sent")
    else:
        load.count("hits")
        return True
    return False


def connect(address):
    host, port = address.rsplit(":", 1)
    timeouts = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": SOCKET_SECONDS}
    return redis.Redis(host=host, port=int(port), retry=Retry(NoBackoff(), 0), **timeouts)


def guarded(load, work, *arguments):
    try:
        work(load, *arguments)
    except BaseException as error:
        load.problem(f"a thread has ended: {type(error).__name__}: {error}")


def keep_writing(load, address, keys, seed):
    client, source = connect(address), random.Random(seed)
    while load.is_running:
        write(load, client, source.choice(keys), source)
        time.sleep(0.01)


def keep_reading(load, address, keys, seed):
    client, source = connect(address), random.Random(seed)
    while load.is_running:
        read(load, client, source.choice(keys))
        time.sleep(0.005)


def main():
    address, seed = sys.argv[1], int(sys.argv[2])
    load = Load({"GET": CALL_SECONDS, "SET": CALL_SECONDS, "DEL": CALL_SECONDS})
    parts = [
        [Key(f"key:{writer}:{at}", LENGTHS[at % len(LENGTHS)]) for at in range(KEYS_OF_WRITER)]
        for writer in range(WRITERS)
    ]
    everything = [key for part in parts for key in part]
    jobs = [(keep_writing, address, part, seed + at) for at, part in enumerate(parts)]
    jobs += [(keep_reading, address, everything, seed + 100 + at) for at in range(READERS)]
    threads = [threading.Thread(target=guarded, args=(load, *job), daemon=True) for job in jobs]
    load.until_input()
    for thread in threads:
        thread.start()
    for thread in threads:
        # A thread ends with its call, which has a limit.
        thread.join()
    client, source = connect(address), random.Random(seed)
    load.recover(lambda: all([write(load, client, key, source) and read(load, client, key) for key in everything[:8]]))
    load.print_report()


if __name__ == "__main__":
    main()
