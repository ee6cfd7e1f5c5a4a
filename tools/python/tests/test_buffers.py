"""Pages go through every kind of memory, and wrong memory is refused before a transfer begins."""

import ctypes
import gc
import mmap
import sys
import weakref

import larder_kv
import numpy
import pytest
from conftest import PAGE_BYTES, attach, key, payload


@pytest.fixture
def client(url, namespace):
    return attach(url, namespace)


class DlpackOnly:
    """An array without the buffer protocol, such as a tensor of torch."""

    def __init__(self, array, device=(1, 0)):
        self.array = array
        self.device = device

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def unaligned(size):
    return memoryview(bytearray(size + 3))[3:]


def pointer(size):
    array = numpy.zeros(size, numpy.uint8)
    return larder_kv.Pointer(array.ctypes.data, size, array), array


MEMORIES = {
    "bytearray": lambda: (lambda b: (b, b))(bytearray(PAGE_BYTES)),
    "unaligned": lambda: (lambda b: (b, b))(unaligned(PAGE_BYTES)),
    "ctypes": lambda: (lambda b: (b, b))((ctypes.c_char * PAGE_BYTES)()),
    "mmap": lambda: (lambda b: (b, b))(mmap.mmap(-1, PAGE_BYTES)),
    "numpy": lambda: (lambda b: (b, b))(numpy.zeros((2, PAGE_BYTES // 4), numpy.uint16)),
    "dlpack": lambda: (lambda a: (DlpackOnly(a), a))(numpy.zeros((4, PAGE_BYTES // 8), numpy.float16)),
    "pointer": lambda: pointer(PAGE_BYTES),
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_page_round_trips_through_memory(client, kind):
    written = payload(len(kind))
    source, seen = MEMORIES[kind]()
    memoryview(seen).cast("B")[:] = written
    assert client.put_from([key(1)], [source], 10) == ["stored"]
    assert client.put_from([key(1)], [source], 10) == ["already-there"]
    target, seen = MEMORIES[kind]()
    assert client.get_into([key(1)], [target], 10) == ["L2"]
    assert bytes(memoryview(seen).cast("B")) == written


def test_page_round_trips_through_shared_buffer(client):
    source = client.buffer(PAGE_BYTES)
    assert source.shared
    larder_kv.view(source)[:] = payload(3)
    assert client.put_from([key(1)], [source], 10) == ["stored"]
    target = client.buffer(PAGE_BYTES)
    assert client.get_into([key(1)], [target], 10) == ["L2"]
    view = larder_kv.view(target)
    del target
    gc.collect()
    assert view == payload(3), "a view keeps the memory of its buffer"


def test_parts_may_lie_apart(client):
    keys_memory, values_memory = numpy.zeros(PAGE_BYTES // 2, numpy.uint8), bytearray(PAGE_BYTES // 2)
    page = payload(4)
    keys_memory[:] = numpy.frombuffer(page[: PAGE_BYTES // 2], numpy.uint8)
    values_memory[:] = page[PAGE_BYTES // 2 :]
    assert client.put_from([key(1)], [[keys_memory, values_memory]], 10) == ["stored"]
    whole = bytearray(PAGE_BYTES)
    assert client.get_into([key(1)], [whole], 10) == ["L2"]
    assert whole == page
    parts = [bytearray(PAGE_BYTES // 2), numpy.zeros(PAGE_BYTES // 2, numpy.uint8)]
    missing = [bytearray(PAGE_BYTES // 2), bytearray(PAGE_BYTES // 2)]
    assert client.get_into([key(1), key(2)], [parts, missing], 10) == ["L2", None]
    assert bytes(parts[0]) + bytes(parts[1]) == page


def test_many_pages_in_one_call(client):
    pages = [payload(number) for number in range(100)]
    keys = [key(number) for number in range(100)]
    # These 20 MB and the pages that the node still writes to L3 share 32 MiB. Above that it answers "busy".
    assert client.put_from(keys, pages, 30, position=0, busy_retries=100) == ["stored"] * 100
    targets = [bytearray(PAGE_BYTES) for _ in keys]
    assert client.get_into([k.hex() for k in keys], targets, 30) == ["L2"] * 100
    assert targets == pages


def test_wrong_memory_is_refused(client):
    good = bytearray(PAGE_BYTES)
    strided = numpy.zeros((PAGE_BYTES, 2), numpy.uint8)[:, 0]
    for error, buffer in [
        (ValueError, bytearray(PAGE_BYTES - 1)),
        (ValueError, bytearray(PAGE_BYTES + 1)),
        (ValueError, bytearray(0)),
        (ValueError, [bytearray(PAGE_BYTES // 2)]),
        (ValueError, [bytearray(1), bytearray(PAGE_BYTES - 1)]),
        (BufferError, strided),
        (BufferError, DlpackOnly(strided)),
        (BufferError, DlpackOnly(numpy.zeros(PAGE_BYTES, numpy.uint8), device=(2, 0))),
        (TypeError, 7),
        (TypeError, "text"),
    ]:
        with pytest.raises(error):
            client.get_into([key(1)], [buffer], 1)
        with pytest.raises(error):
            client.put_from([key(1)], [buffer], 1)
    for readonly in [bytes(PAGE_BYTES), larder_kv.Pointer(1, PAGE_BYTES, readonly=True)]:
        with pytest.raises(BufferError):
            client.get_into([key(1)], [readonly], 1)
    with pytest.raises(ValueError, match="overlap"):
        client.get_into([key(1), key(2)], [good, good], 1)
    with pytest.raises(ValueError):
        client.get_into([key(1), key(2)], [good], 1)
    with pytest.raises(ValueError):
        larder_kv.Pointer(0, 1)


def test_wrong_arguments_are_refused(client, url, namespace):
    for bad in [b"short", "zz" * 32, "ab" * 31]:
        with pytest.raises(ValueError):
            client.exists([bad], 1)
    with pytest.raises(TypeError):
        client.exists([7], 1)
    for timeout in [-1, float("nan"), float("inf"), 1e9]:
        with pytest.raises(ValueError):
            client.exists([key(1)], timeout)
    for bad in ["redis://127.0.0.1:1", "larder://", ""]:
        with pytest.raises(ValueError, match="LRD0301"):
            larder_kv.Client(bad, namespace)
    for size, parts in [(0, 1), (5, 2), (17 << 20, 1), (1024, 129)]:
        with pytest.raises(ValueError):
            larder_kv.Namespace(size, parts=parts, identity="x")
    with pytest.raises(ValueError):
        client.buffer(0)


def test_namespaces_differ_in_every_field():
    base = dict(page_bytes=4096, parts=1, identity="a", tenant="t")
    others = [dict(base, **change) for change in
              [{"page_bytes": 8192}, {"parts": 2}, {"identity": "b"}, {"tenant": "u"}]]
    ids = {larder_kv.Namespace(**fields).id for fields in [base, *others]}
    assert len(ids) == 5
    assert larder_kv.Namespace(model="m", **base).id == larder_kv.Namespace(**base).id
    versions = ["", "step-1", "step-2"]
    assert len({larder_kv.Namespace(weights_version=version, **base).id for version in versions}) == 3
    assert larder_kv.Namespace(weights_version="", **base).id == larder_kv.Namespace(**base).id
    with pytest.raises(ValueError):
        larder_kv.Namespace(weights_version="v" * 256, **base)


def test_memory_is_released_after_the_call(client):
    class Page(bytearray):
        pass

    page = Page(payload(5))
    before = sys.getrefcount(page)
    gone = weakref.ref(page)
    for _ in range(5):
        client.put_from([key(5)], [page], 10)
        client.get_into([key(5)], [page], 10)
    client.exists([], 1)
    assert sys.getrefcount(page) == before
    del page
    assert gone() is None


def test_exported_memory_cannot_move_during_a_call(client):
    # The view that a call holds must have ended: a bytearray with exports cannot be resized.
    page = bytearray(PAGE_BYTES)
    client.get_into([key(404)], [page], 10)
    client.exists([], 1)
    page.append(1)
