"""The plug-in and the L2 adapter answer the calls of LMCache."""

import sys
import threading
import time
import types

import lmcache_contract as contract
import numpy
import pytest
from conftest import LONG, PATIENCE, eventually, is_durable, noted_timeouts
from lmcache_contract import (
    CacheEngineKey,
    Controller,
    LayerCacheEngineKey,
    MemoryFormat,
    MemoryObj,
    Meta,
    ObjectKey,
    Remote,
    Size,
    Tensor,
    bfloat16,
    float16,
)

contract.install()

from larder_kv._values import pieces  # noqa: E402
from larder_kv.lmcache import LarderAdapter, LarderL2Adapter, object_key, parse_layout, remote_key  # noqa: E402

SHAPE = Size((2, 2, 256, 1024))
PARTIAL = Size((2, 2, 31, 1024))
TIMES = {"lookup_timeout": 20, "load_timeout": 20, "store_timeout": 20}


def connect(node, name=None, **options):
    """The engine's end of the plug-in. It attaches by URL, or by the name of the plug-in."""
    options = {**TIMES, **options}
    if name is None:
        remote = Remote(LarderAdapter(), node.url(), **options)
    else:
        remote = Remote(LarderAdapter(), f"plugin://{name}", name, url=node.url(), **options)
    assert eventually(lambda: all(client.nodes_connected for client in clients(remote.connector.values)))
    return remote


def clients(values):
    return [values.head_client, *values.clients.values()]


@pytest.fixture
def remotes(shared_node, request):
    """Makes engines of one test, and ends them."""
    made = []

    def make(**options):
        made.append(connect(shared_node, **{"weights": request.node.name, **options}))
        return made[-1]

    yield make
    for remote in made:
        remote.close()


def chunk(number, **fields):
    return CacheEngineKey("model", 8, 0, (1 << 200) + number, **fields)


def filled(remote, seed, shape=SHAPE, dtype=bfloat16, fmt=MemoryFormat.KV_2LTD):
    each = remote.backend.allocate([shape], [dtype], fmt, busy_loop=False)
    each.raw_data.array[:] = numpy.random.default_rng(seed).integers(0, 256, each.raw_data.array.shape, numpy.uint8)
    return each


def put(remote, key, each):
    """Stores an object, and returns its bytes."""
    content = each.content()
    remote.put([key], [each])
    return content


def test_another_engine_reads_chunks_in_their_layouts(remotes):
    writer, reader = remotes(), remotes(name="larder.second")
    objects = [filled(writer, 1), filled(writer, 2, PARTIAL), filled(writer, 3, dtype=float16, fmt=MemoryFormat.KV_T2D)]
    contents = [put(writer, chunk(number), each) for number, each in enumerate(objects)]
    assert writer.backend.live() == 0
    read = reader.batched_get([chunk(0), chunk(1), chunk(9), chunk(2)])
    assert read[2] is None and [each.content() for each in (read[0], read[1], read[3])] == contents
    assert [each.meta.shape for each in (read[0], read[1])] == [SHAPE, PARTIAL]
    assert read[3].meta.dtype is float16 and read[3].meta.fmt == MemoryFormat.KV_T2D
    assert reader.backend.live() == 3
    assert reader.get(chunk(1)).content() == contents[1]


def test_compressed_chunks_have_any_length(remotes):
    remote = remotes()
    content = bytes(range(251)) * 9000
    each = MemoryObj(content, Meta(Size((len(content), 0, 0, 0)), None, MemoryFormat.BINARY_BUFFER))
    remote.put([chunk(1)], [each])
    assert remote.get(chunk(1)).content() == content


def test_queries_count_the_prefix(remotes):
    writer, reader = remotes(), remotes()
    for number in (0, 1, 3):
        put(writer, chunk(number), filled(writer, number))
    keys = [chunk(number) for number in range(4)]
    assert reader.connector.batched_contains(keys) == 2
    assert reader.start(reader.connector.batched_async_contains("", keys)).result(20) == 2
    assert [reader.contains(key) for key in keys] == [True, True, False, True]
    assert reader.connector.exists_sync(chunk(0)) and not reader.connector.exists_sync(chunk(2))
    read = reader.start(reader.connector.batched_get_non_blocking("", keys)).result(20)
    assert len(read) == 2 and reader.backend.live() == 2
    assert reader.connector.remove_sync(chunk(0)) and not reader.connector.remove_sync(chunk(0))
    assert reader.connector.batched_contains(keys) == 0


