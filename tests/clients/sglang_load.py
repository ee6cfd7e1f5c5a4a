"""Pages through SGLang's storage interface with a clock. `tests/clients/sglang --compare` runs it.

    sglang_load.py file|mooncake|larder CONFIGURATION_JSON

For each line of input, prints the rates of one round. The calls are those of SGLang's cache controller: pages of the
file backend are copied to and from flat tensors, and the others move from and to the host pool.
"""

import json
import random
import sys
import time

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

PAGES, PAGE_TOKENS, HALF_BYTES = 64, 16, 512 << 10


class Pool:
    """Keys and values of pages in host memory, each half of a page in one run, as `page_first` has them."""

    layout, page_size, dtype = "page_first", PAGE_TOKENS, torch.uint8

    def __init__(self):
        self.kv_buffer = torch.zeros((2, 2 * PAGES, HALF_BYTES), dtype=torch.uint8)

    def get_ksize_per_token(self):
        return HALF_BYTES // PAGE_TOKENS

    def get_page_buffer_meta(self, indices):
        addresses = []
        for index in indices.tolist()[::PAGE_TOKENS]:
            addresses += [half[index // PAGE_TOKENS].data_ptr() for half in self.kv_buffer]
        return addresses, [HALF_BYTES] * len(addresses)

    def get_data_page(self, page):
        return self.kv_buffer[:, page].flatten()

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * HALF_BYTES, dtype=torch.uint8)

    def set_from_flat_data_page(self, page, data):
        self.kv_buffer[:, page] = data.view(2, HALF_BYTES)


class Copying:
    """The calls for backends with flat tensors."""

    def __init__(self, storage, pool):
        self.storage, self.pool = storage, pool

    def set(self, keys, pages):
        return [self.storage.batch_set(keys, [self.pool.get_data_page(page) for page in pages])]

    def get(self, keys, pages):
        found = self.storage.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        for page, data in zip(pages, found):
            if data is not None:
                self.pool.set_from_flat_data_page(page, data)
        return [data is not None for data in found]


class ZeroCopy:
    """The calls for backends that read and write the pool."""

    def __init__(self, storage, pool):
        self.storage = storage
        storage.register_mem_pool_host(pool)

    def indices(self, pages):
        return torch.arange(pages.start * PAGE_TOKENS, pages.stop * PAGE_TOKENS)

    def set(self, keys, pages):
        return self.storage.batch_set_v1(keys, self.indices(pages))

    def get(self, keys, pages):
        return self.storage.batch_get_v1(keys, self.indices(pages))


def open_storage(name, extra, pool):
    ranks = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1)
    flags = dict(is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True)
    config = HiCacheStorageConfig(**ranks, **flags, model_name="measured", extra_config=extra)
    if name == "file":
        return Copying(HiCacheFile(config), pool)
    if name == "mooncake":
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        return ZeroCopy(MooncakeStore(config, pool), pool)
    from larder_kv.sglang import LarderStorage

    return ZeroCopy(LarderStorage(config), pool)


def main():
    name, extra = sys.argv[1:]
    pool = Pool()
    calls = open_storage(name, json.loads(extra), pool)
    # A client connects in the background.
    time.sleep(2)
    print("ready", flush=True)
    sources, targets = range(PAGES), range(PAGES, 2 * PAGES)
    for _ in sys.stdin:
        pool.kv_buffer[:, :PAGES].random_(256)
        pool.kv_buffer[:, PAGES:] = 0
        keys = [random.randbytes(32).hex() for _ in range(PAGES)]
        began = time.monotonic()
        put = calls.set(keys, sources)
        stored = time.monotonic()
        read = calls.get(keys, targets)
        ended = time.monotonic()
        if not all(put) or not all(read):
            raise SystemExit(f"{name}: {put.count(False)} pages are not stored, {read.count(False)} not read")
        if not torch.equal(pool.kv_buffer[:, :PAGES], pool.kv_buffer[:, PAGES:]):
            raise SystemExit(f"{name}: other bytes")
        size = 2 * PAGES * HALF_BYTES / 1e6
        print(json.dumps({"rates": {"set": size / (stored - began), "get": size / (ended - stored)}}), flush=True)


if __name__ == "__main__":
    main()
