"""The backend answers the calls of SGLang's cache controller."""

import sys

import numpy
import pytest
import sglang_contract as contract
from conftest import Node, eventually, noted_timeouts
from sglang_contract import Config, ExtraInfo, HostPool, PoolHitPolicy, PoolName, PoolTransfer, indices, page_hashes

contract.install()

from larder_kv.sglang import LarderStorage, _Pool, part_layout  # noqa: E402


NAMES = [PoolName.MAMBA, PoolName.INDEXER, PoolName.DRAFT, PoolName.SWA]


def backend(url, pool, extra=None, **config):
    """A backend as SGLang attaches it: positional constructor, then the registrations."""
    timeouts = dict.fromkeys(("exists_timeout", "get_timeout", "set_timeout"), 20.0)
    options = {"interface_v1": 1, "url": url, **timeouts, **(extra or {})}
    storage = LarderStorage(Config(options, **config), {})
    storage.register_mem_pool_host(pool)
    if options["interface_v1"]:
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
    assert eventually(lambda: all(p.client.nodes_connected for p in storage.pools.values()))
    return storage


def filled(layout, seed=1, **shape):
    pool = HostPool(layout, **shape)
    pool.kv_buffer[:] = numpy.random.default_rng(seed).integers(0, 256, pool.kv_buffer.size, numpy.uint8)
    return pool


def page_of(pool, page):
    """Bytes of a page, buffer by buffer."""
    base = pool.kv_buffer.ctypes.data
    addresses, sizes = pool.get_page_buffer_meta(indices(pool, [page]))
    return b"".join(pool.kv_buffer[a - base : a - base + s].tobytes() for a, s in zip(addresses, sizes))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "mla"])
def test_another_engine_reads_the_pages(shared_node, layout):
    config = dict(model_name=f"model-{layout}", is_mla_model=layout == "mla")
    writer_pool, reader_pool = filled(layout), HostPool(layout)
    writer, reader = backend(shared_node.url(), writer_pool, **config), backend(shared_node.url(), reader_pool, **config)
    keys = page_hashes(40)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys[:32], indices(writer_pool, range(32)), ExtraInfo([])) == [True] * 32
    # A node that was split: the same pages again, and some more.
    assert writer.batch_set_v1(keys[24:36], indices(writer_pool, range(24, 36)), ExtraInfo(keys[:24])) == [True] * 12
    assert reader.batch_exists(keys) == 36
    assert reader.batch_exists(keys[37:]) == 0
    # Other places of the pool, in another order of pages.
    places = list(reversed(range(20, 56)))
    assert reader.batch_get_v1(keys[:36], indices(reader_pool, places)) == [True] * 36
    assert [page_of(reader_pool, place) for place in places] == [page_of(writer_pool, page) for page in range(36)]
    assert reader.batch_get_v1(keys[34:40], indices(reader_pool, range(6))) == [True] * 2 + [False] * 4
    assert reader.statistics()["pages_read"] == 38 and reader.statistics()["pages_missed"] == 4


def test_pages_larger_than_a_store_page(shared_node):
    pool, other = (filled("page_first", seed, pages=2, page_size=64, layers=32, token_bytes=6144) for seed in (1, 2))
    assert pool.page_bytes == 12 << 20
    assert part_layout([12 << 20, 12 << 20]) == (12 << 20, 1, 2)
    writer, reader = backend(shared_node.url(), pool), backend(shared_node.url(), other)
    keys = page_hashes(2, seed=5)
    assert writer.batch_set_v1(keys, indices(pool, [0, 1])) == [True] * 2
    assert reader.batch_exists(keys) == 2
    assert reader.batch_get_v1(keys, indices(other, [1, 0])) == [True] * 2
    assert page_of(other, 1) == page_of(pool, 0) and page_of(other, 0) == page_of(pool, 1)
    # A page without its second half is no page.
    writer.pools["kv"].client.forget(writer.pools["kv"].keys(keys)[1:2], 20)
    assert reader.batch_exists(keys) == 0
    assert reader.batch_get_v1(keys, indices(other, [1, 0])) == [False, True]


