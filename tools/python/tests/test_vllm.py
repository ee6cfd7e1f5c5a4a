"""The tier answers the calls of vLLM's tiering manager."""

import sys
import time

import numpy
import pytest
import vllm_contract as contract
from conftest import PATIENCE, eventually, noted_timeouts
from vllm_contract import Action, Config, Envelope, Group, Host, LookupResult, Parallel, key

contract.install()

from larder_kv import _vllm_store  # noqa: E402
from larder_kv.vllm import LarderTier, fragments_of  # noqa: E402

# The nodes of these tests run, and a busy machine may take longer than the default.
_vllm_store.CONNECT_SECONDS = PATIENCE

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def attach(node, config=None, **options):
    options = {"url": node.url(), "lookup_timeout": 20, "load_timeout": 20, "store_timeout": 20, **options}
    return Host(LarderTier, config, **options)


def fill(host, seed=1):
    host.rows[:] = numpy.random.default_rng(seed).integers(0, 256, host.rows.shape, numpy.uint8)


def lookup(host, keys, context, seconds=PATIENCE):
    """Asks in every step until all keys have an answer, as the scheduler does."""
    end = time.monotonic() + seconds
    while True:
        found = [host.tier.lookup(key, context) for key in keys]
        if RETRY not in found:
            return found
        assert time.monotonic() < end, "no answer in time"
        assert not host.step()
        time.sleep(0.002)


def found_anew(host, keys):
    """Lookup by a request of its own: no answer outlives the requests that asked."""
    context = host.begin("anew")
    found = lookup(host, keys, context)
    host.tier.on_request_finished(context)
    return found


def tiers(host):
    """State of the node's tiers."""
    return host.tier.store.client.status(20)[0]["status"]["tiers"]


def stored(host, keys, context=None, chunks=None):
    context = context or host.begin("store")
    assert eventually(lambda: host.step() or host.tier.store.is_connected or host.tier.store.client is None)
    host.store(keys, range(len(keys)) if chunks is None else chunks, context)
    (result,) = host.finish()
    return result


def test_another_engine_reads_the_chunks_in_other_places(shared_node):
    writer, reader = (attach(shared_node, Config(name="read")) for _ in range(2))
    fill(writer)
    keys = [key(n) for n in range(6)]
    context = reader.begin()
    assert lookup(reader, keys[:2], context) == [MISS, MISS]
    reader.tier.on_request_finished(context)
    result = stored(writer, keys[:4])
    assert result.success and result.transfer_bytes == 4 * 65536
    context = reader.begin()
    assert lookup(reader, keys, context) == [HIT] * 4 + [MISS] * 2
    reader.load(keys[:4], [9, 3, 8, 0], context)
    (result,) = reader.finish()
    assert result.success and result.successful_keys is None
    for number, chunk in enumerate([9, 3, 8, 0]):
        assert (reader.rows[chunk] == writer.rows[number]).all()
    assert not reader.rows[[1, 2, 4, 5, 6, 7, 10, 15]].any()
    for host in (writer, reader):
        host.release()


def test_partial_load_names_its_chunks_and_turns_hits_into_misses(shared_node):
    host = attach(shared_node, Config(name="partial"))
    fill(host)
    keys = [key(n) for n in range(3)]
    assert stored(host, keys).success
    context = host.begin()
    assert lookup(host, keys, context) == [HIT] * 3
    host.tier.store.client.forget(host.tier.page_keys(keys[1:2]), 20)
    host.load(keys, [4, 5, 6], context)
    (result,) = host.finish()
    assert not result.success and set(result.successful_keys) == {keys[0], keys[2]}
    assert lookup(host, keys, context) == [HIT, MISS, HIT]


def test_answers_last_as_long_as_a_request_that_asked(shared_node):
    host = attach(shared_node, Config(name="verdicts"))
    fill(host)
    first, second = host.begin("first"), host.begin("second")
    assert lookup(host, [key(1)], first) == lookup(host, [key(1)], second) == [MISS]
    assert stored(host, [key(1)]).success
    host.tier.on_request_finished(first)
    assert lookup(host, [key(1)], second) == [MISS]
    host.tier.on_request_finished(second)
    third = host.begin("third")
    assert lookup(host, [key(1)], third) == [HIT]
    host.tier.on_request_finished(third)
    # A request that ends before its answer.
    fourth = host.begin("fourth")
    assert host.tier.lookup(key(2), fourth) is RETRY
    host.step()
    host.tier.on_request_finished(fourth)
    assert not host.tier.verdicts


