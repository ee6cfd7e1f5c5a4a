"""A store that is away is a miss within the deadline. Dead and forked processes leave nothing behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import larder_kv
import pytest
from conftest import PAGE_BYTES, Node, attach, eventually, key, payload, where_threads_wait, within

# A second for a page whose verification has begun, and three for a busy machine. A client abandons a silent node after 5
# seconds, so a longer grace would not notice a call without a timeout.
GRACE_SECONDS = 4.0


def calls(client, timeout):
    """Every call, with the answer of a store that is away."""
    pages = [bytearray(PAGE_BYTES), bytearray(PAGE_BYTES)]
    keys = [key(1), key(2)]
    return [
        (lambda: client.exists(keys, timeout), [False, False]),
        (lambda: client.locate(keys, timeout), [None, None]),
        (lambda: len(client.lookup(keys, timeout, hold=1)), 0),
        (lambda: client.get_into(keys, pages, timeout), [None, None]),
        (lambda: client.get_into(keys, [[p[: PAGE_BYTES // 2], p[PAGE_BYTES // 2 :]] for p in pages], timeout),
         [None, None]),
        (lambda: client.put_from(keys, pages, timeout), ["lost", "lost"]),
        (lambda: client.follow(keys, pages, timeout), ["miss", "miss"]),
        (lambda: client.pin(keys, timeout, ttl=1).complete, False),
        (lambda: client.warm(keys, timeout), 0),
        (lambda: client.forget(keys, timeout).complete, False),
        (lambda: client.status(timeout)[0]["status"], None),
    ]


def check_away(client, timeout):
    for call, expected in calls(client, timeout):
        with within(timeout + GRACE_SECONDS):
            assert call() == expected


def test_absent_store_is_a_miss(namespace):
    client = larder_kv.Client("larder://127.0.0.1:9", namespace)
    assert client.ready(0.2) is False and client.nodes_connected == 0
    check_away(client, 0.5)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_paused_store_is_a_miss_until_it_resumes(node: Node, namespace, transport):
    client = attach(node.url(transport), namespace)
    assert client.put_from([key(1)], [payload(1)], 10) == ["stored"]
    node.pause()
    check_away(client, 0.5)
    node.resume()
    page = bytearray(PAGE_BYTES)
    assert eventually(lambda: client.get_into([key(1)], [page], 5)[0])
    assert page == payload(1)


def test_put_to_a_paused_store_keeps_its_memory(node: Node, namespace):
    """The deadline ends the wait. Bytes that may still be sent stay, and the owner is free later."""
    client = attach(node.url("tcp"), namespace)
    node.pause()
    pages = [bytearray(payload(number)) for number in range(100)]
    with within(0.5 + GRACE_SECONDS):
        assert client.put_from([key(number) for number in range(100)], pages, 0.5) == ["lost"] * 100

    def is_free():
        client.exists([], 1)
        try:
            for page in pages:
                page.append(1)
                page.pop()
        except BufferError:
            return False
        return True

    assert not is_free(), "the connection still has bytes to send"
    node.resume()
    eventually(is_free)


def test_killed_store_is_a_miss_until_it_returns(node: Node, namespace):
    client = attach(node.url(), namespace)
    assert client.put_from([key(1)], [payload(1)], 10) == ["stored"]
    node.kill()
    check_away(client, 0.5)
    node.start()
    assert eventually(lambda: client.put_from([key(2)], [payload(2)], 5) == ["stored"])


def test_get_of_pages_in_parts_goes_on_while_pages_arrive(tmp_path, namespace):
    node = Node(tmp_path, "--connection-outstanding-limit", "1MiB")
    try:
        client = attach(node.url("tcp") + "&connections=1", namespace)
        keys = [key(number) for number in range(30)]
        for number in range(30):
            assert client.put_from(keys[number : number + 1], [payload(number)], 10) == ["stored"]
        halves = [(bytearray(PAGE_BYTES // 2), bytearray(PAGE_BYTES // 2)) for _ in keys]
        # The node admits a few pages at a time.
        assert client.get_into(keys, halves, 30) == ["L2"] * 30
        assert [first + second for first, second in halves] == [payload(number) for number in range(30)]
    finally:
        node.stop()


def child(script, *arguments):
    """Starts a Python process with `script`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.path.dirname(__file__),
        start_new_session=True,
    )


def session_of(process):
    """Processes of the session that `process` leads: itself and its forked children."""
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name of the program may contain anything, but no later field does.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if fields[3] == str(process.pid):
                yield int(directory.name)


def output(process, seconds):
    """What the process prints until it ends. Ends its whole session, and tells where it waited, if that is late."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        waits = "\n".join(where_threads_wait(pid) for pid in session_of(process))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise AssertionError(f"no end within {seconds} seconds:\n{waits}") from None


def is_idle(status):
    budget = status["budget"]
    in_flight = [budget[kind]["bytes"] for kind in ("puts", "reads", "outstanding")]
    return in_flight == [0, 0, 0] and status["puts_open"] == status["readers_waiting"] == budget["writers_waiting"] == 0


def observe(node, namespace):
    """A client that has all its connections at once, so that it does not change the node's count later."""
    return attach(node.url("tcp") + "&connections=1", namespace)