def test_layouts_of_parts():
    assert part_layout([1024]) == (1024, 1, 1)
    assert part_layout([1024, 1024]) == (1024, 2, 1)
    assert part_layout([1024, 512]) == (512, 3, 1)
    assert part_layout([4096] * 256) == (4096, 128, 2)
    assert part_layout([32 << 20]) == (16 << 20, 1, 2)
    for bad in [[], [0], [(16 << 20) + 1]]:
        with pytest.raises(ValueError):
            part_layout(bad)


def test_buffers_of_different_sizes_become_equal_parts(shared_node):
    pool = _Pool(shared_node.url(), {"model": "m"}, "t", [1024, 512])
    pages = pool.buffers([1000, 5000, 9000, 7000], [1024, 512] * 2, None)
    spans = [[(part.address, part.size) for part in page] for page in pages]
    assert spans == [[(1000, 512), (1512, 512), (5000, 512)], [(9000, 512), (9512, 512), (7000, 512)]]
    with pytest.raises(ValueError):
        pool.buffers([1000, 5000], [512, 1024], None)
    for sizes in ([1024, 512, 1024], [1024, 512, 1024, 500], [1024, 512, 512, 1024]):
        with pytest.raises(ValueError, match="shape"):
            pool.buffers([1000] * len(sizes), sizes, None)


def test_ranks_models_and_layouts_share_nothing(shared_node):
    keys = page_hashes(1, seed=7)
    pool = filled("page_first")
    first = backend(shared_node.url(), pool)
    assert first.batch_set_v1(keys, indices(pool, [0])) == [True]
    assert backend(shared_node.url(), pool).batch_exists(keys) == 1
    for changes in [
        dict(tp_rank=1, tp_size=2),
        dict(pp_rank=1, pp_size=2),
        dict(attn_cp_rank=1, attn_cp_size=2),
        dict(model_name="other"),
        dict(extra={"weights": "2"}),
        dict(extra={"tenant": "t"}),
        dict(extra={"numerics": "declared"}),
    ]:
        assert backend(shared_node.url(), pool, **changes).batch_exists(keys) == 0, changes
    for other in [filled("page_first_direct"), filled("page_first", dtype="float8"), filled("page_first", layers=4)]:
        assert backend(shared_node.url(), other).batch_exists(keys) == 0


def test_engines_of_other_numerics_share_pages_only_if_they_are_declared_equal(shared_node, monkeypatch):
    keys = page_hashes(2, seed=11)
    pool = filled("page_first")
    for key, extra in zip(keys, [{}, {"numerics": "hopper"}]):
        assert backend(shared_node.url(), pool, extra).batch_set_v1([key], indices(pool, [0])) == [True]
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.24", raising=False)
    assert backend(shared_node.url(), pool).batch_exists(keys[:1]) == 0
    assert backend(shared_node.url(), pool, {"numerics": "hopper"}).batch_exists(keys[1:]) == 1


def test_models_with_other_settings_share_nothing(shared_node, monkeypatch):
    keys, pool = page_hashes(2, seed=40), filled("page_first")
    assert backend(shared_node.url(), pool).batch_set_v1(keys, indices(pool, range(2))) == [True] * 2

    def found(**changes):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(contract.MODEL, name, value, raising=False)
            return backend(shared_node.url(), HostPool("page_first")).batch_exists(keys)

    assert found() == 2
    changes = [
        {"revision": "1" * 40},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1e6}'},
        {"modelopt_quant": "nvfp4"},
        {"load_format": "dummy"},
    ]
    assert [found(**change) for change in changes] == [0] * len(changes)
    with pytest.raises(ValueError, match="set weights"):
        found(revision="main")


def test_ranks_of_a_latent_model_share_pages(shared_node):
    keys = page_hashes(1, seed=8)
    pool = filled("mla")
    writer = backend(shared_node.url(), pool, is_mla_model=True, tp_size=2)
    assert writer.batch_set_v1(keys, indices(pool, [0])) == [True]
    assert backend(shared_node.url(), pool, is_mla_model=True, tp_rank=1, tp_size=2).batch_exists(keys) == 1


