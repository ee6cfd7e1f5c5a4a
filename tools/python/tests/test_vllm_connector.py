"""The connector answers the calls of vLLM's scheduler and model runner, and moves every byte."""

import dataclasses
import sys
import threading
import time

import pytest
import vllm_connector_contract as contract
from conftest import LONG, PATIENCE, eventually, is_durable, noted_timeouts
from vllm_connector_contract import (
    BLOCK_TOKENS,
    LAYERS,
    Engine,
    Group,
    KVCacheConfig,
    Request,
    RSWASpec,
    SlidingWindowSpec,
)

module = contract.install()

from larder_kv import _vllm_store  # noqa: E402
from larder_kv._vllm_pages import joined_layers, page_keys  # noqa: E402
from larder_kv._vllm_store import StoreCalls  # noqa: E402
from larder_kv._vllm_worker import LOAD_WINDOW_BYTES  # noqa: E402

# The nodes of these tests run, and a busy machine may take longer than the default.
_vllm_store.CONNECT_SECONDS = PATIENCE

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def engine(node, kv_config=None, kernel_blocks=1, ranks=1, tp=None, **extra):
    timeouts = {"lookup_timeout": 20, "load_timeout": 40, "follow_timeout": 20, "store_timeout": 20}
    options = {**timeouts, "tensor_parallel_max": 1, **extra}

    def config(rank):
        return contract.vllm_config(node.url(), tp=tp or ranks, rank=rank, **options)

    return Engine(module.LarderConnector, config, kv_config, kernel_blocks, ranks)


def stored(host, request):
    """Tiers of all pages of a request, by head group and part."""
    client = host.scheduler.scheduler.store.client
    shape = host.scheduler.scheduler.shape
    return [
        client.locate(page_keys(request.block_hashes, group, part), 20)
        for group in range(shape.groups)
        for part in range(shape.parts)
    ]


def is_stored(host, request):
    return all(tier is not None for tiers in stored(host, request) for tier in tiers)


def test_decode_engine_loads_what_a_prefill_engine_has_published(shared_node):
    prefill, decode = (engine(shared_node, name="hand-over") for _ in range(2))
    request = Request("a", 100, params=REMOTE_DECODE)
    table, hit = prefill.run(request)
    assert hit == 0 and prefill.is_right(request, table, 6)
    params = prefill.finish(request, table)
    assert params == {"do_remote_prefill": True, "do_remote_decode": False}
    # The puts may still run: the decode engine follows them.
    request = Request("b", 100, params=params)
    decode.free.reverse()
    table, hit = decode.run(request)
    assert hit == 96 and decode.computed == 4
    assert decode.is_right(request, table, 6)
    assert decode.finish(request, table) is None
    for host in (prefill, decode):
        host.close()


def test_decode_engine_follows_layers_while_they_are_computed(shared_node):
    prefill, decode = (engine(shared_node, name="follow") for _ in range(2))
    params = {"larder": {"follow": True}}
    request = Request("follower", 20 * BLOCK_TOKENS + 5, params=params)
    result = {}

    def follow():
        result["table"], result["hit"] = decode.run(request)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    # The follower asks before the first page exists.
    assert eventually(lambda: decode.workers[0].worker.followed)
    table, _ = prefill.run(Request("writer", 20 * BLOCK_TOKENS + 5), chunk=64)
    thread.join(60)
    assert result["hit"] == 20 * BLOCK_TOKENS
    assert decode.is_right(request, result["table"], 20)