def test_chunks_larger_than_a_page_are_whole_or_missing(shared_node):
    host = attach(shared_node, Config(name="large"), chunks=4, row_bytes=24 << 20)
    assert host.tier.fragments == 2
    fill(host)
    keys = [key(1), key(2)]
    assert stored(host, keys).success
    context = host.begin()
    host.load(keys, [3, 2], context)
    assert host.finish()[0].success
    assert (host.rows[3] == host.rows[0]).all() and (host.rows[2] == host.rows[1]).all()
    host.tier.store.client.forget(host.tier.page_keys(keys)[1:2], 20)
    assert lookup(host, keys, context) == [MISS, HIT]
    host.load(keys, [3, 2], context)
    assert set(host.finish()[0].successful_keys) == {keys[1]}


def test_rows_are_cut_into_equal_pages():
    assert [fragments_of(size) for size in (4096, 16 << 20, 17 << 20, 48 << 20)] == [1, 1, 2, 3]
    for bad in ((16 << 20) * 65, (16 << 20) + 1):
        with pytest.raises(ValueError):
            fragments_of(bad)


def test_namespaces_share_nothing(shared_node, monkeypatch):
    keys = [key(1)]
    writer = attach(shared_node)
    fill(writer)
    assert stored(writer, keys).success

    def found(config=None, **options):
        host = attach(shared_node, config, **options)
        return lookup(host, keys, host.begin())

    assert found() == [HIT]
    changes = [
        Config(name="other"),
        Config(dtype="fp8"),
        Config(kv_cache_layout="BHLNC"),
        Config(canonical_layout=True),
        Config(replicated_layout=True),
        Config(blocks_per_chunk=2),
        Config(tokens_per_hash=8),
        Config(worker_kv_bytes_per_block=8192),
        Config(groups=(Group(tokens_per_block=32),)),
        Config(groups=(Group(layer_names=("layers.0",)),)),
        Config(groups=(Group(), Group(1))),
        Config(groups=(Group(sliding_window_size_in_chunks=4),)),
        *(Config(parallel=Parallel(**{axis: 2})) for axis in vars(Parallel()) if axis.endswith("_size")),
    ]
    assert [found(config) for config in changes] == [[MISS]] * len(changes)
    assert found(weights="2") == found(tenant="t") == found(row_bytes=32768) == [MISS]
    assert found(model={"quantization": "awq"}) == found(model={"backend": "FLASHINFER"}) == [MISS]
    kv_cache_utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"1" * 32)
    assert found() == [MISS]
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    assert found() == [MISS]
    monkeypatch.undo()
    platform = sys.modules["vllm.platforms"].current_platform
    monkeypatch.setattr(platform, "get_device_name", lambda: "NVIDIA H20")
    assert found() == [MISS]


def test_portable_rows_are_shared_by_engines_with_other_numbers_of_ranks(shared_node):
    def config(ranks, is_portable=True):
        parallel = Parallel(world_size=ranks, tp_size=ranks, is_parallelism_agnostic=is_portable)
        size = 8192 // ranks
        return Config(name="portable", canonical_layout=True, parallel=parallel, worker_kv_bytes_per_block=size)

    writer = attach(shared_node, config(1))
    fill(writer)
    assert stored(writer, [key(1)]).success
    for of_reader, expected in [(config(2), HIT), (config(8), HIT), (config(2, False), MISS)]:
        host = attach(shared_node, of_reader)
        assert lookup(host, [key(1)], host.begin()) == [expected]


def test_unknown_weights_fail_while_vllm_starts(shared_node):
    with pytest.raises(ValueError, match="set weights"):
        attach(shared_node, model={"hf_config": contract.HfConfig(None)})


def test_engines_of_other_numerics_share_pages_if_they_are_declared_equal(shared_node, monkeypatch):
    config = Config(name="declared")
    writer = attach(shared_node, config, numerics="hopper")
    fill(writer)
    assert stored(writer, [key(1)]).success
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "get_device_name", lambda: "NVIDIA H20")
    for numerics, expected in [("hopper", HIT), ("blackwell", MISS), ("", MISS)]:
        host = attach(shared_node, config, numerics=numerics)
        assert lookup(host, [key(1)], host.begin()) == [expected]


