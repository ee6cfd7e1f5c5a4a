"""Every call, from threads and from event loops."""

import asyncio
import threading
import time

import larder_kv
import pytest
from conftest import LONG, PAGE_BYTES, PATIENCE, Node, attach, eventually, key, payload


@pytest.fixture
def client(url, namespace):
    return attach(url, namespace)


def test_prefix_is_looked_up_and_held(client):
    keys = [key(number) for number in range(6)]
    assert client.put_from(keys[:4], [payload(n) for n in range(4)], 10, position=0) == ["stored"] * 4
    assert client.exists(keys, 10) == [True] * 4 + [False] * 2
    assert client.locate(keys, 10) == ["L2"] * 4 + [None] * 2
    with client.lookup(keys, 10, hold=30) as found:
        assert (len(found), found.tiers, found.held, found.answered) == (4, ["L2"] * 4, 4, True)
        assert found.retry_after is None and found.expected == [0.0] * 4
    assert len(client.lookup([keys[5], keys[0]], 10)) == 0, "a prefix begins at the first key"


def test_forgotten_page_is_a_miss(client):
    client.put_from([key(1), key(2)], [payload(1), payload(2)], 10)
    assert client.forget([key(1), key(7)], 10) == (1, True)
    assert client.get_into([key(1), key(2)], [bytearray(PAGE_BYTES), bytearray(PAGE_BYTES)], 10) == [None, "L2"]


def test_pins_and_warm(client):
    client.put_from([key(1)], [payload(1)], 10)
    assert client.pin([key(1)], 10, ttl=60) == larder_kv.Pinned(1, None, True)
    assert client.pin([key(1)], 10, ttl=0, kind="none").pages == 1
    assert client.warm([key(1), key(2)], 10) == 1
    refused = client.pin([key(1)], 10, ttl=3600 * 24 * 365)
    assert refused.pages == 0 and refused.refused
    with pytest.raises(ValueError):
        client.pin([key(1)], 10, ttl=1, kind="firm")


def test_hints(client):
    client.put_from([key(1), key(2)], [payload(1), payload(2)], 10, position=0)
    keys = [key(1), key(2), key(3)]
    assert client.hint(keys, 10, generated=70) == 2
    assert client.hint(keys, 10, kind="retain", retain=60) == 2
    assert client.hint(keys, 10, kind="session-ended") == 2
    for wrong in ({"kind": "retain"}, {"kind": "demote", "retain": 1}, {"kind": "keep"}):
        with pytest.raises(ValueError):
            client.hint(keys, 10, **wrong)


def test_pages_may_have_token_ids(client):
    pages = [payload(1), payload(2)]
    with pytest.raises(ValueError, match="2 keys, but 1 lists of tokens"):
        client.put_from([key(1), key(2)], pages, 10, tokens=[[1]])
    with pytest.raises(OverflowError):
        client.put_from([key(1), key(2)], pages, 10, tokens=[[1], [-1]])
    # More than 256 are left out.
    assert client.put_from([key(1), key(2)], pages, 10, tokens=[[1, 2, 3], range(300)]) == ["stored"] * 2


def test_other_bytes_under_a_key_are_refused(client):
    assert client.put_from([key(1)], [payload(1)], 10) == ["stored"]
    assert client.put_from([key(1)], [payload(2)], 10) == ["refused"]
    assert client.put_from([key(2)], [payload(2)], 10, ttl=0.05) == ["stored"]
    eventually(lambda: client.exists([key(2)], 10) == [False])


def test_followed_page_arrives(client, url, namespace):
    writer = attach(url, namespace)
    pages = [bytearray(PAGE_BYTES), bytearray(PAGE_BYTES)]
    writing = threading.Timer(0.2, lambda: writer.put_from([key(1)], [payload(1)], 10))
    writing.start()
    assert client.follow([key(1)], [pages[0]], 20) == ["sealed"]
    assert pages[0] == payload(1)
    assert client.follow([key(2)], [pages[1]], 0.2) == ["miss"]
    writing.join()


