"""Stores and loads random objects through LMCache, and compares their bytes. `tests/clients/lmcache` runs it.

    lmcache_objects.py remote|l2 store|load|wait COUNT ADAPTER_JSON

`store` also loads. `wait` uses the store once, prints `ready`, and loads after a line of input. Prints the objects that were found, those with wrong bytes, and the longest call in seconds.
"""

import argparse
import asyncio
import json
import select
import sys
import threading
import time

import torch
from lmcache.integration.vllm.utils import lmcache_get_or_create_config
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend import RemoteBackend
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

WAIT_SECONDS = 60
KV_SHAPE = (4, 2, 256, 4, 128)
FULL = torch.Size([2, 4, 256, 512])
PARTIAL = torch.Size([2, 4, 37, 512])


def content(number, shape):
    source = torch.Generator().manual_seed(number)
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=source, dtype=torch.int16).view(torch.bfloat16)


def shape_of(number):
    return PARTIAL if number % 4 == 3 else FULL


def wait():
    print("ready", flush=True)
    sys.stdin.readline()


class Times:
    longest = 0.0

    def call(self, function, *arguments):
        began = time.monotonic()
        result = function(*arguments)
        self.longest = max(self.longest, time.monotonic() - began)
        return result


def is_equal(tensor, number):
    return torch.equal(tensor.view(torch.int16), content(number, shape_of(number)).view(torch.int16))


def open_remote():
    """LMCache's backend for the store of its configuration, and its pool of memory."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = lmcache_get_or_create_config()
    metadata = LMCacheMetadata("objects", 8, 8, 3, 3, torch.bfloat16, KV_SHAPE)
    local = LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
    return RemoteBackend(config, metadata, loop, local, "cpu"), local


def remote_key(number):
    return CacheEngineKey("objects", 8, 3, (1 << 250) + number, torch.bfloat16)


def remote(action, count, times):
    backend, local = open_remote()
    keys = [remote_key(number) for number in range(count)]
    if action == "store":
        objects = [local.allocate(shape_of(number), torch.bfloat16, MemoryFormat.KV_2LTD) for number in range(count)]
        for number, each in enumerate(objects):
            each.tensor.copy_(content(number, shape_of(number)))
        ended = threading.Semaphore(0)
        backend.batched_submit_put_task(keys, objects, on_complete_callback=lambda key: ended.release())
        for _ in keys:
            assert ended.acquire(timeout=WAIT_SECONDS)
    if action == "wait":
        assert backend.contains(keys[0])
        wait()
    exists = [times.call(backend.contains, key) for key in keys]
    read = times.call(backend.batched_get_blocking, keys)
    found = [(number, each.tensor) for number, each in enumerate(read) if each is not None]
    wrong = sum(not is_equal(tensor, number) for number, tensor in found)
    hits = len(found) if sum(exists) == len(found) else -1
    backend.close()
    return hits, wrong


def run_task(times, descriptor, submit, query, *arguments):
    def task():
        number = submit(*arguments)
        assert select.select([descriptor], [], [], WAIT_SECONDS)[0], "no event"
        consume_fd(descriptor)
        return query(number)

    return task() if times is None else times.call(task)


def open_l2(count, spec):
    """An adapter of LMCache's L2 interface, for `count` objects at a time."""
    (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters
    arena = torch.empty(count * FULL.numel(), dtype=torch.bfloat16)
    memory = L1MemoryDesc(ptr=arena.data_ptr(), size=arena.numel() * 2, align_bytes=2)
    return create_l2_adapter(config, l1_memory_desc=memory)


def new_objects(numbers):
    """Objects of zeros for the content of these numbers."""
    made = []
    for number in numbers:
        shape = shape_of(number)
        raw = torch.zeros(shape.numel(), dtype=torch.bfloat16)
        place = raw.data_ptr(), shape.numel() * 2
        meta = MemoryObjMetadata(shape, torch.bfloat16, *place, ref_count=1, fmt=MemoryFormat.KV_2LTD)
        made.append(TensorMemoryObj(raw, meta, parent_allocator=None))
    return made


def l2(action, count, spec, times):
    adapter = open_l2(count, spec)
    keys = [ObjectKey(number.to_bytes(32, "big"), "objects", 0x08030803) for number in range(count)]

    if action == "store":
        sources = new_objects(range(count))
        for number, each in enumerate(sources):
            each.raw_data.copy_(content(number, shape_of(number)).view(-1))
        descriptor = adapter.get_store_event_fd()
        done = run_task(
            times, descriptor, adapter.submit_store_task, lambda _: adapter.pop_completed_store_tasks(), keys, sources
        )
        assert all(each.is_successful() for each in done.values())
    descriptor, query = adapter.get_lookup_and_lock_event_fd(), adapter.query_lookup_and_lock_result
    if action == "wait":
        assert run_task(times, descriptor, adapter.submit_lookup_and_lock_task, query, keys[:1], {}).test(0)
        wait()
    exists = run_task(times, descriptor, adapter.submit_lookup_and_lock_task, query, keys, {})
    targets = new_objects(range(count))
    descriptor, query = adapter.get_load_event_fd(), adapter.query_load_result
    read = run_task(times, descriptor, adapter.submit_load_task, query, keys, targets)
    found = [number for number in range(count) if read.test(number)]
    wrong = sum(not is_equal(targets[number].raw_data.view(shape_of(number)), number) for number in found)
    hits = len(found) if all(exists.test(number) == read.test(number) for number in range(count)) else -1
    adapter.close()
    return hits, wrong


def main():
    interface, action, count, spec = sys.argv[1:]
    times = Times()
    hits, wrong = remote(action, int(count), times) if interface == "remote" else l2(action, int(count), spec, times)
    print(json.dumps({"hits": hits, "wrong": wrong, "longest": round(times.longest, 2)}), flush=True)


if __name__ == "__main__":
    main()