def test_refused_follow_begins_again(crowded_node):
    """The node has too little memory for the pages of a prompt, and the engine loads all of them in turns."""
    blocks = 150
    config = KVCacheConfig(num_blocks=blocks + 2)
    prefill, decode = (engine(crowded_node, config, name="crowd") for _ in range(2))
    request = Request("follower", blocks * BLOCK_TOKENS + 5, params={"larder": {"follow": True}})
    result = {}

    def follow():
        result["table"], result["hit"] = decode.run(request)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    eventually(lambda: decode.workers[0].worker.followed)
    client = decode.workers[0].worker.store.client
    eventually(lambda: client.stats()["gets_busy"])
    # Each put is small enough for the memory that its connection has of its own.
    prefill.run(Request("writer", blocks * BLOCK_TOKENS + 5), chunk=4 * BLOCK_TOKENS)
    thread.join(60)
    assert result["hit"] == blocks * BLOCK_TOKENS
    assert decode.is_right(request, result["table"], blocks)
    for host in (prefill, decode):
        host.close()


def test_refused_follow_ends_by_its_timeout(shared_node, monkeypatch):
    host = engine(shared_node, name="refused", follow_timeout=0.2, load_timeout=LONG)
    worker, call = host.workers[0].worker, StoreCalls.call

    def refuse(self, done, method, *args, **options):
        call(self, (lambda ends: done(["busy"] * len(ends))) if method == "follow" else done, method, *args, **options)

    monkeypatch.setattr(StoreCalls, "call", refuse)
    writer, tokens = engine(shared_node, name="refused"), 2 * BLOCK_TOKENS + 5
    writer.run(Request("writer", tokens))
    writer.settle()
    request = Request("follower", tokens, params={"larder": {"follow": True}})
    table, hit = host.run(request)
    assert hit == 0 and host.is_right(request, table, 2)
    assert not worker.transfers and not worker.calls and not worker.followed
    assert worker.room == LOAD_WINDOW_BYTES


