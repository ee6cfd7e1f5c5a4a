"""Values of any length, over a real node."""

import random
import threading
import time

import pytest
from conftest import eventually, is_durable, noted_timeouts

from larder_kv import Client, Namespace
from larder_kv._values import HEAD_BYTES, PIECE_BYTES, Head, Memory, Values, Workers, pieces

LARGE, SMALL = PIECE_BYTES
LENGTHS = [1, SMALL - 1, SMALL, SMALL + 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 2 * SMALL + 7]


def attach(node, **identity):
    values = Values(node.url(), {"model": "m", **identity}, tenant="default", name="test")
    assert values.head_client.ready(30) and all(client.ready(30) for client in values.clients.values())
    return values


def deadline(seconds=20.0):
    return time.monotonic() + seconds


def key(number):
    return bytes([number]) * 32


def content(seed, length):
    return random.Random(seed).randbytes(length)


def put(values, keys, contents, layout="plain"):
    return values.put(keys, [Memory(each, len(each)) for each in contents], [layout] * len(keys), deadline())


def get(values, keys, seconds=20.0):
    """Reads values, in memory with guards after them."""
    end = deadline(seconds)
    heads = values.heads(keys, end)
    memory = [None if head is None else bytearray(b"\x5a" * (head.length + 64)) for head in heads]
    targets = [None if each is None else Memory(each, len(each) - 64) for each in memory]
    read = values.get(keys, heads, targets, end)
    for each in memory:
        assert each is None or each[-64:] == b"\x5a" * 64
    return [bytes(each[:-64]) if is_read else None for each, is_read in zip(memory, read)]


def test_another_client_reads_values_of_all_lengths(shared_node):
    writer, reader = (attach(shared_node, test="lengths") for _ in range(2))
    keys, contents = [key(n) for n in range(len(LENGTHS))], [content(n, length) for n, length in enumerate(LENGTHS)]
    assert put(writer, keys, contents) == [True] * len(keys)
    assert get(reader, keys) == contents
    found, lookups = reader.find([*keys, key(99)], deadline(), hold=5)
    assert found == [True] * len(keys) + [False] and sum(map(len, lookups)) > len(keys)
    assert [head.layout for head in reader.heads(keys, deadline())] == ["plain"] * len(keys)


def test_other_identities_share_nothing(shared_node):
    writer, other = attach(shared_node, test="one"), attach(shared_node, test="two")
    assert put(writer, [key(1)], [b"abc"]) == [True]
    assert other.find([key(1)], deadline())[0] == [False]


def test_pieces_cover_a_value_once():
    for length in LENGTHS:
        batches = pieces([key(1)], [Head(length, "n", None)])
        ranges = sorted((start, end) for batch in batches for _, start, end in batch.places)
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])] and ranges[-1][1] == length
        names = [name for batch in batches for name in batch.keys]
        assert len(set(names)) == len(names)


def test_a_value_without_all_its_pieces_is_a_miss_and_can_be_written_again(shared_node):
    first, second = (attach(shared_node, test="broken") for _ in range(2))
    old, new = content(1, 2 * LARGE + 5), content(2, LARGE + 9)
    assert put(first, [key(1)], [old]) == [True]
    assert get(second, [key(1)]) == [old]
    (lost, _) = pieces([key(1)], first.heads([key(1)], deadline()))
    assert first.clients[LARGE].forget(lost.keys[:1], 20).complete
    assert get(second, [key(1)]) == [None]
    assert second.find([key(1)], deadline())[0] == [False]
    assert put(second, [key(1)], [new]) == [True]
    assert get(second, [key(1)]) == [new]
    # The first client still knows the old head: a miss drops it.
    assert get(first, [key(1)]) == [None]
    assert get(first, [key(1)]) == [new]


def test_two_writers_of_a_key_never_mix(shared_node):
    first, second, reader = (attach(shared_node, test="writers") for _ in range(3))
    mine, other = content(1, 2 * LARGE), content(2, 3 * LARGE)
    head = Head(len(other), "second", "plain")
    # The second writer has written its pieces, and then the first ends first.
    assert second.put_pieces([key(1)], [head], [Memory(other, len(other))], deadline()) == [True]
    assert reader.find([key(1)], deadline())[0] == [False]
    assert put(first, [key(1)], [mine]) == [True]
    stored = [False]
    second.put_heads([key(1)], [head], [True], stored, deadline())
    assert stored == [True]
    assert get(reader, [key(1)]) == [mine] and get(second, [key(1)]) == [mine]
    assert put(second, [key(1)], [other]) == [True] and get(reader, [key(1)]) == [mine]


