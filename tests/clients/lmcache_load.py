"""Objects through LMCache, during faults of the store or with a clock. `tests/clients/lmcache` runs it.

    lmcache_load.py remote|l2 chaos ADAPTER_JSON     ends after a line of input, and prints a report of `chaos.Load`
    lmcache_load.py remote measure                   for each line of input, prints the rates of one round

The objects have the content of `lmcache_objects`, and every byte of every hit is compared.
"""

import argparse
import json
import random
import sys
import threading
import time

import torch
from chaos import Load
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache_objects import FULL, is_equal, new_objects, open_l2, open_remote, remote_key, run_task, shape_of, content

LIMITS = {"exists": 0.5, "get": 5, "put": 5}
"""Timeouts of the plug-in and the adapter, which are their defaults."""

WAIT_SECONDS = 60
NUMBERS = 100_000
BATCH = 4
RECENT = 64
"""Objects that are read again. They are more than L2 has room for."""

MEASURED_OBJECTS = 24


class Remote:
    """LMCache's `RemoteBackend` on the store of its configuration."""

    def __init__(self, load, _spec):
        self.load, (self.backend, self.local) = load, open_remote()

    def put(self, numbers):
        objects = [self.local.allocate(shape_of(number), torch.bfloat16, MemoryFormat.KV_2LTD) for number in numbers]
        if None in objects:
            raise MemoryError("LMCache has no memory: an object was not released")
        for number, each in zip(numbers, objects):
            each.tensor.copy_(content(number, shape_of(number)))
        self.load.call("put", self.submit, [remote_key(number) for number in numbers], objects)
        for each in objects:
            each.ref_count_down()

    def submit(self, keys, objects):
        ended = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, objects, on_complete_callback=lambda key: ended.release())
        for _ in keys:
            if not ended.acquire(timeout=WAIT_SECONDS):
                raise TimeoutError(f"a put does not end within {WAIT_SECONDS} s")

    def get(self, numbers):
        """Numbers that were found, and those of them with wrong bytes."""
        keys = [remote_key(number) for number in numbers]
        self.load.call("exists", self.backend.contains, keys[0])
        read = self.load.call("get", self.backend.batched_get_blocking, keys)
        found = [(number, each) for number, each in zip(numbers, read) if each is not None]
        wrong = [number for number, each in found if not is_equal(each.tensor, number)]
        for _, each in found:
            each.ref_count_down()
        return [number for number, _ in found], wrong

    def close(self):
        self.backend.close()


class L2:
    """LMCache's L2 interface with an adapter."""

    def __init__(self, load, spec):
        self.load, self.adapter = load, open_l2(BATCH, spec)

    def keys(self, numbers):
        return [ObjectKey(number.to_bytes(32, "big"), "objects", 0x08030803) for number in numbers]

    def task(self, kind, descriptor, submit, query, *arguments):
        return self.load.call(kind, run_task, None, descriptor, submit, query, *arguments)

    def put(self, numbers):
        sources = new_objects(numbers)
        for number, each in zip(numbers, sources):
            each.raw_data.copy_(content(number, shape_of(number)).view(-1))
        adapter = self.adapter
        query = lambda _: adapter.pop_completed_store_tasks()
        self.task("put", adapter.get_store_event_fd(), adapter.submit_store_task, query, self.keys(numbers), sources)

    def get(self, numbers):
        adapter, keys, targets = self.adapter, self.keys(numbers), new_objects(numbers)
        descriptor, query = adapter.get_lookup_and_lock_event_fd(), adapter.query_lookup_and_lock_result
        self.task("exists", descriptor, adapter.submit_lookup_and_lock_task, query, keys, {})
        descriptor = adapter.get_load_event_fd()
        read = self.task("get", descriptor, adapter.submit_load_task, adapter.query_load_result, keys, targets)
        found = [at for at in range(len(numbers)) if read.test(at)]
        views = {at: targets[at].raw_data.view(shape_of(numbers[at])) for at in found}
        wrong = [numbers[at] for at in found if not is_equal(views[at], numbers[at])]
        return [numbers[at] for at in found], wrong

    def close(self):
        self.adapter.close()


def chaos(store, load):
    source, recent = random.Random(1), []

    def get(numbers):
        found, wrong = store.get(numbers)
        load.count("hits", len(found))
        load.count("misses", len(numbers) - len(found))
        for number in wrong:
            load.problem(f"object {number} has wrong bytes")
        return len(found) == len(numbers)

    def put(count):
        numbers = source.sample(range(NUMBERS), count)
        store.put(numbers)
        recent.extend(numbers)
        del recent[:-RECENT]
        return numbers

    load.until_input()
    while load.is_running:
        put(BATCH)
        for _ in range(3):
            get(source.sample(recent, BATCH))
    load.recover(lambda: get(put(BATCH)))
    store.close()
    load.print_report()


def measure(store):
    """Rates of puts and gets in MB/s. An answer about the last object ends the puts, for stores that answer none."""
    print("ready", flush=True)
    first = int.from_bytes(random.SystemRandom().randbytes(6), "big") * 4
    for _ in sys.stdin:
        # Each number is a multiple of 4, whose object is a full one.
        numbers = [first + 4 * at for at in range(MEASURED_OBJECTS)]
        first = numbers[-1] + 4
        keys = [remote_key(number) for number in numbers]
        tensors = [content(number, FULL) for number in numbers]
        objects = [store.local.allocate(FULL, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in numbers]
        for each, tensor in zip(objects, tensors):
            each.tensor.copy_(tensor)
        began = time.monotonic()
        store.submit(keys, objects)
        if not store.backend.contains(keys[-1]):
            raise SystemExit("the store has lost an object")
        stored = time.monotonic()
        read = store.backend.batched_get_blocking(keys)
        ended = time.monotonic()
        for each, tensor in zip(read, tensors):
            if each is None or not torch.equal(each.tensor.view(torch.int16), tensor.view(torch.int16)):
                raise SystemExit("an object is missing or has other bytes")
        for each in [*objects, *read]:
            each.ref_count_down()
        size = len(numbers) * FULL.numel() * 2 / 1e6
        rates = {"put": size / (stored - began), "get": size / (ended - stored)}
        print(json.dumps({"rates": rates}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("interface", choices=["remote", "l2"])
    parser.add_argument("action", choices=["chaos", "measure"])
    parser.add_argument("adapter", nargs="?")
    arguments = parser.parse_args()
    load = Load(LIMITS)
    store = (Remote if arguments.interface == "remote" else L2)(load, arguments.adapter)
    measure(store) if arguments.action == "measure" else chaos(store, load)


if __name__ == "__main__":
    main()