def test_groups_have_their_own_chunks(shared_node):
    host = attach(shared_node, Config(name="groups", groups=(Group(), Group(1))))
    fill(host)
    assert stored(host, [key(1, group=0)]).success
    assert lookup(host, [key(1, group=0), key(1, group=1)], host.begin()) == [HIT, MISS]


@pytest.mark.parametrize("none_hash", [bytes(16), None])
def test_hashes_that_collide_or_are_unknown_are_not_used(shared_node, monkeypatch, none_hash):
    kv_cache_utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", none_hash)
    host = attach(shared_node)
    context = host.begin()
    assert lookup(host, [key(1)], context) == [MISS]
    assert not stored(host, [key(1)], context).success
    host.load([key(1)], [0], context)
    assert not host.finish()[0].success
    assert host.tier.store.client is None


def test_chunks_outside_of_the_host_cache_are_not_touched(shared_node):
    host = attach(shared_node, Config(name="outside"))
    assert stored(host, [key(1)]).success
    for chunks in ([16], [-1], [0, 1]):
        assert not stored(host, [key(2)], chunks=chunks).success
        host.load([key(1)], chunks, host.begin("outside"))
        (result,) = host.finish()
        assert not result.success and result.successful_keys is None


def test_stores_in_flight_leave_half_of_the_host_cache(node):
    host = attach(node, Config(name="pressure"), store_timeout=1)
    context = host.begin()
    assert lookup(host, [key(1)], context) == [MISS]
    node.pause()
    host.store([key(n) for n in range(6)], range(6), context)
    host.store([key(n) for n in range(6, 9)], range(6, 9), context)
    refused = list(host.tier.get_finished_jobs())
    assert [(result.job_id, result.success) for result in refused] == [(2, False)]
    assert host.tier.bp_detector.failure_threshold == 3
    (late,) = host.finish()
    assert late.job_id == 1 and not late.success
    node.resume()
    host.tier.timeouts = (20.0, 20.0, 20.0)
    assert eventually(lambda: stored(host, [key(n) for n in range(8)], context).success)
    # A job larger than the limit runs alone.
    assert stored(host, [key(n) for n in range(12)], context).success


def test_request_options(shared_node):
    host = attach(shared_node, Config(name="options"))
    fill(host)
    silent = host.begin("silent", kv_transfer_params={"larder": {"store": False}})
    assert stored(host, [key(1)], silent).success
    assert lookup(host, [key(1)], host.begin("a")) == [MISS]
    brief = host.begin("brief", kv_transfer_params={"larder": {"ttl": 1}})
    assert stored(host, [key(2)], brief).success
    assert stored(host, [key(3)], host.begin("long", kv_transfer_params={"larder": {"ttl": "x"}})).success
    blind = host.begin("blind", kv_transfer_params={"larder": {"load": False}})
    assert lookup(host, [key(2)], blind) == [MISS]
    pages = host.tier.page_keys([key(2), key(3)])
    assert eventually(lambda: host.tier.store.client.exists(pages, 20) == [False, True])
    for params in ({}, {"larder": "x"}, {"other": 1}):
        assert lookup(host, [key(3)], host.begin(str(params), kv_transfer_params=params)) == [HIT]


def test_hints_act_on_the_chunks_of_their_request(shared_node):
    host = attach(shared_node, Config(name="hints"), hints=["retain", "pin", "prefetch", "forget"])
    fill(host)
    hints = [Action("prefetch", {}), Action("forget", {}), Action("demote", {}), Action("retain", {"duration_s": "x"})]
    assert stored(host, [key(1), key(2)]).success
    context = host.begin("hinted", kv_hints=Envelope(hints))
    assert lookup(host, [key(1)], context) == [HIT]
    assert set(host.tier.requests["hinted"].hints) == {"prefetch", "forget"}
    host.store([key(3)], [3], context)
    host.tier.on_request_finished(context)
    assert host.finish()[0].success
    pages = host.tier.page_keys([key(1), key(2), key(3)])
    assert eventually(lambda: host.step() or host.tier.store.client.exists(pages, 20) == [False, True, False])
    assert eventually(lambda: host.step() or not host.tier.store.pending)