def test_follow_without_memory_at_the_node_is_busy(crowded_node):
    """The others receive their pages."""
    small = larder_kv.Namespace(1000, identity="crowd")
    client, writer = attach(crowded_node.url(), small), attach(crowded_node.url(), small)
    keys = [key(number) for number in range(400)]
    pages = [bytearray(1000) for _ in keys]
    ends = []
    following = threading.Thread(target=lambda: ends.extend(client.follow(keys, pages, LONG)), daemon=True)
    following.start()
    eventually(lambda: client.stats()["gets_busy"])
    for number, k in enumerate(keys):
        assert writer.put_from([k], [payload(number, 1000)], PATIENCE) == ["stored"]
    following.join(PATIENCE)
    assert set(ends) == {"sealed", "busy"}
    for number, (page, end) in enumerate(zip(pages, ends)):
        assert end == "busy" or page == payload(number, 1000)
    assert client.stats()["gets_busy"] == client.stats()["get_misses"] == ends.count("busy")


def test_threads_share_a_client(client):
    """Two threads run at the same time, so calls release the GIL."""
    failures = []

    def work(first):
        try:
            for number in range(first, first + 40):
                page = bytearray(PAGE_BYTES)
                assert client.put_from([key(number)], [payload(number)], 30) == ["stored"]
                assert client.get_into([key(number)], [page], 30) == ["L2"]
                assert page == payload(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_waiting_call_lets_other_threads_run(client):
    page = bytearray(PAGE_BYTES)
    waiting = threading.Thread(target=client.follow, args=([key(1)], [page], PATIENCE))
    waiting.start()
    for _ in range(100):
        time.sleep(0.001)
        assert waiting.is_alive(), "this thread ran only when the call had ended"
    client.put_from([key(1)], [payload(1)], PATIENCE)
    waiting.join()
    assert page == payload(1)


def test_calls_of_an_event_loop(url, namespace):
    async def use():
        client = larder_kv.AsyncClient(url, namespace)
        assert await client.ready(60)
        keys = [key(number) for number in range(20)]
        puts = [client.put_from([k], [payload(n)], 30) for n, k in enumerate(keys)]
        assert await asyncio.gather(*puts) == [["stored"]] * 20
        pages = [bytearray(PAGE_BYTES) for _ in keys]
        gets = [client.get_into([k], [page], 30) for k, page in zip(keys, pages)]
        assert await asyncio.gather(*gets) == [["L2"]] * 20
        assert pages == [payload(n) for n in range(20)]
        assert await client.exists(keys, 10) == [True] * 20
        assert await client.locate(keys[:1], 10) == ["L2"]
        assert len(await client.lookup(keys, 10, hold=1)) == 20
        assert await client.warm(keys, 10) == 20
        assert (await client.pin(keys, 10, ttl=1)).pages == 20
        assert await client.forget(keys, 10) == (20, True)
        assert (await client.status(10))[0]["up"]
        with pytest.raises(ValueError):
            await client.get_into(keys, pages[:1], 1)
        assert client.stats()["puts"] == 20

    asyncio.run(use())
    asyncio.run(use())


def test_cancelled_call_returns_its_memory(url, namespace):
    """After the cancel nothing writes to the page, although its writer comes later."""

    async def use():
        client = larder_kv.AsyncClient(url, namespace)
        assert await client.ready(60)
        page = bytearray(PAGE_BYTES)
        following = asyncio.create_task(client.follow([key(1)], [page], 2 * PATIENCE))
        await asyncio.sleep(0.2)
        following.cancel()
        await asyncio.wait([following], timeout=PATIENCE)
        assert following.cancelled()
        client.sync.exists([], 1)
        page.append(1)  # Fails while anything holds the memory.
        assert await client.put_from([key(1)], [payload(1)], 10) == ["stored"]
        assert page == bytes(PAGE_BYTES + 1)[:-1] + b"\1"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.follow([key(2)], [bytearray(PAGE_BYTES)], PATIENCE), 0.1)

    asyncio.run(use())


def test_interrupted_call_returns_its_memory(url, namespace):
    """Ctrl-C ends a call that waits."""
    import _thread
    import signal

    # A shell starts background jobs without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client = attach(url, namespace)
    page = bytearray(PAGE_BYTES)
    threading.Timer(0.3, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        client.follow([key(1)], [page], 2 * PATIENCE)
    assert time.monotonic() - began < PATIENCE, "the call ended by its timeout"
    client.exists([], 1)
    page.append(1)


def test_pages_survive_a_restart_of_the_node(node: Node, namespace):
    client = attach(node.url(), namespace)
    assert client.put_from([key(1)], [payload(1)], 10) == ["stored"]
    # SIGTERM writes what is left to L3.
    node.stop()
    page = bytearray(PAGE_BYTES)
    assert client.get_into([key(1)], [page], 1) == [None]
    node.start()
    assert eventually(lambda: client.get_into([key(1)], [page], 10)[0]) == "L3"
    assert page == payload(1)
