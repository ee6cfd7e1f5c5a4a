#!/usr/bin/env python3
"""KV events of a store node, with libzmq and msgspec. Usage: kv_events_conformance.py STREAM REPLAYS REDIS

Each address is HOST:PORT. The Redis port makes the pages. The types below have the fields that vLLM and SGLang publish
in their own events, and msgspec fails if one is missing.
"""

import sys
import time
from typing import Optional, Union

import msgspec
import redis
import zmq

PATIENCE_MS = 60_000
END_OF_REPLAY = (1 << 64) - 1


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: Optional[str]


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Union[BlockStored, BlockRemoved, AllBlocksCleared]]
    data_parallel_rank: Optional[int] = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Index:
    """Pages that an indexer believes to be in L2."""

    def __init__(self):
        self.pages = set()
        self.last = None

    def apply(self, number, payload, steps=(1,)):
        assert self.last is None or number - self.last in steps, (self.last, number)
        self.last = number
        batch = DECODER.decode(payload)
        assert abs(batch.ts - time.time()) < 3600 and batch.data_parallel_rank == 0, batch
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.pages.clear()
            elif isinstance(event, BlockStored):
                assert event.medium == "CPU_PINNED" and event.token_ids == [], event
                self.pages.update(event.block_hashes)
            else:
                self.pages.difference_update(event.block_hashes)


def connect(context, kind, address):
    socket = context.socket(kind)
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        socket.setsockopt(option, PATIENCE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    # The node must answer heartbeats, or libzmq gives the connection up.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    socket.connect(f"tcp://{address}")
    return socket


def follow(socket, index, condition):
    """Applies batches until the condition holds."""
    while not condition():
        topic, number, payload = socket.recv_multipart()
        assert topic.startswith(b"kv@"), topic
        index.apply(int.from_bytes(number, "big"), payload)


def replay(socket, number):
    """The index that a replay leads to."""
    socket.send_multipart([b"", number.to_bytes(8, "big")])
    index = Index()
    while True:
        empty, number, payload = socket.recv_multipart()
        assert empty == b"", empty
        number = int.from_bytes(number, "big")
        if number == END_OF_REPLAY:
            assert payload == b"", payload
            return index
        # A message of a snapshot has the number of the batch before it.
        index.apply(number, payload, steps=(0, 1))


def main():
    stream, replays, server = sys.argv[1:]
    host, _, port = server.rpartition(":")
    client = redis.Redis(host=host, port=int(port), socket_timeout=PATIENCE_MS / 1000)
    context = zmq.Context()
    subscriber = connect(context, zmq.SUB, stream)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
    other = connect(context, zmq.SUB, stream)
    other.setsockopt(zmq.SUBSCRIBE, b"something else")
    index = Index()
    # libzmq subscribes in the background: the first pages may come too early.
    count = 0
    while subscriber.poll(50) == 0:
        client.set(f"early-{count}", b"x")
        count += 1
        assert count < 1000, "no event"
    follow(subscriber, index, lambda: len(index.pages) > 0)
    for number in range(300):
        client.set(f"key-{number}", b"x" * 100)
    follow(subscriber, index, lambda: len(index.pages) > 300)
    # Idle for many heartbeats: the connection must stay, or batches would be missing.
    time.sleep(1)
    client.delete(*[f"key-{number}" for number in range(300)])
    follow(subscriber, index, lambda: len(index.pages) < 10 + count)
    dealer = connect(context, zmq.DEALER, replays)
    for _ in range(1000):
        replayed = replay(dealer, 0)
        follow(subscriber, index, lambda: index.last >= replayed.last)
        if index.last == replayed.last:
            break
    assert index.last == replayed.last, "no end of events on an idle node"
    # The replay also has the pages from before the subscription.
    assert index.pages and index.pages <= replayed.pages, (index.pages, replayed.pages)
    assert replay(dealer, replayed.last + 1000).last is None
    assert other.poll(0) == 0, "another topic gets no batch"
    client.flushall()
    context.destroy(linger=0)
    print(f"KV events: {index.last + 1} batches agree")


main()