def test_forget_needs_permission(shared_node):
    host = attach(shared_node, Config(name="permission"))
    fill(host)
    context = host.begin("hinted", kv_hints=Envelope([Action("forget", {}), Action("pin", {"duration_s": 60})]))
    assert set(host.tier.requests["hinted"].hints) == {"pin"}
    assert stored(host, [key(1)], context).success
    before = tiers(host)["l2"]["pinned_pages"]
    host.tier.on_request_finished(context)
    assert eventually(lambda: host.step() or not host.tier.store.pending)
    assert host.tier.store.client.exists(host.tier.page_keys([key(1)]), 20) == [True]
    assert tiers(host)["l2"]["pinned_pages"] == before + 1


def test_stores_tell_the_place_in_the_sequence(shared_node):
    host = attach(shared_node, Config(name="places", groups=(Group(), Group(1))))
    context = host.begin()
    keys = [key(n) for n in range(4)] + [key(n, group=1) for n in range(2)]
    context._offload_key_positions.update({k: 16 * (at % 4 + 1) for at, k in enumerate(keys)})
    shuffled = [keys[3], keys[1], keys[5], keys[2]]
    runs = list(host.tier.runs(shuffled, context))
    first, other = host.tier.page_keys([keys[0], keys[4]])
    assert runs == [
        ([keys[1], keys[2], keys[3]], {"parent": first, "position": 1}),
        ([keys[5]], {"parent": other, "position": 1}),
    ]
    assert list(host.tier.runs([keys[2], keys[0]], context))[0] == ([keys[0]], {"parent": None, "position": 0})
    fill(host)
    assert stored(host, shuffled, context, chunks=[3, 1, 5, 2]).success
    # A chunk whose predecessor is unknown has no place.
    context._offload_key_positions[key(8)] = 160
    assert list(host.tier.runs([key(8)], context)) == [([key(8)], {})]
    # Unknown places: one run without a place.
    assert list(host.tier.runs([key(9), keys[0]], context)) == [([key(9), keys[0]], {})]


def test_store_that_is_away_is_a_miss_within_the_deadline(node):
    host = attach(node, Config(name="away"), lookup_timeout=0.3, load_timeout=0.3, store_timeout=0.3)
    fill(host)
    keys = [key(n) for n in range(4)]
    assert eventually(lambda: stored(host, keys).success)
    # The node has written the chunks to its log, and will find them after a kill.
    assert eventually(lambda: tiers(host)["l3"]["pages"] >= 4 and not tiers(host)["l3"]["segments_unsynced"])
    before = host.rows.copy()
    timeouts = noted_timeouts(host.tier.store.client)
    for number, leave in enumerate((node.pause, node.kill)):
        leave()
        context = host.begin(f"away-{number}")
        assert lookup(host, [key(n, seed=number + 1) for n in range(4)], context) == [MISS] * 4
        host.load(keys, [8, 9, 10, 11], context)
        host.store([key(n, seed=9) for n in range(4)], range(4), context)
        results = host.finish()
        assert [result.success for result in results] == [False, False]
        assert all(result.successful_keys is None for result in results)
        assert len(timeouts) == 3 and max(timeouts) <= 0.3
        timeouts.clear()
        assert (host.rows[:8] == before[:8]).all()
        node.resume()
    node.start()
    # The rest checks bytes, not deadlines, on a machine that may be busy.
    host.tier.timeouts = (20.0, 20.0, 20.0)
    assert eventually(lambda: found_anew(host, keys) == [HIT] * 4)
    host.load(keys, [12, 13, 14, 15], host.begin("back"))
    assert host.finish()[0].success
    assert (host.rows[12:16] == before[:4]).all()


def test_shutdown_during_transfers_releases_the_host_cache(node):
    host = attach(node, Config(name="shutdown"), store_timeout=1, load_timeout=1)
    context = host.begin()
    assert lookup(host, [key(1)], context) == [MISS]
    timeouts = noted_timeouts(host.tier.store.client)
    node.pause()
    host.store([key(1)], [1], context)
    host.load([key(2)], [2], context)
    assert len(timeouts) == 2 and max(timeouts) <= 1
    host.release()
    assert not host.tier.jobs
    node.resume()


def test_wrong_configuration_fails_while_vllm_starts(shared_node):
    wrong = [{"url": "mooncake://x"}, {"locality": "near"}, {"store_timeout": -1}, {"lookup_timeout": 1e9}, {"tenant": "x" * 300}]
    for options in wrong:
        with pytest.raises(ValueError):
            attach(shared_node, **options)
    with pytest.raises(TypeError):
        attach(shared_node, colour="red")