def test_layers_are_published_before_the_step_ends(shared_node):
    host = engine(shared_node, name="layers")
    request = Request("a", 4 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    # A second engine with the same blocks computes the first two layers only.
    other = engine(shared_node, name="layers", weights="other")
    assert other.match(request) == 0
    other.scheduler.on_new_request(request)
    metadata = other.schedule([("a", 0)], (), {"a": 64}, {"a": [1, 2, 3, 4]})
    worker = other.workers[0]
    worker.bind_connector_metadata(metadata)
    worker.save_kv_layer(LAYERS[0], None, None)
    assert not worker.worker.step.done
    worker.save_kv_layer(LAYERS[1], None, None)
    assert worker.worker.step.done == {0}
    assert eventually(lambda: all(stored(other, request)[0]))
    assert not any(stored(other, request)[1])
    worker.wait_for_save()
    assert eventually(lambda: is_stored(other, request))


def test_saves_have_the_tokens_of_their_blocks(shared_node):
    host = engine(shared_node, name="tokens")
    request = Request("a", 2 * BLOCK_TOKENS + 1)
    assert host.match(request) == 0
    for name, value, count in (("lora_request", None, 2), ("lora_request", object(), 0), ("all_token_ids", None, 0)):
        setattr(request, name, value)
        host.scheduler.on_new_request(request)
        (save,) = host.schedule([("a", 0)], (), {"a": request.num_tokens}, {"a": [1, 2, 3]}).saves
        assert len(save.hashes) == 2
        assert list(save.tokens) == [list(range(n * BLOCK_TOKENS, (n + 1) * BLOCK_TOKENS)) for n in range(count)]
        host.scheduler.request_finished_all_groups(request, ([1, 2, 3],))
    host.close()


def test_prefixes_are_shared_and_only_new_blocks_are_stored(shared_node):
    host = engine(shared_node, name="prefix")
    first = Request("a", 5 * BLOCK_TOKENS + 1)
    table, _ = host.run(first)
    host.finish(first, table)
    host.settle()
    longer = Request("b", 9 * BLOCK_TOKENS)
    table, hit = host.run(longer)
    assert hit == 5 * BLOCK_TOKENS and host.is_right(longer, table, 9)
    host.settle()
    assert is_stored(host, longer)
    host.finish(longer, table)
    # A full hit: vLLM computes the last token again.
    again = Request("c", 9 * BLOCK_TOKENS)
    table, hit = host.run(again)
    assert hit == 9 * BLOCK_TOKENS - 1 and host.is_right(again, table, 8)
    assert host.match(Request("d", 9 * BLOCK_TOKENS), local=4 * BLOCK_TOKENS) == 5 * BLOCK_TOKENS
    assert host.match(Request("e", 9 * BLOCK_TOKENS, seed=1)) == 0


def test_blocks_of_vllms_own_cache_are_published_for_a_decode_engine(shared_node):
    host = engine(shared_node, name="local")
    for name, params, published in (("a", None, False), ("b", REMOTE_DECODE, True)):
        request = Request(name, 4 * BLOCK_TOKENS, seed=7, params=params)
        host.run(request, local=2 * BLOCK_TOKENS)
        host.settle()
        tiers = stored(host, request)[0]
        assert all(tiers[2:]) and all(tiers[:2]) == published


def test_ranks_have_their_own_pages(shared_node):
    host = engine(shared_node, name="ranks", ranks=2)
    request = Request("a", 3 * BLOCK_TOKENS)
    table, _ = host.run(request)
    host.settle()
    host.finish(request, table)
    other = engine(shared_node, name="ranks", ranks=2)
    table, hit = other.run(Request("b", 3 * BLOCK_TOKENS))
    assert hit == 3 * BLOCK_TOKENS - 1 and other.is_right(request, table, 2)
    # A page that one rank lacks is missing for all.
    keys = page_keys(request.block_hashes[1:2], 1, 0)
    assert host.scheduler.scheduler.store.client.forget(keys, 20).pages == 1
    assert other.match(Request("c", 3 * BLOCK_TOKENS)) == BLOCK_TOKENS


def test_error_of_one_rank_is_an_error_of_the_request(shared_node):
    host = engine(shared_node, name="one rank", ranks=2)
    request = Request("a", 3 * BLOCK_TOKENS)
    table, _ = host.run(request)
    host.settle()
    host.finish(request, table)
    again = Request("b", 3 * BLOCK_TOKENS)
    assert host.match(again) == 3 * BLOCK_TOKENS
    assert host.scheduler.scheduler.store.client.forget(page_keys(request.block_hashes[2:], 1, 1), 20).pages == 1
    assert host.load(again, host.free[:3], 3 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert host.match(again) == 0 and not host.reports


def test_ranks_with_equal_kv_share_pages(shared_node):
    kv_config = KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=contract.MLAAttentionSpec()),), kv_tp_replicas=2)
    host = engine(shared_node, kv_config, ranks=2, name="latent")
    assert [worker.worker.is_writer for worker in host.workers] == [True, False]
    request = Request("a", 3 * BLOCK_TOKENS)
    # Both ranks compute the same bytes.
    host.content = lambda rank, layer, block_hash: Engine.content(host, 0, layer, block_hash)
    host.run(request)
    host.settle()
    other = engine(shared_node, kv_config, ranks=2, name="latent")
    other.content = host.content
    table, hit = other.run(Request("b", 3 * BLOCK_TOKENS))
    assert hit == 3 * BLOCK_TOKENS - 1 and other.is_right(request, table, 2)


def split_engine(node, ranks, heads=8, **extra):
    """An engine whose ranks share out the heads, or have copies of them."""
    spec = contract.FullAttentionSpec(num_kv_heads=max(1, heads // ranks))
    kv_config = KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=spec),))
    extra = {"name": f"split {heads}", "tensor_parallel_max": 8, **extra}
    return engine(node, kv_config, ranks=ranks, heads=heads, **extra)


@pytest.mark.parametrize("heads", [8, 4, 24])
@pytest.mark.parametrize("writer", [1, 2, 4, 8])
def test_engines_with_other_numbers_of_ranks_share_pages(shared_node, writer, heads):
    prompt = {"tokens": 3 * BLOCK_TOKENS, "seed": writer}
    host = split_engine(shared_node, writer, heads)
    request = Request("a", **prompt)
    table, hit = host.run(request)
    assert hit == 0
    host.settle()
    assert is_stored(host, request)
    for ranks in (1, 2, 4, 8):
        other = split_engine(shared_node, ranks, heads)
        again = Request(str(ranks), **prompt)
        other.free.reverse()
        table, hit = other.run(again)
        assert hit == 3 * BLOCK_TOKENS - 1 and other.is_right(again, table, 2)