def test_every_field_of_a_key_counts():
    keys = [chunk(1), chunk(2), chunk(1, dtype=float16), chunk(1, tags=(("a", "b"),)), chunk(1, tags=(("a", "c"),))]
    keys += [CacheEngineKey("other", 8, 0, chunk(1).chunk_hash), CacheEngineKey("model", 4, 0, chunk(1).chunk_hash)]
    keys += [CacheEngineKey("model", 8, 1, chunk(1).chunk_hash)]
    keys += [LayerCacheEngineKey("model", 8, 0, chunk(1).chunk_hash, layer_id=layer) for layer in range(2)]
    assert len({remote_key(key) for key in keys}) == len(keys)
    objects = [ObjectKey(b"1", "m", 0), ObjectKey(b"2", "m", 0), ObjectKey(b"1", "n", 0), ObjectKey(b"1", "m", 1)]
    objects += [ObjectKey(b"1", "m", 0, 1), ObjectKey(b"1", "m", 0, 0, "salt")]
    assert len({object_key(key) for key in objects}) == len(objects)


def test_other_weights_share_nothing(remotes):
    writer, reader = remotes(), remotes(weights="others")
    put(writer, chunk(1), filled(writer, 1))
    assert not reader.contains(chunk(1)) and reader.get(chunk(1)) is None


def test_engines_of_other_numerics_share_chunks_only_if_they_are_declared_equal(remotes, monkeypatch):
    engine = types.ModuleType("sglang")
    engine.__version__ = "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang", engine)
    for number, numerics in enumerate(["", "hopper"]):
        writer = remotes(numerics=numerics)
        put(writer, chunk(number), filled(writer, number))
    assert remotes().contains(chunk(0))
    engine.__version__ = "0.5.24"
    assert not remotes().contains(chunk(0))
    assert remotes(numerics="hopper").contains(chunk(1)) and not remotes(numerics="others").contains(chunk(1))


def test_chunks_with_short_hashes_are_not_stored(remotes, caplog):
    remote = remotes()
    short = CacheEngineKey("model", 8, 0, -(1 << 62))
    put(remote, short, filled(remote, 1))
    assert not remote.contains(short) and remote.get(short) is None
    assert [record.message for record in caplog.records].count(
        "Larder stores nothing: set pre_caching_hash_algorithm to sha256_cbor"
    ) == 1
    assert remote.backend.live() == 0


def test_a_full_host_memory_is_a_miss(remotes):
    writer, reader = remotes(), remotes(room=1)
    contents = [put(writer, chunk(number), filled(writer, number)) for number in range(2)]
    read = reader.batched_get([chunk(0), chunk(1)])
    assert read[0].content() == contents[0] and read[1] is None


@pytest.mark.parametrize(
    "layout",
    [
        None,
        [],
        [[], [], 1],
        [[[1]], [], 1],
        [[[-1, -2]], ["torch.uint8"], 1],
        [[[2]], ["os.system"], 1],
        [[[2]], ["torch.uint8"], 77],
        [[[True, 2]], ["torch.uint8"], 1],
        [[[1] * 8 + [2]], ["torch.uint8"], 1],
        [[[2]], ["torch.bfloat16"], 1],
        [[[1, 0, 0, 0]], ["None"], 5],
        [1, 2, 3],
    ],
)
def test_a_layout_that_does_not_fit_is_a_miss(layout):
    assert parse_layout(layout, 2) is None


def test_layouts_of_the_length_of_an_object_are_accepted():
    assert parse_layout([[[2, 3], [4]], ["torch.bfloat16", "torch.uint8"], 1], 16)[0] == [(2, 3), (4,)]
    assert parse_layout([[[7, 0, 0, 0]], ["None"], 5], 7)[1:] == ([None], MemoryFormat.BINARY_BUFFER)