def head_pools(ranks, heads=8):
    """Pools of the ranks of one engine, which share out the heads of a model."""
    return [HostPool("page_head", head_num=heads // ranks, token_bytes=96 // ranks) for _ in range(ranks)]


def head_backends(url, pools, **config):
    ranks = len(pools)
    config = dict(tp_size=ranks, tp_lcm_size=8, should_split_heads=ranks < 8, model_name="by heads", **config)
    return [backend(url, pool, tp_rank=rank, **config) for rank, pool in enumerate(pools)]


def heads_of(pools, page):
    """Bytes of a page as one rank has them: all heads of the keys, then those of the values."""
    halves = [(half[: len(half) // 2], half[len(half) // 2 :]) for half in (page_of(pool, page) for pool in pools)]
    return b"".join(keys for keys, _ in halves) + b"".join(values for _, values in halves)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_engines_with_other_numbers_of_ranks_share_pages_by_heads(shared_node, ranks):
    keys = page_hashes(6, seed=100 + ranks)
    pools = head_pools(ranks)
    for rank, pool in enumerate(pools):
        pool.kv_buffer[:] = numpy.random.default_rng(rank).integers(0, 256, pool.kv_buffer.size, numpy.uint8)
    for pool, writer in zip(pools, head_backends(shared_node.url(), pools)):
        assert writer.batch_set_v1(keys, indices(pool, range(6)), ExtraInfo([])) == [True] * 6
    for others in (1, 2, 4, 8):
        reader_pools = head_pools(others)
        readers = head_backends(shared_node.url(), reader_pools)
        for pool, reader in zip(reader_pools, readers):
            assert reader.batch_exists(keys + page_hashes(1)) == 6
            assert reader.batch_get_v1(keys, indices(pool, range(9, 3, -1))) == [True] * 6
        assert [heads_of(reader_pools, 9 - page) for page in range(6)] == [heads_of(pools, page) for page in range(6)]
    # A page without one group is no page, but only for the rank with that group.
    readers[-1].pools["kv"].client.forget(readers[-1].pools["kv"].keys(keys[2:3]), 20)
    assert [reader.batch_exists(keys) for reader in readers] == [6] * 7 + [2]


def test_heads_that_cannot_be_cut_are_refused(shared_node):
    with pytest.raises(ValueError, match="tp_lcm_size"):
        head_backends(shared_node.url(), head_pools(2, heads=4), is_mla_model=False)


@pytest.mark.parametrize("name", [PoolName.MAMBA, PoolName.DRAFT])
def test_sharded_pools_beside_a_latent_model_share_no_pages(shared_node, name):
    keys = page_hashes(1, seed=10)
    kv = filled("mla")
    latent = dict(model_name="latent", is_mla_model=True, tp_size=2)
    first, second = (backend(shared_node.url(), kv, tp_rank=rank, **latent) for rank in (0, 1))
    states = [filled("page_first", seed) for seed in (1, 2)]
    for storage, state in zip((first, second), states):
        storage.register_mem_host_pool_v2(state, name)
        assert eventually(lambda: storage.pools[str(name)].client.nodes_connected)
    written = [page_of(state, 0) for state in states]
    transfers = [PoolTransfer(name, indices(state, [0]), keys) for state in states]
    assert first.batch_set_v2(transfers[:1]) == {name: [True]}
    assert second.batch_get_v2(transfers[1:]) == {name: [False]}
    assert second.batch_set_v2(transfers[1:]) == {name: [True]}
    for storage, state, transfer, page in zip((first, second), states, transfers, written):
        state.kv_buffer[:] = 0
        assert storage.batch_get_v2([transfer]) == {name: [True]}
        assert page_of(state, 0) == page


def test_flat_pages_of_different_layouts_share_nothing(shared_node):
    keys = page_hashes(1, seed=11)
    for interface in (0, 1):
        first, second = (
            backend(shared_node.url(), HostPool(layout), {"interface_v1": interface}, model_name="flat")
            for layout in ("page_first", "page_first_direct")
        )
        page = filled("page_first").get_dummy_flat_data_page()
        if interface == 0:
            assert first.set(keys[0], page) is True
            assert first.exists(keys[0]) is True
        # Neither the other layout, nor the other interface.
        assert second.exists(keys[0]) is False
    assert first.exists(keys[0]) is False


def test_dtypes_share_nothing(shared_node):
    keys = page_hashes(1, seed=12)
    pool = filled("page_first", dtype="torch.uint8")
    for missing in ({}, {"kv_cache_dtype": "auto"}):
        for interface in (0, 1):
            with pytest.raises(ValueError, match="kv_cache_dtype"):
                backend(shared_node.url(), pool, {"interface_v1": interface, **missing})
    first, second = (backend(shared_node.url(), pool, {"kv_cache_dtype": f"fp8_{name}"}) for name in ("e4m3", "e5m2"))
    assert first.batch_set_v1(keys, indices(pool, [0])) == [True]
    assert first.batch_exists(keys) == 1 and second.batch_exists(keys) == 0
    states = [filled("page_first", temporal_dtype=name) for name in ("float32", "bfloat16")]
    first, second = (backend(shared_node.url(), state) for state in states)
    assert first.batch_set_v1(keys, indices(states[0], [0])) == [True]
    assert first.batch_exists(keys) == 1 and second.batch_exists(keys) == 0


def test_copying_interface(shared_node):
    pool = filled("page_first")
    storage = backend(shared_node.url(), pool, {"interface_v1": 0})
    keys = page_hashes(3, seed=9)
    pages = [contract.Tensor(pool.kv_buffer[n * 100 : n * 100 + 2 * pool.page_bytes].copy()) for n in range(2)]
    assert storage.batch_set(keys[:2], pages) is True
    assert storage.set(keys[0], pages[0]) is True
    assert storage.exists(keys[0]) is True and storage.exists(keys[2]) is False
    targets = [pool.get_dummy_flat_data_page() for _ in keys]
    found = storage.batch_get(keys, targets)
    assert found == [targets[0], targets[1], None]
    assert [(t.array == p.array).all() for t, p in zip(targets, pages)] == [True, True]
    assert storage.get(keys[2], targets[2]) is None
    # The first writer's bytes stay: the page is stored all the same.
    assert storage.set(keys[0], pages[1]) is True
    assert (storage.get(keys[0], targets[2]).array == pages[0].array).all()


def test_pools_of_a_hybrid_model(shared_node):
    kv, state = filled("page_first"), filled("mla", page_size=1, layers=5)
    storage = backend(shared_node.url(), kv, model_name="hybrid")
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    assert eventually(lambda: storage.pools["mamba"].client.nodes_connected)
    keys = page_hashes(6)
    assert storage.batch_set_v1(keys[:5], indices(kv, range(5))) == [True] * 5
    states = PoolTransfer(PoolName.MAMBA, indices(state, [1, 3]), [keys[1], keys[3]])
    assert storage.batch_set_v2([states]) == {PoolName.MAMBA: [True, True]}
    trailing = PoolTransfer(PoolName.MAMBA, keys=[keys[-1]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
    everywhere = storage.batch_exists_v2(keys, [PoolTransfer(PoolName.MAMBA)])
    assert (everywhere.kv_hit_pages, everywhere.restorable_prefix_pages) == (0, [])
    assert storage.batch_exists_v2(keys).kv_hit_pages == 5
    assert storage.batch_exists_v2(keys, [PoolTransfer(PoolName.INDEXER)]).kv_hit_pages == 0
    expected = page_of(state, 3)
    state.kv_buffer[:] = 0
    assert storage.batch_get_v2([states]) == {PoolName.MAMBA: [True, True]}
    assert page_of(state, 3) == expected


def test_clear_forgets_known_pages(shared_node):
    pool = filled("page_first")
    first, second = (backend(shared_node.url(), pool, model_name="cleared") for _ in range(2))
    keys = page_hashes(4)
    assert all(first.batch_set_v1(keys, indices(pool, range(4))))
    assert second.batch_exists(keys[:2]) == 2
    second.clear()
    assert first.batch_exists(keys[:2]) == 0 and first.batch_exists(keys[2:]) == 2
    first.clear()
    assert second.batch_exists(keys[2:]) == 0
    first.close()


def test_store_that_is_away_is_a_miss(node):
    pool = filled("page_first")
    storage = backend(node.url(), pool)
    keys = page_hashes(4)
    assert eventually(lambda: all(storage.batch_set_v1(keys, indices(pool, range(4)))))
    storage.options.update(exists_timeout=0.3, get_timeout=0.2, set_timeout=0.1)
    timeouts = noted_timeouts(storage.pools["kv"].client)
    for leave in (node.pause, node.kill):
        leave()
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, indices(pool, range(4))) == [False] * 4
        assert storage.batch_set_v1(keys, indices(pool, range(4))) == [False] * 4
        exists, get, put = timeouts
        assert exists <= 0.3 and get <= 0.2 and put <= 0.1
        timeouts.clear()
        node.resume()
    node.start()


@pytest.mark.parametrize("leave", [Node.pause, Node.kill])
def test_clear_tells_that_the_store_is_away(node, leave, monkeypatch):
    monkeypatch.setattr("larder_kv.sglang.FORGET_BATCH", 2)
    pool = filled("page_first")
    storage = backend(node.url(), pool, {"set_timeout": 2.0})
    keys = page_hashes(10)
    assert eventually(lambda: all(storage.batch_set_v1(keys, indices(pool, range(10)))))
    timeouts = noted_timeouts(storage.pools["kv"].client)
    leave(node)
    with pytest.raises(TimeoutError, match="10 of 10"):
        storage.clear()
    assert len(timeouts) == 5 and max(timeouts) <= 2
    if leave is Node.pause:
        assert max(timeouts[1:]) < 0.5, "the first batch takes the time of all"
    # The pages are still known, so a second call forgets them, whichever the first one has reached. A busy device
    # syncs for seconds.
    storage.options["set_timeout"] = 20.0
    if leave is Node.pause:
        node.resume()
    else:
        node.start()
    assert eventually(lambda: storage.pools["kv"].client.nodes_connected)

    def is_cleared():
        try:
            storage.clear()
        except TimeoutError:
            return False
        return True

    assert eventually(is_cleared)
    assert storage.batch_exists(keys) == 0


def test_pools_of_a_call_share_its_timeout(node):
    timeouts = {"exists_timeout": 2, "get_timeout": 2, "set_timeout": 2}
    kv, states = filled("page_first"), [filled("mla", page_size=1) for _ in range(4)]
    storage = backend(node.url(), kv, timeouts)
    for name, state in zip(NAMES, states):
        storage.register_mem_host_pool_v2(state, name)
    assert eventually(lambda: all(pool.client.nodes_connected for pool in storage.pools.values()))
    keys = page_hashes(2)
    timeouts = noted_timeouts(*(pool.client for pool in storage.pools.values()))
    node.pause()
    transfers = [PoolTransfer(name, indices(state, [0, 1]), keys) for name, state in zip(NAMES, states)]
    for call, nothing in [(storage.batch_get_v2, [False] * 2), (storage.batch_set_v2, [False] * 2)]:
        assert call(transfers) == {name: nothing for name in NAMES}
        assert len(timeouts) == len(NAMES) and timeouts[0] <= 2
        assert max(timeouts[1:]) < 0.5, "the first pool takes the time of all"
        timeouts.clear()


def test_wrong_configuration_fails_at_attachment():
    url = {"url": "larder://a:1"}
    for config in [Config({}), Config({"url": "mooncake://x"}), Config(dict(url, interface_v1=0), tp_lcm_size=8, should_split_heads=True)]:
        with pytest.raises(ValueError):
            LarderStorage(config, {})
    for name in ("exists_timeout", "get_timeout", "set_timeout", "lease"):
        for value in (-1, 100_000, "nan", "inf"):
            with pytest.raises(ValueError, match=name):
                LarderStorage(Config({**url, name: value}), {})
    LarderStorage(Config({**url, "get_timeout": 86400, "lease": 60}), {})