def test_one_of_the_ranks_with_the_same_heads_writes(shared_node):
    host = split_engine(shared_node, 8, heads=2)
    assert [worker.worker.is_writer for worker in host.workers] == [True, False, False, False] * 2
    assert [list(worker.worker.groups) for worker in host.workers] == [[0]] * 4 + [[1]] * 4


def test_heads_that_cannot_be_divided_stay_with_their_ranks(shared_node):
    def groups(ranks, **options):
        return [list(worker.worker.groups) for worker in split_engine(shared_node, ranks, **options).workers]

    assert groups(2, heads=6) == [[0], [1]] and groups(3, heads=6) == [[0], [1], [2]]
    assert groups(4, tensor_parallel_max=2) == [[0], [1], [2], [3]]
    # Keys and values apart: a slot has all heads of its rank.
    apart = contract.FullAttentionSpec(num_head_slots=2, state_content_bytes=4 * 128 * 2)
    kv_config = KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=apart),))
    shapes = [engine(shared_node, kv_config, tp=tp, tensor_parallel_max=8).scheduler.scheduler.shape for tp in (1, 2)]
    assert [(shape.groups, shape.heads) for shape in shapes] == [(1, 2), (2, 2)]


def test_latents_are_shared_by_engines_with_other_numbers_of_ranks(shared_node):
    latent = Group(kv_cache_spec=contract.MLAAttentionSpec())
    host = engine(shared_node, KVCacheConfig(kv_cache_groups=(latent,), kv_tp_replicas=2), ranks=2, name="latents")
    host.content = lambda rank, layer, block_hash: Engine.content(host, 0, layer, block_hash)
    host.run(Request("a", 2 * BLOCK_TOKENS))
    host.settle()
    other = engine(shared_node, KVCacheConfig(kv_cache_groups=(latent,)), name="latents", heads=4)
    request = Request("b", 2 * BLOCK_TOKENS)
    table, hit = other.run(request)
    assert hit == 2 * BLOCK_TOKENS - 1 and other.is_right(request, table, 1)


def test_follower_has_other_ranks_than_its_writer(shared_node):
    writer, follower = split_engine(shared_node, 2, name="crossed"), split_engine(shared_node, 4, name="crossed")
    request = Request("a", 10 * BLOCK_TOKENS)
    result = {}

    def follow():
        asked = Request("b", 10 * BLOCK_TOKENS, params={"larder": {"follow": True}})
        result["table"], result["hit"] = follower.run(asked)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert eventually(lambda: all(worker.worker.followed for worker in follower.workers))
    writer.run(request, chunk=64)
    thread.join(60)
    assert result["hit"] == 10 * BLOCK_TOKENS - 1 and follower.is_right(request, result["table"], 9)


def test_puts_of_a_step_are_in_flight_together(shared_node, monkeypatch):
    host = engine(shared_node, name="together")
    request = Request("a", 2 * BLOCK_TOKENS)
    assert host.match(request) == 0
    client = host.workers[0].worker.store.client
    # Each of the two puts waits until the other has begun.
    barrier, put_from = threading.Barrier(2), client.put_from

    def together(*args, **options):
        barrier.wait(20)
        return put_from(*args, **options)

    monkeypatch.setattr(client, "put_from", together)
    host.run(request)
    host.settle()
    assert is_stored(host, request) and not host.workers[0].worker.publisher.lost