def held(call, gate):
    """`call`, which first waits until the event `gate` is set."""

    def held_call(*arguments):
        gate.wait(LONG)
        return call(*arguments)

    return held_call


def test_cancelled_calls_release_their_memory(node):
    remote = connect(node)
    values = remote.connector.values
    content = put(remote, chunk(1), filled(remote, 1))
    # Both calls wait where they would move bytes: the read has memory of LMCache then.
    gate = threading.Event()
    values.get, values.put = held(values.get, gate), held(values.put, gate)
    try:
        future = remote.start(remote.connector.get(chunk(1)))
        assert eventually(lambda: remote.backend.live() == 1)
        future.cancel()
        other = filled(remote, 2)
        writing = remote.start(remote.connector.put(chunk(2), other))
        assert eventually(lambda: other.references == 2)
        writing.cancel()
        # LMCache drops its reference; the thread still has one.
        other.ref_count_down()
        assert other.references == 1
        assert remote.backend.live() == 2
    finally:
        gate.set()
    assert eventually(lambda: remote.backend.live() == 0)
    assert eventually(lambda: (each := remote.get(chunk(1))) and each.content() == content)
    remote.close()


def test_calls_beyond_the_bound_are_misses(node):
    remote = connect(node, load_timeout=LONG, lookup_timeout=LONG, store_timeout=LONG)
    # A get of an absent value makes one call.
    timeouts = noted_timeouts(remote.connector.values.head_client)
    node.pause()
    try:
        waiting = [remote.start(remote.connector.get(chunk(number))) for number in range(300)]
        assert eventually(lambda: sum(each.done() for each in waiting) >= 300 - 256)
        assert remote.get(chunk(1)) is None and not remote.contains(chunk(1))
    finally:
        node.resume()
    assert all(each.result(PATIENCE) is None for each in waiting)
    assert len(timeouts) == 256, "calls beyond the bound reached the client, or some within it did not"
    remote.close()


def test_a_dead_store_is_a_miss_and_its_pages_survive(node):
    remote = connect(node)
    content = put(remote, chunk(1), filled(remote, 1))
    assert remote.contains(chunk(1))
    assert eventually(lambda: is_durable(remote.connector.values.head_client))
    remote.connector.options.update(lookup_timeout=1, load_timeout=1, store_timeout=1)
    timeouts = noted_timeouts(*clients(remote.connector.values))
    node.kill()
    assert not remote.contains(chunk(1)) and remote.get(chunk(1)) is None
    assert remote.connector.batched_contains([chunk(1)]) == 0
    put(remote, chunk(2), filled(remote, 2))
    assert not remote.connector.remove_sync(chunk(1))
    assert timeouts and max(timeouts) <= 1
    remote.connector.options.update(TIMES)
    node.start()
    assert eventually(lambda: remote.contains(chunk(1)))
    assert remote.get(chunk(1)).content() == content
    remote.close()


def test_a_chunk_that_is_incomplete_is_a_miss_without_memory(remotes):
    remote = remotes()
    put(remote, chunk(1), filled(remote, 1))
    values, names = remote.connector.values, [remote_key(chunk(1))]
    (lost,) = pieces(names, values.heads(names, time.monotonic() + 20))
    assert values.clients[lost.size].forget(lost.keys[-1:], 20).complete
    assert remote.get(chunk(1)) is None
    assert remote.backend.live() == 0


def test_wrong_options_are_refused(shared_node):
    for wrong in ({"url": None}, {"lookup_timeout": -1}, {"lease": 61}, {"load_timeout": 1e9}, {"url": "http://a"}):
        with pytest.raises(ValueError):
            LarderL2Adapter({"url": shared_node.url(), **wrong})
    adapter = LarderAdapter()
    assert not adapter.can_parse("plugin://fs") and not adapter.can_parse("redis://127.0.0.1:6379")


# The L2 adapter.


