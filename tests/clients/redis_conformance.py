"""Commands of a Redis client against a store node, with redis-py. Usage: redis_conformance.py HOST:PORT

With --reference the server is Redis itself, and steps that differ by design are left out.
"""

import argparse
import asyncio
import hashlib
import time

import redis
import redis.asyncio

MIB = 1 << 20


def value(seed, length):
    """Bytes that no other seed has."""
    block = hashlib.sha256(str(seed).encode()).digest()
    return (block * (length // len(block) + 1))[:length]


def error_of(call):
    """Text of the error that a call raises."""
    try:
        answer = call()
    except redis.RedisError as error:
        return str(error)
    raise AssertionError(f"no error but {answer!r}")


def strings(client):
    """Values of all lengths, and parts of them."""
    for length in (0, 1, 4095, 4096, 4097, 64 << 10, MIB, 2 * MIB, 2 * MIB + 1, 9 * MIB + 7):
        key = f"length-{length}"
        data = value(key, length)
        assert client.set(key, data) is True
        assert client.get(key) == data, length
        assert client.strlen(key) == length
        for start, end in ((0, 9), (-10, -1), (length // 2, length // 2 + 3 * MIB), (5, 2), (2 * MIB - 3, 2 * MIB + 3)):
            first = start if start >= 0 else max(length + start, 0)
            last = end if end >= 0 else length + end
            assert client.getrange(key, start, end) == data[first : last + 1], (length, start, end)
    keys = [f"length-{length}" for length in (0, 4096, MIB)]
    assert client.mget(keys + ["absent"]) == [value(key, int(key[7:])) for key in keys] + [None]
    assert client.get("absent") is None and client.strlen("absent") == 0 and client.getrange("absent", 0, 5) == b""
    binary = bytes(range(256))
    assert client.set(binary, b"\r\n\0") and client.get(binary) == b"\r\n\0"
    assert client.type("length-1") == b"string" and client.type("absent") == b"none"
    assert client.memory_usage("length-1048576") >= MIB and client.memory_usage("absent") is None


def overwrites(client):
    """SET replaces, with all its options."""
    for length in (3, 5000, 3 * MIB, 3, 70000):
        assert client.set("k", value(length, length)) is True
        assert client.get("k") == value(length, length)
    assert client.set("k", b"other", nx=True) is None and client.get("k") == value(70000, 70000)
    assert client.set("fresh", b"1", xx=True) is None and client.get("fresh") is None
    assert client.set("fresh", b"1", nx=True) is True and client.setnx("fresh", b"2") is False
    assert client.set("fresh", b"3", get=True) == b"1" and client.get("fresh") == b"3"
    assert client.set("unset", b"x", get=True) is None and client.get("unset") == b"x"
    assert client.set("k", value(70000, 70000)) is True, "equal bytes"


def times(client):
    """Expiry in all its forms."""
    assert client.set("t", b"1", ex=100) and 98 <= client.ttl("t") <= 100 and 98000 < client.pttl("t") <= 100_000
    assert client.set("t", b"2", keepttl=True) and client.ttl("t") > 90 and client.get("t") == b"2"
    assert client.persist("t") and client.ttl("t") == -1 and not client.persist("t") and client.ttl("absent") == -2
    assert client.expire("t", 50) and client.ttl("t") in (49, 50) and client.get("t") == b"2"
    assert not client.expire("absent", 50)
    assert client.set("t", b"3") and client.ttl("t") == -1, "a plain SET removes the time"
    assert client.execute_command("SETEX", "long", 1000, value("long", 100_000)) and client.ttl("long") > 900
    assert client.expire("long", 2000) and client.get("long") == value("long", 100_000) and client.ttl("long") > 1900
    assert client.execute_command("PSETEX", "soon", 150, b"x") and client.set("later", value("l", 5000), px=150)
    assert client.get("soon") == b"x" and client.exists("later")
    assert client.expire("t", -1) and client.get("t") is None
    assert client.set("past", b"x", exat=1) is True and client.get("past") is None
    time.sleep(0.3)
    assert client.get("soon") is None and client.get("later") is None and client.exists("later") == 0
    assert client.set("soon", b"y") and client.get("soon") == b"y", "an expired key is free"


def keys(client):
    """EXISTS, DEL, SCAN, DBSIZE and the databases."""
    client.flushdb()
    assert client.dbsize() == 0 and client.get("k") is None
    names = {f"scan:{index}".encode() for index in range(300)}
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.set(name, value(name, 5000 if name.endswith(b"7") else 10))
    assert pipeline.execute() == [True] * 300
    assert client.dbsize() == 300, client.dbsize()
    assert set(client.scan_iter()) == names and set(client.scan_iter(count=7)) == names
    assert set(client.scan_iter(match="scan:1?")) == {name for name in names if name[:6] == b"scan:1" and len(name) == 7}
    assert set(client.scan_iter(_type="hash")) == set()
    assert client.exists("scan:1", "scan:2", "scan:1", "absent") == 3
    assert client.delete("scan:1", "scan:2", "absent") == 2 and client.unlink("scan:7") == 1
    assert client.exists("scan:1", "scan:7") == 0 and client.dbsize() == 297
    time.sleep(1.5)
    # By now L3 has them.
    assert set(client.scan_iter(count=50)) == names - {b"scan:1", b"scan:2", b"scan:7"} and client.dbsize() == 297
    other = redis.Redis(connection_pool=client.connection_pool)
    connection = other.connection_pool.get_connection()
    try:
        send = lambda *words: (connection.send_command(*words), connection.read_response())[1]
        assert send("SELECT", 5) == b"OK" and send("DBSIZE") == 0 and send("SET", "a", "5") == b"OK"
        assert send("SELECT", 0) == b"OK" and send("GET", "a") is None
        assert send("SELECT", 5) == b"OK" and send("GET", "a") == b"5" and send("FLUSHDB") == b"OK" and send("DBSIZE") == 0
        assert send("SELECT", 0) == b"OK" and send("DBSIZE") == 297
    finally:
        other.connection_pool.release(connection)
    assert client.flushall() and client.dbsize() == 0 and list(client.scan_iter()) == []


def connection(client, reference):
    """Commands about the connection and the server, and errors."""
    assert client.ping() and client.echo("hello") == b"hello" and client.client_id() > 0
    assert client.client_setname("me") and client.client_getname() in (b"me", "me", None)
    assert client.config_get("databases") == {"databases": "16"} and "save" in client.config_get("*")
    assert client.info()["role"] == "master"
    assert client.command_count() > 30 and "get" in client.command()
    for call, text in (
        (lambda: client.execute_command("HSETX", "a", "b", "c"), "unknown command 'HSETX', with args beginning with: 'a' 'b' 'c' "),
        (lambda: client.execute_command("GET"), "wrong number of arguments for 'get' command"),
        (lambda: client.execute_command("SET", "a", "b", "EX", "0"), "invalid expire time in 'set' command"),
        (lambda: client.execute_command("SET", "a", "b", "NX", "XX"), "syntax error"),
        (lambda: client.execute_command("SETEX", "a", "x", "b"), "value is not an integer or out of range"),
        (lambda: client.execute_command("SELECT", "99"), "DB index is out of range"),
        (lambda: client.execute_command("CLIENT", "NOPE"), "unknown subcommand 'NOPE'. Try CLIENT HELP."),
    ):
        assert error_of(call) == text, (error_of(call), text)
    if not reference:
        assert "the key is longer than 1024 bytes" in error_of(lambda: client.get(b"k" * 1025))
        assert "the key is longer" in error_of(lambda: client.set(b"k" * 5000, b"x"))
        assert "unknown command 'LPUSH'" in error_of(lambda: client.lpush("a", "b"))
        assert "unknown command" in error_of(lambda: client.pipeline().set("a", "b").execute())
    assert client.ping(), "the connection goes on"


def pipelines(client):
    """Long values in a pipeline, in order."""
    pipeline = client.pipeline(transaction=False)
    for index in range(32):
        pipeline.set(f"p{index}", value(index, 100_000)).get(f"p{index}").exists(f"p{index}")
    assert pipeline.execute() == [item for index in range(32) for item in (True, value(index, 100_000), 1)]


async def concurrent(address, protocol):
    """Readers of a key that is replaced all the time get one of its values, whole."""
    host, port = address
    client = redis.asyncio.Redis(host=host, port=port, protocol=protocol)
    data = [value(index, length) for index, length in enumerate((10, 5000, 3 * MIB, 200_000))]
    await client.set("shared", data[0])
    done = False

    async def read():
        seen = set()
        while not done:
            got = await client.get("shared")
            assert got in data, None if got is None else len(got)
            seen.add(len(got))
        return seen

    readers = [asyncio.create_task(read()) for _ in range(4)]
    for index in range(60):
        await client.set("shared", data[index % 4])
    done = True
    seen = set.union(*[await reader for reader in readers])
    assert len(seen) > 1, seen
    await client.aclose()


def main():
    """Runs all steps with both protocols."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--reference", action="store_true")
    arguments = parser.parse_args()
    host, port = arguments.address.rsplit(":", 1)
    for protocol in (2, 3):
        client = redis.Redis(host=host, port=int(port), protocol=protocol, socket_timeout=60)
        client.flushall()
        for step in (strings, overwrites, times, pipelines, keys):
            step(client)
        connection(client, arguments.reference)
        asyncio.run(concurrent((host, int(port)), protocol))
        client.flushall()
        print(f"redis-py {redis.__version__}, RESP{protocol}: passed")


if __name__ == "__main__":
    main()