def test_kernel_blocks_may_be_smaller(shared_node):
    host = engine(shared_node, kernel_blocks=4, name="kernel")
    request = Request("a", 3 * BLOCK_TOKENS)
    table, _ = host.run(request)
    host.settle()
    host.finish(request, table)
    table, hit = host.run(Request("b", 3 * BLOCK_TOKENS))
    assert hit == 3 * BLOCK_TOKENS - 1 and host.is_right(request, table, 2)
    # An engine with other kernel blocks finds each token of each head in its place.
    other = engine(shared_node, name="kernel")
    table_of_other, hit = other.run(Request("c", 3 * BLOCK_TOKENS))
    assert hit == 3 * BLOCK_TOKENS - 1
    for layer in LAYERS:
        for ours, theirs in zip(table[:2], table_of_other[:2]):
            heads, tokens, size = other.rows(0, layer, theirs)[0].shape
            joined = host.rows(0, layer, ours).transpose(1, 0, 2, 3).reshape(heads, tokens, size)
            assert (joined == other.rows(0, layer, theirs)[0]).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_long_lookups_are_cut_into_pieces(shared_node, monkeypatch, ranks):
    monkeypatch.setattr(module, "LOOKUP_KEYS", 4)
    host = engine(shared_node, name="pieces", ranks=ranks)
    request = Request("a", 7 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    client = host.scheduler.scheduler.store.client
    timeouts = noted_timeouts(client)
    assert host.match(Request("b", 7 * BLOCK_TOKENS)) == 7 * BLOCK_TOKENS
    # A block has two keys in each rank.
    assert len(timeouts) == (4 if ranks == 1 else 7)
    assert host.match(Request("c", 7 * BLOCK_TOKENS), local=3 * BLOCK_TOKENS) == 4 * BLOCK_TOKENS
    assert client.forget(page_keys(request.block_hashes[4:5], 0, 0), 20).pages == 1
    del timeouts[:]
    assert host.match(Request("d", 7 * BLOCK_TOKENS)) == 4 * BLOCK_TOKENS
    assert len(timeouts) == (3 if ranks == 1 else 5)


def test_blocks_that_vllms_own_cache_loses_are_asked_for(shared_node):
    host = engine(shared_node, name="own cache")
    request = Request("a", 7 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    waiting = Request("b", 7 * BLOCK_TOKENS)
    assert host.match(waiting, local=3 * BLOCK_TOKENS) == 4 * BLOCK_TOKENS
    client = host.scheduler.scheduler.store.client
    assert client.forget(page_keys(request.block_hashes[2:3], 0, 0), 20).pages == 1
    assert host.match(waiting) == 2 * BLOCK_TOKENS


def test_request_that_is_preempted_finds_its_own_blocks(shared_node):
    host = engine(shared_node, name="preempted")
    request = Request("a", 6 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    # The store had nothing when the request began.
    assert host.match(request) == 6 * BLOCK_TOKENS
    client = host.scheduler.scheduler.store.client
    assert client.forget(page_keys(request.block_hashes[3:4], 0, 0), 20).pages == 1
    table = host.free[:6]
    assert host.load(request, table, 6 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    # vLLM computes the others. The lost page is stored again.
    metadata = host.schedule((), [("a", 3 * BLOCK_TOKENS)], {"a": 3 * BLOCK_TOKENS}, {"a": table})
    host.forward(metadata, list(zip(table[3:], request.block_hashes[3:])))
    host.settle()
    assert is_stored(host, request)


def test_lost_page_is_recomputed_and_stored_again(shared_node):
    host = engine(shared_node, name="lost")
    request = Request("a", 6 * BLOCK_TOKENS)
    table, _ = host.run(request)
    host.settle()
    host.finish(request, table)
    client = host.scheduler.scheduler.store.client
    state = host.scheduler.scheduler.state(again := Request("b", 6 * BLOCK_TOKENS))
    assert host.match(again) == 6 * BLOCK_TOKENS
    # The page leaves between the lookup and the load.
    assert client.forget(page_keys(request.block_hashes[3:4], 0, 0), 20).pages == 1
    table = host.free[:6]
    assert host.load(again, table, 6 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert not state.load and host.match(again, local=0) == 0
    assert host.is_right(request, table, 3)
    # vLLM computes the others, which the engine stores again.
    table, hit = host.run(Request("c", 6 * BLOCK_TOKENS))
    assert hit == 3 * BLOCK_TOKENS
    host.settle()
    assert is_stored(host, request)


def test_aborted_load_is_reported_once(shared_node):
    host = engine(shared_node, name="aborted", follow_timeout=1)
    request = Request("a", 2 * BLOCK_TOKENS, params={"do_remote_prefill": True})
    host.scheduler.on_new_request(request)
    assert host.match(request) == 2 * BLOCK_TOKENS
    host.scheduler.update_state_after_alloc(request, contract.Blocks([1, 2]), 2 * BLOCK_TOKENS)
    host.scheduler.request_finished(request, [1, 2])
    reports = []
    metadata = host.schedule()
    end = time.monotonic() + PATIENCE
    while not reports:
        assert time.monotonic() < end, "the load does not end"
        output = host.forward(metadata, [])
        reports += [output] if output.finished_recving else []
        metadata = host.schedule()
        time.sleep(0.002)
    assert reports[0].finished_recving == {"a"} and reports[0].invalid_block_ids == {1, 2}
    assert host.forward(host.schedule(), []).finished_recving is None
    assert not host.scheduler.scheduler.loading and not host.scheduler.scheduler.requests


def test_worker_with_other_layers_moves_nothing(shared_node):
    host = engine(shared_node, name="layers of the worker")
    host.workers[0].worker.shape = dataclasses.replace(host.workers[0].worker.shape, layers=LAYERS[::-1])
    request = Request("a", 2 * BLOCK_TOKENS, params={"do_remote_prefill": True})
    table, hit = host.run(request)
    assert hit == 0 and host.workers[0].worker.store.client is None
    assert not any(any(tiers) for tiers in stored(host, request))


def test_request_options(shared_node):
    host = engine(shared_node, name="options")
    silent = Request("silent", 2 * BLOCK_TOKENS, params={"larder": {"store": False}})
    host.run(silent)
    host.settle()
    assert not any(stored(host, silent)[0])
    brief = Request("brief", 2 * BLOCK_TOKENS, seed=1, params={"larder": {"ttl": 1}})
    host.run(brief)
    host.settle()
    assert eventually(lambda: not any(stored(host, brief)[0]))
    kept = Request("kept", 2 * BLOCK_TOKENS, seed=2, params={"larder": {"ttl": "x"}})
    host.run(kept)
    host.settle()
    assert is_stored(host, kept)
    assert host.match(Request("blind", 2 * BLOCK_TOKENS, seed=2, params={"larder": {"load": False}})) == 0
    for params in ({}, {"larder": "x"}, {"other": 1}):
        assert host.match(Request(str(params), 2 * BLOCK_TOKENS, seed=2, params=params)) == 2 * BLOCK_TOKENS


def test_roles(shared_node):
    producer = engine(shared_node, name="roles", role="kv_producer", policy="fail")
    request = Request("a", 2 * BLOCK_TOKENS)
    producer.run(request)
    producer.settle()
    assert is_stored(producer, request)
    assert producer.match(Request("b", 2 * BLOCK_TOKENS)) == 0
    consumer = engine(shared_node, name="roles", role="kv_consumer")
    other = Request("c", 2 * BLOCK_TOKENS, seed=1)
    consumer.run(other)
    consumer.settle()
    assert not any(stored(consumer, other)[0])
    assert consumer.match(Request("d", 2 * BLOCK_TOKENS)) == 2 * BLOCK_TOKENS


def test_prompts_alone_are_stored_on_request(shared_node):
    host = engine(shared_node, name="decode", save_decode=False)
    request = Request("a", 4 * BLOCK_TOKENS)
    request.num_prompt_tokens = 2 * BLOCK_TOKENS
    host.run(request)
    host.settle()
    tiers = stored(host, request)[0]
    assert all(tiers[:2]) and not any(tiers[2:])


def test_full_graphs_publish_at_the_end_of_the_step(shared_node):
    host = engine(shared_node, name="graphs", layerwise=False)
    request = Request("a", 2 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    assert is_stored(host, request)
    assert module.LarderConnector.requires_piecewise_for_cudagraph({})
    assert not module.LarderConnector.requires_piecewise_for_cudagraph({"layerwise": False})


def test_rows_that_exceed_their_memory_are_not_stored(node):
    host = engine(node, name="budget", staging_bytes=16 << 20)
    request = Request("a", 2 * BLOCK_TOKENS)
    host.run(request)
    host.settle()
    node.pause()
    worker = host.workers[0].worker
    steps = 0
    while not worker.dropped:
        host.run(Request(str(steps), 50 * BLOCK_TOKENS, seed=steps + 1, params={"larder": {"load": False}}))
        host.free = list(range(1, 64))
        steps += 1
        assert steps < 20
    assert worker.publisher.budget.left >= 0
    node.resume()
    host.settle()


def test_namespaces_share_nothing(shared_node, monkeypatch):
    def found(kv_config=None, tp=1, **extra):
        return engine(shared_node, kv_config, tp=tp, **extra).match(Request("x", 2 * BLOCK_TOKENS))

    host = engine(shared_node, name="names")
    host.run(Request("a", 2 * BLOCK_TOKENS))
    host.settle()
    assert found(name="names") == 2 * BLOCK_TOKENS
    assert found(name="other") == found(name="names", weights="2") == found(name="names", tenant="t") == 0
    assert found(name="names", dtype="fp8") == found(name="names", tp=2) == 0
    assert found(KVCacheConfig(kv_cache_layout="BLNHC"), name="names") == 0
    # A backend that keeps keys and values apart: pages have the same length.
    apart = contract.FullAttentionSpec(num_head_slots=2, state_content_bytes=4 * 128 * 2)
    assert apart.page_size_bytes == contract.FullAttentionSpec().page_size_bytes
    assert found(KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=apart),)), name="names") == 0
    assert found(name="names", model={"quantization": "awq"}) == found(name="names", model={"dtype": "float16"}) == 0
    monkeypatch.setattr(sys.modules["vllm.v1.core.kv_cache_utils"], "NONE_HASH", b"1" * 32)
    assert found(name="names") == 0
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.0")
    assert found(name="names") == 0


@pytest.mark.parametrize("none_hash", [bytes(16), None])
def test_hashes_that_collide_or_are_unknown_are_not_used(shared_node, monkeypatch, none_hash):
    monkeypatch.setattr(sys.modules["vllm.v1.core.kv_cache_utils"], "NONE_HASH", none_hash)
    host = engine(shared_node)
    request = Request("a", 2 * BLOCK_TOKENS, params={"do_remote_prefill": True})
    table, hit = host.run(request)
    assert hit == 0 and host.scheduler.scheduler.store.client is None
    assert host.workers[0].worker.store.client is None
    host.finish(request, table)


def test_engine_without_a_namespace_computes(shared_node, monkeypatch):
    def fail(*_):
        raise TypeError("vLLM has changed")

    monkeypatch.setattr(module, "identity", fail)
    host = engine(shared_node)
    request = Request("a", 2 * BLOCK_TOKENS, params={"do_remote_prefill": True})
    table, hit = host.run(request)
    assert hit == 0 and host.is_right(request, table, 2)
    assert host.scheduler.scheduler.store.client is None and host.workers[0].worker.store.client is None
    host.finish(request, table)


def test_store_that_is_away_costs_its_timeouts_and_no_more(node):
    host = engine(node, name="away")
    request = Request("a", 4 * BLOCK_TOKENS)
    table, _ = host.run(request)
    host.settle()
    host.finish(request, table)
    client = host.scheduler.scheduler.store.client
    assert eventually(lambda: is_durable(client))
    brief = engine(node, name="away", lookup_timeout=0.3, load_timeout=0.5, follow_timeout=0.3, store_timeout=0.3)
    # A busy machine may take longer than the timeouts.
    assert eventually(lambda: brief.match(Request(str(time.monotonic()), 4 * BLOCK_TOKENS)) == 4 * BLOCK_TOKENS)
    brief.forward(brief.schedule(), [])
    timeouts = noted_timeouts(brief.scheduler.scheduler.store.client, brief.workers[0].worker.store.client)
    for number, leave in enumerate((node.pause, node.kill)):
        leave()
        for params in (None, {"do_remote_prefill": True}):
            name = f"{number} {params}"
            away = Request(name, 4 * BLOCK_TOKENS, seed=number, params=params)
            table, hit = brief.run(away)
            assert hit == 0 and brief.is_right(away, table, 4)
            brief.finish(away, table)
        # The store leaves between the lookup and the load.
        late = Request(f"late {number}", 4 * BLOCK_TOKENS)
        brief.scheduler.scheduler.state(late).found = (0, 4)
        table, hit = brief.run(late)
        assert hit == 0 and brief.is_right(late, table, 4)
        brief.settle()
        brief.finish(late, table)
        node.resume()
    # No step waits, and a call ends by its timeout.
    assert len(timeouts) > 8 and max(timeouts) <= 0.3
    node.start()
    assert eventually(lambda: host.match(Request(str(time.monotonic()), 4 * BLOCK_TOKENS)) == 4 * BLOCK_TOKENS)
    table, hit = host.run(Request("c", 4 * BLOCK_TOKENS))
    assert hit == 4 * BLOCK_TOKENS - 1 and host.is_right(request, table, 3)


def test_shutdown_ends_transfers(node):
    host = engine(node, name="shutdown", store_timeout=1, follow_timeout=1, load_timeout=1)
    host.run(Request("a", 2 * BLOCK_TOKENS))
    host.settle()
    node.pause()
    request = Request("b", 2 * BLOCK_TOKENS, params={"do_remote_prefill": True})
    assert host.match(request) == 2 * BLOCK_TOKENS
    host.scheduler.update_state_after_alloc(request, contract.Blocks([1, 2]), 2 * BLOCK_TOKENS)
    host.forward(host.schedule(), [])
    worker = host.workers[0].worker
    assert worker.calls
    host.close()
    assert not worker.calls and not worker.transfers
    node.resume()


def test_layers_are_joined_until_pages_are_long_enough():
    assert [joined_layers(32, size) for size in (65536, 32768, 16384, 1024)] == [1, 2, 4, 32]
    assert joined_layers(30, 20000) == 5
    assert joined_layers(7, 16384) == 7
    assert joined_layers(4, 12 << 20) == 1


def test_wrong_configuration_fails_while_vllm_starts(shared_node):
    wrong = [
        {"url": "mooncake://x"},
        {"policy": "fail"},
        {"store_timeout": -1},
        {"lookup_timeout": 1e9},
        {"tenant": "x" * 300},
        {"staging_bytes": 1},
        {"tensor_parallel_max": 0},
        {"colour": "red"},
        {"kv_config": KVCacheConfig(kv_cache_groups=(Group(), Group()))},
        {"kv_config": KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=SlidingWindowSpec()),))},
        {"kv_config": KVCacheConfig(kv_cache_groups=(Group(kv_cache_spec=RSWASpec()),))},
    ]
    for options in wrong:
        url = options.pop("url", shared_node.url())
        kv_config = options.pop("kv_config", KVCacheConfig())
        config = contract.vllm_config(url, **options)
        for role in contract.KVConnectorRole:
            with pytest.raises(ValueError):
                module.LarderConnector(config, role, kv_config)
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        config = contract.vllm_config(shared_node.url())
        setattr(config.parallel_config, name, 2)
        with pytest.raises(ValueError):
            module.LarderConnector(config, contract.KVConnectorRole.WORKER, KVCacheConfig())
    config = contract.vllm_config(shared_node.url())
    config.speculative_config = object()
    with pytest.raises(ValueError):
        module.LarderConnector(config, contract.KVConnectorRole.WORKER, KVCacheConfig())