def server(node, **options):
    adapter = LarderL2Adapter({"url": node.url(), **TIMES, **options}, l1_memory_desc=None)
    assert eventually(lambda: all(client.nodes_connected for client in clients(adapter.values)))
    return Controller(adapter)


def of(number, **fields):
    return ObjectKey(number.to_bytes(32, "big"), "model", 0x01000100, **fields)


def tensor(seed, size=100_000, shape=None, dtype=bfloat16):
    array = numpy.random.default_rng(seed).integers(0, 256, size, numpy.uint8)
    return MemoryObj(Tensor(array), Meta(shape or Size((size // 2,)), dtype, MemoryFormat.KV_2LTD))


def test_another_server_loads_objects(shared_node):
    writer, reader = (server(shared_node, weights="loads") for _ in range(2))
    keys, objects = [of(number) for number in range(3)], [tensor(number) for number in range(3)]
    assert reader.lookup(keys) == [False] * 3
    result = writer.store(keys, objects)
    assert result.is_successful() and result == 300_000
    assert writer.adapter.events == [("stored", keys, [100_000] * 3)]
    assert reader.lookup([keys[2], of(9), keys[0]]) == [True, False, True]
    targets = [tensor(50 + number) for number in range(3)]
    assert reader.load([keys[2], of(9), keys[0]], targets) == [True, False, True]
    assert targets[0].content() == objects[2].content() and targets[2].content() == objects[0].content()
    assert reader.adapter.events == [("accessed", [keys[2], keys[0]])]
    assert reader.lookup([of(0, cache_salt="tenant"), of(0, object_group_id=1)]) == [False, False]
    other = server(shared_node, weights="loads", numerics="others")
    assert other.lookup(keys) == [False] * 3
    for host in (writer, reader, other):
        assert host.adapter.report_status()["is_healthy"]
        host.adapter.close()


def test_objects_of_another_layout_are_misses(shared_node):
    host = server(shared_node, weights="layouts")
    assert host.store([of(1)], [tensor(1, shape=Size((2, 25_000)))]).is_successful()
    others = [tensor(1), tensor(1, shape=Size((2, 25_000)), dtype=float16), tensor(1, size=50_000)]
    assert host.load([of(1)] * 3, others) == [False] * 3
    assert host.load([of(1)], [tensor(2, shape=Size((2, 25_000)))]) == [True]
    host.adapter.close()


def test_deleted_objects_are_misses(shared_node):
    host = server(shared_node, weights="deleted")
    assert host.store([of(1), of(2)], [tensor(1), tensor(2)]).is_successful()
    host.adapter.delete([of(1), of(3)])
    assert host.adapter.events[-1] == ("deleted", [of(1)], [100_000])
    assert host.lookup([of(1), of(2)]) == [False, True]
    host.adapter.close()


def test_memory_of_a_device_fails_without_an_exception(shared_node):
    host = server(shared_node, weights="device")
    device = tensor(1)
    device.raw_data.device.type = "cuda"
    assert not host.store([of(1)], [device]).is_successful()
    assert host.lookup([of(1)]) == [False]
    host.adapter.close()


def test_tasks_end_while_the_store_is_away(node):
    host = server(node)
    assert host.store([of(1)], [tensor(1)]).is_successful()
    target = tensor(9)
    assert host.load([of(1)], [target]) == [True] and target.content() == tensor(1).content()
    host.adapter.options.update(lookup_timeout=1, load_timeout=1, store_timeout=1)
    timeouts = noted_timeouts(*clients(host.adapter.values))
    node.pause()
    try:
        assert host.lookup([of(1)]) == [False] and host.load([of(1)], [tensor(2)]) == [False]
        assert not host.store([of(2)], [tensor(2)]).is_successful()
    finally:
        node.resume()
    assert eventually(lambda: host.lookup([of(1)]) == [True])
    node.kill()
    assert host.lookup([of(1)]) == [False] and not host.store([of(3)], [tensor(3)]).is_successful()
    host.adapter.delete([of(1)])
    assert not host.adapter.report_status()["is_healthy"]
    host.adapter.close()
    assert max(timeouts) <= 1