def connections(client):
    return client.status(10)[0]["status"]["budget"]["connections"]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_killed_client_leaves_nothing_in_the_node(node: Node, namespace, transport):
    observer = observe(node, namespace)
    before = connections(observer)
    writer = child(
        """
        import sys, larder_kv
        from conftest import PAGE_BYTES, attach, key, payload
        namespace = larder_kv.Namespace(PAGE_BYTES, parts=2, identity="killed")
        client = attach(sys.argv[1], namespace)
        source = client.buffer(PAGE_BYTES)
        print("putting", flush=True)
        number = 0
        while True:
            keys = [key(number + at) for at in range(200)]
            client.put_from(keys, [payload(1)] * 100 + [source] * 100, 10)
            client.lookup(keys, 10, hold=60)
            number += 200
        """,
        node.url(transport),
    )
    assert writer.stdout.readline() == "putting\n"
    time.sleep(0.5)
    assert connections(observer) > before
    writer.kill()
    writer.wait()
    writer.stdout.close()
    eventually(lambda: connections(observer) == before and is_idle(observer.status(10)[0]["status"]))


FORKING = """
    import os, sys, time, larder_kv
    from conftest import PAGE_BYTES, attach, join, key, payload
    namespace = larder_kv.Namespace(PAGE_BYTES, parts=2, identity="forked")
    client = attach(sys.argv[1], namespace)
    buffer = client.buffer(PAGE_BYTES)
    lease = client.lookup([key(1)], 10, hold=60)
    assert client.put_from([key(1)], [payload(1)], 10) == ["stored"]
    pid = os.fork()
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_forked_child_attaches_anew(node: Node, transport):
    process = child(
        FORKING
        + """
    if pid == 0:
        page = bytearray(PAGE_BYTES)
        assert client.ready(30)
        assert client.get_into([key(1)], [page], 10) == ["L2"] and page == payload(1)
        assert client.put_from([key(2)], [payload(2)], 10) == ["stored"]
        try:
            client.put_from([key(3)], [buffer], 10)
        except ValueError:
            pass
        else:
            sys.exit("a buffer of the parent was accepted")
        del lease, buffer, client
        sys.exit(0)
    join(pid, "the child")
    page = bytearray(PAGE_BYTES)
    assert client.get_into([key(2)], [page], 10) == ["L2"] and page == payload(2)
    print("done", flush=True)
        """,
        node.url(transport),
    )
    assert output(process, 120) == "done\n" and process.returncode == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_child_does_not_keep_its_parents_connections(node: Node, namespace, transport):
    observer = observe(node, namespace)
    before = connections(observer)
    process = child(
        FORKING
        + """
    if pid == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
        """,
        node.url(transport),
    )
    survivor = int(process.stdout.readline().split()[1])
    try:
        assert connections(observer) > before
        process.kill()
        process.wait()
        eventually(lambda: connections(observer) == before, seconds=10)
    finally:
        os.kill(survivor, signal.SIGKILL)
        process.stdout.close()


START = """
    import os, sys, threading, traceback, larder_kv
    from conftest import PAGE_BYTES, eventually, join, sockets
    namespace = larder_kv.Namespace(PAGE_BYTES, parts=2, identity="forks")
    # Starts the runtime, which keeps a pair of sockets.
    larder_kv.Client("larder://127.0.0.1:9", namespace).ready(0.2)
    before = sockets()
"""


def test_child_closes_a_socket_that_was_connecting():
    # A listener whose queue is full does not answer.
    with socket.socket() as listener, contextlib.ExitStack() as queue:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        process = child(
            START
            + """
    client = larder_kv.Client(sys.argv[1], namespace, connect_timeout=60)
    syn_sent = lambda: {line.split()[9] for line in open("/proc/self/net/tcp") if line.split()[3] == "02"}
    eventually(lambda: (sockets() - before) & syn_sent())
    pid = os.fork()
    if pid == 0:
        os._exit(len(sockets() - before))
    join(pid, "the child, by its sockets of the parent")
            """,
            f"larder://127.0.0.1:{listener.getsockname()[1]}",
        )
        assert output(process, 120) == "" and process.returncode == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_forks_while_connections_come_and_go(shared_node: Node, transport):
    process = child(
        START
        + """
    def come_and_go():
        while True:
            assert larder_kv.Client(sys.argv[1], namespace, memory_bytes=0).ready(60)
    for _ in range(4):
        threading.Thread(target=come_and_go, daemon=True).start()
    def in_child(number):
        if sockets() - before:
            return SOCKETS
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0)
        join(grandchild, "the grandchild")
        if number % 20 == 0 and not larder_kv.Client(sys.argv[1], namespace).ready(30):
            return NOT_READY
        return 0
    SOCKETS, NOT_READY, RAISED = 2, 3, 4
    for number in range(300):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(in_child(number))
            except BaseException:
                traceback.print_exc()
                os._exit(RAISED)
        join(pid, f"fork {number}")
    print("done", flush=True)
    os._exit(0)
        """,
        shared_node.url(transport),
    )
    assert output(process, 180) == "done\n"


def test_interpreter_ends_while_transfers_run(node: Node):
    """A process ends at once although a thread and a task still wait."""
    process = child(
        """
        import asyncio, sys, threading, larder_kv
        from conftest import PAGE_BYTES, attach, key
        namespace = larder_kv.Namespace(PAGE_BYTES, parts=2, identity="ends")
        client = attach(sys.argv[1], namespace)
        waits = lambda: client.follow([key(1)], [bytearray(PAGE_BYTES)], 3600)
        threading.Thread(target=waits, daemon=True).start()
        other = larder_kv.AsyncClient(sys.argv[1], namespace)
        async def leave():
            loop = other._current()
            other._native.follow([key(2)], [bytearray(PAGE_BYTES)], 3600, queue=loop.completions)
            await asyncio.sleep(0.2)
        asyncio.run(leave())
        print("done", flush=True)
        """,
        node.url(),
    )
    assert output(process, 120) == "done\n"
    assert process.returncode == 0
