"""The module `mooncake.store` answers the calls of SGLang's and vLLM's backends for Mooncake.

The sequences are those of SGLang 0.5.23 (`mem_cache/storage/mooncake_store`) and vLLM 0.33 (`kv_connector/v1/mooncake/
store`, `ec_connector/mooncake_store_embedding`). `tests/clients/mooncake` runs Mooncake's own tests.
"""

import asyncio
import ctypes
import sys
import threading

import pytest
from conftest import LONG, PATIENCE, ROOT, eventually, is_durable
from larder_kv import _client, _values

sys.path.insert(0, str(ROOT / "tools/mooncake"))

from mooncake import _memory, mooncake_config, store as module  # noqa: E402
from mooncake.async_store import MooncakeDistributedStoreAsync  # noqa: E402
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction  # noqa: E402

SIZE = 16 << 20


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Calls of these tests check bytes, not deadlines, on a machine that may be busy."""
    monkeypatch.setenv("LARDER_TIMEOUT", "20")
    monkeypatch.setattr(_values, "CONNECT_SECONDS", PATIENCE)


def attach(node, tenant="default", kind=MooncakeDistributedStore, **options):
    store = kind()
    where = ("localhost", "P2PHANDSHAKE", SIZE, SIZE, "tcp", "", node.address, None)
    assert store.setup(*where, tenant_id=tenant, **options) == 0
    assert eventually(lambda: store.health_check() == 0)
    return store


class Pool:
    """Host memory of an engine, registered with a store."""

    def __init__(self, store, size):
        self.array = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self.array)
        assert store.register_buffer(self.address, size) == 0

    def fill(self, at, content):
        ctypes.memmove(self.address + at, content, len(content))

    def at(self, place, size):
        return ctypes.string_at(self.address + place, size)


def content(seed, size):
    return bytes((seed * 7 + at * 13) % 251 for at in range(997)) * (size // 997) + bytes([seed % 251]) * (size % 997)


def test_sglang_stores_and_loads_pages(shared_node):
    store = attach(shared_node, "sglang")
    # The warm-up of SGLang's backend.
    key, value = "sglang_mooncake_store_warmup_key0", bytes(4096)
    assert store.put(key, value) == 0
    assert store.is_exist(key) == 1 and store.get(key) == value
    pool = Pool(store, 8 << 20)
    # Keys and values of two pages are four objects. One is longer than a piece, and none is a multiple of anything.
    size = (1 << 20) + 12_345
    pages = [content(n, size) for n in range(4)]
    keys = [f"model_page{n}_0_{kind}" for n in range(2) for kind in "kv"]
    for at, page in enumerate(pages):
        pool.fill(at * size, page)
    places = [pool.address + at * size for at in range(4)]
    assert store.batch_is_exist(keys) == [0] * 4
    config = ReplicateConfig()
    config.group_ids = [f"sglang-hicache:{key}" for key in keys]
    assert store.batch_put_from(keys, places, [size] * 4, config) == [0] * 4
    assert store.batch_is_exist(keys) == [1] * 4
    pool.fill(0, bytes(8 << 20))
    other = attach(shared_node, "sglang")
    target = Pool(other, 8 << 20)
    backwards = [target.address + (3 - at) * size for at in range(4)]
    assert other.batch_get_into([*keys, "absent"], [*backwards, target.address], [size] * 5) == [size] * 4 + [-704]
    assert [target.at((3 - at) * size, size) for at in range(4)] == pages
    # A put of an existing key keeps its value, as in Mooncake.
    assert store.batch_put_from(keys[:1], places[:1], [size]) == [0]
    assert other.batch_get_into(keys[:1], [target.address], [size]) == [size]
    assert target.at(0, size) == pages[0]


def test_sglang_loads_layers_by_sessions(shared_node):
    store = attach(shared_node, "layers")
    pool = Pool(store, 1 << 20)
    layers = [content(n, 50_000) for n in range(4)]
    for at, layer in enumerate(layers):
        pool.fill(at * 50_000, layer)
    parts = [pool.address + at * 50_000 for at in range(4)]
    assert store.batch_put_from_multi_buffers(["page"], [parts], [[50_000] * 4], ReplicateConfig()) == [0]
    assert store.get("page") == b"".join(layers)
    target = Pool(store, 1 << 20)
    backwards = [target.address + (3 - at) * 50_000 for at in range(4)]
    results = store.batch_get_into_multi_buffers(["page", "absent"], [backwards] * 2, [[50_000] * 4] * 2)
    assert results == [200_000, -704]
    assert [target.at((3 - at) * 50_000, 50_000) for at in range(4)] == layers
    # More room than the value has.
    roomy = [target.address, target.address + 400_000]
    assert store.batch_get_into_multi_buffers(["page"], [roomy], [[150_000, 150_000]]) == [200_000]
    assert target.at(0, 150_000) + target.at(400_000, 50_000) == b"".join(layers)
    assert store.batch_get_session_start(["page", "absent"]) == [0, -704]
    ranges = [[target.address + 600_000, target.address + 700_000]], [[10, 20]], [[50_000, 199_980]]
    assert store.batch_get_into_multi_buffer_ranges(["page"], *ranges) == [30]
    assert target.at(600_000, 10) == layers[1][:10] and target.at(700_000, 20) == layers[3][-20:]
    for wrong in ([[199_991, 0]], [[-1, 0]], [[0]]):
        assert store.batch_get_into_multi_buffer_ranges(["page"], *ranges[:2], wrong) == [-600]
    assert store.batch_get_session_end(["page", "absent"]) == [0, 0] and not store.sessions


def test_vllm_stores_blocks_of_several_pieces(shared_node):
    store = attach(shared_node, "vllm")
    pool = Pool(store, 4 << 20)
    blocks = {f"block{n}": [content(n * 2 + part, 65536) for part in range(2)] for n in range(8)}
    addresses = {}
    for at, (key, pieces) in enumerate(blocks.items()):
        addresses[key] = [pool.address + (at * 2 + part) * 65536 for part in range(2)]
        for part, piece in enumerate(pieces):
            pool.fill((at * 2 + part) * 65536, piece)
    keys = list(blocks)
    config = ReplicateConfig()
    config.preferred_segment = "localhost:12345"
    sizes = [[65536] * 2 for _ in keys]
    assert store.batch_put_from_multi_buffers(keys, list(addresses.values()), sizes, config) == [0] * 8
    # The memory may change at once: the pieces were joined.
    pool.fill(0, bytes(4 << 20))
    assert store.batch_is_exist([*keys, "no"]) == [1] * 8 + [0]
    tiers = store.batch_get_replica_desc([*keys, "no"])
    assert set(tiers) == set(keys) and all(desc[0].is_memory_replica() for desc in tiers.values())
    assert store.batch_get_into_multi_buffers(keys, list(addresses.values()), sizes) == [131_072] * 8
    for at, pieces in enumerate(blocks.values()):
        assert pool.at(at * 131_072, 131_072) == b"".join(pieces)
    assert store.unregister_buffer(pool.address) == 0
    # vLLM resets its cache by this.
    assert store.remove_all(force=True) == 8
    assert store.batch_is_exist(keys) == [0] * 8
    assert store.close() == 0 and store.batch_is_exist(keys) == [-1] * 8


def test_vllm_stores_embeddings_with_a_header(shared_node):
    store = attach(shared_node, "embeddings")
    header, tensor = Pool(store, 24), Pool(store, 100_000)
    header.fill(0, content(1, 24))
    tensor.fill(0, content(2, 100_000))
    config = ReplicateConfig()
    config.data_type = module.ObjectDataType.TENSOR
    places = [[header.address, tensor.address]]
    assert store.batch_put_from_multi_buffers(["image"], places, [[24, 100_000]], config) == [0]
    assert store.put_from_with_metadata("same", tensor.address, header.address, 100_000, 24) == 0
    read = Pool(store, 1 << 20)
    results = store.batch_get_into(["image", "same"], [read.address, read.address + 200_000], [100_024] * 2)
    assert results == [100_024] * 2
    assert read.at(0, 100_024) == read.at(200_000, 100_024) == content(1, 24) + content(2, 100_000)
    assert store.unregister_buffer(tensor.address) == 0
    # Another process may free the memory now, so it may not be used.
    assert store.put_from("later", tensor.address, 100) == -600


def test_values_in_bytes(shared_node):
    store = attach(shared_node, "bytes")
    values = {f"key{n}": content(n, size) for n, size in enumerate([1, 16384, 16385, (1 << 20) + 1, 3_000_000])}
    assert store.put_batch(list(values), [bytearray(value) for value in values.values()]) == 0
    assert [store.get_size(key) for key in values] == list(map(len, values.values()))
    assert store.get_batch([*values, "absent"]) == [*values.values(), b""]
    handles = store.batch_get_buffer([*values, "absent"])
    assert handles[-1] is None and store.get_buffer("absent") is None and store.get_buffer("key0") == values["key0"]
    for handle, value in zip(handles, values.values()):
        assert bytes(handle) == value and handle.size() == len(value)
        assert ctypes.string_at(handle.ptr(), handle.size()) == value
    assert store.put("key0", b"other") == 0 and store.get("key0") == values["key0"]
    assert store.upsert("key0", b"other") == 0 and store.get("key0") == b"other"
    assert store.put_parts("parts", b"a", bytearray(b"bc"), memoryview(b"d")) == 0 and store.get("parts") == b"abcd"
    assert store.upsert_parts("parts", b"e", b"f") == 0 and store.get("parts") == b"ef"
    assert store.upsert_batch(["parts", "new"], [b"g", b"h"]) == 0 and store.get_batch(["parts", "new"]) == [b"g", b"h"]
    assert store.remove("key1") == 0 and store.remove("key1") == -704 and store.get("key1") == b""
    assert store.get_size("key1") == -704 and store.is_exist("key1") == 0
    assert store.batch_remove(["key2", "absent"]) == [0, -704]
    assert store.remove_by_regex("^key[34]$") == 2 and store.is_exist("key0") == 1
    assert store.remove_by_regex("(") == -600


def test_wrong_arguments_are_codes(shared_node):
    store = attach(shared_node, "wrong")
    pool = Pool(store, 10_000)
    assert store.put("empty", b"") == store.put("text", "no bytes") == -600
    assert store.put_batch(["a"], []) == -600 and store.put_batch([], []) == 0
    assert store.batch_put_from(["a", "b"], [pool.address], [10]) == [-600] * 2
    assert store.batch_get_into(["a", "b"], [pool.address] * 3, [10] * 3) == [-600] * 2
    assert store.batch_put_from([], [], []) == store.batch_get_into([], [], []) == store.batch_is_exist([]) == []
    assert store.put_from("a", pool.address, 10_000) == 0
    assert store.get_into("a", pool.address, 9_999) == -600
    for address, size in ((pool.address, 10_001), (pool.address - 1, 10), (8, 10), (pool.address, 0)):
        assert store.put_from("b", address, size) == -600
        assert store.batch_put_from_multi_buffers(["b"], [[pool.address, address]], [[10, size]]) == [-600]
    assert store.get_into("a", pool.address + 1, 10_000) == -600
    assert store.is_exist("b") == 0
    assert store.unregister_buffer(pool.address + 1) == -600
    # Memory that the processor cannot address, such as that of a device.
    assert store.register_buffer(1 << 46, 4096) == store.register_buffer(0, 10) == -600
    assert store.register_buffer(pool.address, 0) == -600
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 1000
    assert store.upsert("a", b"x", config) == -600
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("pinned", b"x", config) == 0
    for ttl in (-1, 1 << 64, "1"):
        with pytest.raises(TypeError):
            config.soft_pin_ttl_ms = ttl


def test_setup(shared_node, monkeypatch):
    store = MooncakeDistributedStore()
    assert store.health_check() == 1 and store.put("a", b"b") == -600 and store.get("a") == b""
    sizes = {"global_segment_size": "16MB", "local_buffer_size": "16 MB", "master_server_addr": shared_node.address}
    assert store.setup({"local_hostname": "localhost", **sizes}) == 0
    assert store.put("dictionary", b"x") == 0 and store.close() == 0
    assert store.setup({**sizes, "global_segment_size": "50%"}) == -600
    assert store.setup("localhost", "", 0, 0, "tcp", "", "etcd://127.0.0.1:1") == -600
    hostname, port = attach(shared_node).get_hostname().split(":")
    assert hostname == "localhost" and 12300 <= int(port) <= 14300
    # Without a local buffer, Mooncake stores no bytes.
    assert store.setup("localhost", "", SIZE, 0, "tcp", "", shared_node.address) == 0
    assert store.put("bufferless", b"x") == -200 and store.is_exist("bufferless") == 0
    assert store.setup_dummy(0, SIZE, shared_node.address) == 0 and store.put("dummy", b"x") == 0
    monkeypatch.setenv("LARDER_URL", shared_node.url())
    assert store.setup("localhost", "", SIZE, SIZE, "tcp", "", "elsewhere:1") == 0 and store.get("dummy") == b"x"
    monkeypatch.setenv("LARDER_WEIGHTS", "revision 2")
    assert store.setup("localhost", "", SIZE, SIZE, "tcp", "", "elsewhere:1") == 0 and store.get("dummy") == b""
    assert attach(shared_node, "another").is_exist("dictionary") == 0


def test_configuration_of_a_client(tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "host:1", "global_segment_size": "3 GB", "protocol": "rdma"}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    config = mooncake_config.MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.global_segment_size, config.protocol) == ("host:1", 3 << 30, "rdma")
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    monkeypatch.setenv("MOONCAKE_MASTER", "other:2")
    config = mooncake_config.MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.local_hostname) == ("other:2", "localhost")
    monkeypatch.delenv("MOONCAKE_MASTER")
    with pytest.raises(ValueError):
        mooncake_config.MooncakeConfig.load_from_env()


def test_ranges_are_read_into_registered_memory(shared_node):
    store = attach(shared_node, "ranges")
    assert store.put_batch(["one", "two"], [b"0123456789", b"abcdefghij"]) == 0
    pool = Pool(store, 32)
    results = store.get_into_ranges(
        [pool.address, pool.address + 16],
        [["one", "two"], ["absent"]],
        [[[0, 4], [8]], [[0]]],
        [[[1, 9], [0]], [[0]]],
        [[[3, 1], [2]], [[1]]],
    )
    assert results == [[[3, 1], [2]], [[-704]]]
    assert pool.at(0, 10) == b"123\0" + b"9\0\0\0" + b"ab"
    assert store.get_into_ranges([pool.address], [["one"]], [[[0]]], [[[9]]], [[[2]]]) == [[[-600]]]
    assert store.get_into_ranges([pool.address], [["one"]], [[[31]]], [[[0]]], [[[2]]]) == [[[-600]]]
    assert store.get_into_ranges([pool.address], [["one", "two"]], [[[0], []]], [[[0, 1], []]], [[[], []]]) == [
        [[-600, -600], []]
    ]


def test_asyncio_has_the_same_calls(shared_node):
    store = attach(shared_node, "asyncio", MooncakeDistributedStoreAsync)

    async def run():
        keys = [f"key{n}" for n in range(8)]
        assert await asyncio.gather(*(store.async_put(key, key.encode()) for key in keys)) == [0] * 8
        assert await store.async_get_batch(keys) == [key.encode() for key in keys]
        assert await store.async_remove_by_regex("key[0-3]") == 4
        assert await store.async_batch_is_exist(keys) == [0] * 4 + [1] * 4
        with pytest.raises(AttributeError):
            store.async_unknown

    asyncio.run(run())


def test_threads_share_a_client(shared_node):
    store = attach(shared_node, "threads")
    wrong = []

    def work(number):
        for at in range(10):
            value = content(number * 10 + at, 200_000)
            key = f"{number} {at}"
            if store.put(key, value) or store.get(key) != value or store.remove(key):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not wrong


def test_keys_that_are_remembered_are_bounded(shared_node, monkeypatch):
    monkeypatch.setattr(module, "KEYS_REMEMBERED", 3)
    store = attach(shared_node, "bounded")
    for number in range(5):
        assert store.put(str(number), b"x") == 0
    assert store.remove_all() == 3
    assert store.batch_is_exist(list("01234")) == [1, 1, 0, 0, 0]


def test_removals_are_cut_into_pieces(shared_node, monkeypatch):
    monkeypatch.setattr(module, "KEYS_REMOVED_AT_ONCE", 2)
    store = attach(shared_node, "pieces")
    keys = [str(number) for number in range(5)]
    assert store.put_batch(keys, [b"x"] * 5) == 0
    assert store.remove_by_regex("[0-3]") == 4 and store.batch_is_exist(keys) == [0, 0, 0, 0, 1]
    assert MooncakeDistributedStore().remove_all() == 0


def test_upsert_that_cannot_remove_the_old_value_fails(shared_node, monkeypatch):
    store = attach(shared_node, "upsert")
    assert store.put("old", b"old") == 0
    # A node that does not answer the removal.
    forgotten = _client.Forgotten(0, False)
    monkeypatch.setattr(store.values.head_client, "forget", lambda keys, timeout: forgotten)
    assert store.upsert("old", b"new") == -900 and store.get("old") == b"old"
    pool = Pool(store, 100)
    assert store.batch_upsert_from(["old", "absent"], [pool.address] * 2, [100] * 2) == [-900, 0]
    monkeypatch.undo()
    assert store.upsert("old", b"new") == 0 and store.get("old") == b"new"


def test_memory_is_kept_while_a_transfer_reads_it(shared_node, monkeypatch):
    monkeypatch.setattr(_memory, "RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(_values, "RELEASE_SECONDS", 0.1)
    store = attach(shared_node, "kept")
    pool = Pool(store, 1000)
    span = _memory.Span(pool.address + 500, 100)
    store.values.reading.add(span)
    assert store.unregister_buffer(pool.address) == -600
    # Nor does a closed store give the memory back.
    assert store.close() == -600 and store.unregister_buffer(pool.address) == -600
    del span
    assert store.unregister_buffer(pool.address) == 0


def test_host_memory_of_the_allocator(shared_node):
    store, allocator = attach(shared_node, "allocator"), module.MooncakeHostMemAllocator()
    address = allocator.alloc(8192)
    assert store.register_buffer(address, 8192) == 0
    ctypes.memmove(address, b"content", 7)
    assert store.put_from("allocated", address, 7) == 0 and store.get("allocated") == b"content"
    assert store.unregister_buffer(address) == 0
    assert allocator.free(address) == 0 and allocator.free(address) == -600


def test_store_that_is_away_is_an_error_code(node, monkeypatch):
    store = attach(node)
    pool = Pool(store, 100_000)
    pool.fill(0, content(1, 100_000))
    assert eventually(lambda: store.put_from("key", pool.address, 100_000) == 0)
    assert eventually(lambda: is_durable(store.values.head_client))
    store.timeout = 0.3
    for leave in (node.pause, node.kill):
        leave()
        assert store.is_exist("unknown") == 0 and store.get("unknown") == b""
        assert store.get_into("key", pool.address, 100_000) == -704
        # Another key: a paused node may remove it when it goes on.
        assert store.put("other", b"x") < 0 and store.batch_remove(["other"])[0] < 0
        node.resume()
    node.start()
    store.timeout = 20.0
    assert eventually(lambda: store.get("key") == content(1, 100_000))
    assert store.close() == 0