def test_a_value_with_a_lost_piece_is_not_visible(shared_node):
    writer, reader = attach(shared_node, test="lost"), attach(shared_node, test="lost")
    writer.clients[LARGE] = Client("larder://127.0.0.1:1", Namespace(LARGE, identity="lost"), memory_bytes=0)
    assert put(writer, [key(1), key(2)], [content(1, LARGE), b"abc"]) == [False, True]
    assert [head is None for head in reader.heads([key(1), key(2)], deadline())] == [True, False]


def test_a_deleted_value_is_a_miss(shared_node):
    values = attach(shared_node, test="delete")
    assert put(values, [key(1), key(2)], [b"abc", b"defg"]) == [True, True]
    assert values.delete([key(1), key(3)], deadline()) == [3, None]
    assert get(attach(shared_node, test="delete"), [key(1), key(2)]) == [None, b"defg"]


@pytest.mark.parametrize("page", [b"", b"no json", b"[1]", b'[0, "n", 0]', b'["1", "n", 0]', b'[99999999999, "n", 0]'])
def test_a_head_that_is_none_is_a_miss(page):
    assert Head.decode(page.ljust(HEAD_BYTES)) is None


def test_a_layout_that_is_too_long_is_not_stored(shared_node):
    values = attach(shared_node, test="layout")
    assert put(values, [key(1)], [b"abc"], layout="x" * HEAD_BYTES) == [False]


def test_memory_shorter_than_a_value_is_refused(shared_node):
    values = attach(shared_node, test="short")
    assert put(values, [key(1)], [b"abc"]) == [True]
    heads = values.heads([key(1)], deadline())
    with pytest.raises(ValueError, match="memory of 2 bytes for a value of 3"):
        values.get([key(1)], heads, [Memory(bytearray(2), 2)], deadline())


def test_values_survive_kill_and_calls_to_a_dead_store_end(node):
    values, contents = attach(node, test="kill"), [content(1, LARGE + 3), b"abc"]
    keys = [key(1), key(2)]
    assert put(values, keys, contents) == [True, True]
    assert get(values, keys) == contents
    assert eventually(lambda: is_durable(values.head_client))
    timeouts = noted_timeouts(values.head_client, *values.clients.values())
    node.kill()
    assert get(values, keys, 1.0) == [None, None] and values.find(keys, deadline(1.0))[0] == [False, False]
    assert values.put([key(3)], [Memory(b"abc", 3)], [0], deadline(1.0)) == [False]
    assert values.delete([key(1)], deadline(1.0)) == [None]
    assert timeouts and max(timeouts) <= 1
    node.start()
    assert eventually(lambda: get(values, keys) == contents)
    assert get(attach(node, test="kill"), keys) == contents


def test_calls_to_a_paused_store_end_by_their_deadline(node):
    values = attach(node, test="pause")
    assert put(values, [key(1)], [content(1, LARGE)]) == [True]
    timeouts = noted_timeouts(values.head_client, *values.clients.values())
    node.pause()
    try:
        assert get(values, [key(1)], 0.5) == [None]
        assert values.find([key(1)], deadline(0.5))[0] == [False]
        assert values.put([key(2)], [Memory(b"abc", 3)], [0], deadline(0.5)) == [False]
        assert timeouts and max(timeouts) <= 0.5
    finally:
        node.resume()
    assert eventually(lambda: get(values, [key(1)]) == [content(1, LARGE)])


def test_close_waits_until_no_transfer_reads_the_memory(shared_node):
    values = attach(shared_node, test="close")
    assert put(values, [key(1)], [content(1, LARGE)]) == [True]
    values.close()
    assert not len(values.reading)
    held = Memory(bytearray(LARGE), LARGE)
    assert values.put([key(2)], [held], [0], deadline()) == [True]
    with pytest.raises(RuntimeError, match="still reads"):
        values.close()


def test_workers_refuse_calls_beyond_their_bound():
    go, workers = threading.Event(), Workers("test", 1, 2)
    first, second = workers.submit(go.wait, 20), workers.submit(lambda: 7)
    assert workers.submit(lambda: 8) is None
    go.set()
    assert first.result(20) and second.result(20) == 7
    assert eventually(lambda: workers.submit(lambda: 9)).result(20) == 9
    workers.close()
    assert workers.submit(lambda: 10) is None
