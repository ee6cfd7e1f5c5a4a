"""The judge of `tests/clients/NAME --chaos` fails runs that it must fail, and its proxy cuts."""

import pathlib
import socket
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/clients"))

import chaos  # noqa: E402


def report_of(*problems, hits=1):
    load = chaos.Load({"get": 5})
    load.count("hits", hits)
    for problem in problems:
        load.problem(problem)
    return load.report()


def test_hits_without_problems_pass():
    assert chaos.judge("engine", report_of()) == []


def test_a_problem_fails_the_run():
    (failure,) = chaos.judge("engine", report_of("object 3 has wrong bytes"))
    assert "object 3 has wrong bytes" in failure


def test_a_run_without_hits_fails():
    assert chaos.judge("engine", report_of(hits=0)) == ["engine: no hit during the faults"]


def test_a_call_beyond_its_deadline_is_a_problem(monkeypatch):
    load = chaos.Load({"get": 5})
    for seconds, count in ((5 + chaos.ALLOWANCE_SECONDS - 0.1, 0), (5 + chaos.ALLOWANCE_SECONDS + 0.1, 1)):
        times = iter((100.0, 100.0 + seconds))
        monkeypatch.setattr(chaos.time, "monotonic", lambda: next(times))
        assert load.call("get", lambda: "answer") == "answer"
        assert len(load.problems) == count


def test_hits_that_do_not_come_back_are_a_problem(monkeypatch):
    monkeypatch.setattr(chaos, "RECOVERY_SECONDS", 0)
    load = chaos.Load({})
    load.recover(lambda: False)
    assert "no hits" in load.problems[0]


@pytest.fixture
def echo():
    """Address of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()
            except OSError:
                return

    def answer(connection):
        try:
            while data := connection.recv(1024):
                received.append(data)
                connection.sendall(data)
        except OSError:
            pass

    received = []
    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", received
    listener.close()


def connect(proxy):
    host, port = proxy.address.split(":")
    connection = socket.create_connection((host, int(port)), 30)
    connection.sendall(b"first")
    assert connection.recv(1024) == b"first"
    return connection


def is_silent(connection):
    connection.settimeout(0.3)
    try:
        return not connection.recv(1024)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(30)


@pytest.mark.parametrize("mode", ["stall", "one-way"])
def test_a_cut_holds_bytes_back_and_delivers_them_later(echo, mode):
    address, received = echo
    proxy = chaos.Proxy(address)
    connection = connect(proxy)
    proxy.set(mode)
    connection.sendall(b"second")
    assert is_silent(connection)
    deadline = time.monotonic() + 30
    while mode == "one-way" and b"second" not in received and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (b"second" in received) == (mode == "one-way")
    proxy.set("pass")
    assert connection.recv(1024) == b"second"


def test_a_reset_ends_connections_and_refuses_new_ones(echo):
    proxy = chaos.Proxy(echo[0])
    connection = connect(proxy)
    proxy.set("reset")
    with pytest.raises((ConnectionError, AssertionError)):
        connection.sendall(b"second")
        assert connection.recv(1024) == b"second"
    with pytest.raises((ConnectionError, AssertionError)):
        connect(proxy)
    proxy.set("pass")
    connect(proxy)
