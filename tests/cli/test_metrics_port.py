"""The port of `aiogpu start --metrics`, which every user of the machine reaches."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

import aiogpu
from aiogpu.observe.metrics import MetricsServer, Seen
from aiogpu.observe.metrics_server import LIMIT, MOST, HttpServer
from aiogpu.observe.status import NodeStatus
from tests.cli.sandbox import Sandbox
from tests.contract import tasks

HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
FLOOD = 4000
SECONDS = 30


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def half_requests(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent a half request each, or try to connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 200
    if hard < needed:
        pytest.skip(f"this process may have {hard} descriptors open, not {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        for client in clients:
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", port))
            with suppress(OSError):
                client.send(HALF)
        yield clients


def fetch(port: int, host: str | None = None) -> tuple[int, str]:
    """Fetch the metrics; return status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.putrequest("GET", "/metrics", skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.either_loop
async def test_half_requests_do_not_stop_a_service(sandbox: Sandbox) -> None:
    port = free_port()
    sandbox.run("start", "--head", "--num-cpus=2", f"--metrics={port}")
    assert sandbox.node is not None
    node = psutil.Process(sandbox.node.pid)
    threads, descriptors = node.num_threads(), node.num_fds()
    with half_requests(port, FLOOD):
        async with aiogpu.init(address=sandbox.place.socket):
            assert await tasks.add.remote(1, 2) == 3
        sandbox.run("status")
        assert node.num_threads() <= threads + MOST + 2
        assert node.num_fds() <= descriptors + MOST + 20
        status, text = fetch(port)
        assert (status, "aiogpu_tasks_waiting 0.0" in text) == (200, True)
    out, _ = sandbox.run("stop")
    assert out.startswith("Stopped the node")
    log = Path(sandbox.place.logs, "node.log").read_text()
    assert "Traceback" not in log, log


def answer(_environ: object, start: object) -> list[bytes]:
    start("200 OK", [])  # type: ignore[operator]
    return [b"answered"]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    before = threading.active_count()
    server = HttpServer(0, answer)
    yield server
    server.close()
    assert threading.active_count() == before, "its threads have ended"


def test_a_request_is_answered_among_half_requests(server: HttpServer) -> None:
    port = server.server_port
    with half_requests(port, 500):
        for _ in range(10):
            assert fetch(port) == (200, "answered")
        assert threading.active_count() <= MOST + 10


def test_a_half_request_is_ended(server: HttpServer) -> None:
    """Also one that goes on a byte at a time."""
    port = server.server_port
    begun = time.monotonic()
    spent = time.process_time()
    with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
        client.sendall(HALF)
        while True:
            with suppress(TimeoutError):
                if not client.recv(100):
                    break
            with suppress(OSError):
                client.sendall(b"X")
    assert LIMIT - 1 < time.monotonic() - begun < LIMIT + SECONDS
    assert time.process_time() - spent < 1, "it waits, and does not try for ever"


def test_no_descriptors_left_costs_no_core(server: HttpServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        with ExitStack() as stack:
            for _ in range(highest):
                descriptor = os.open("/dev/null", os.O_RDONLY)
                stack.callback(os.close, descriptor)
                if descriptor > highest:
                    break
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            client.connect(("127.0.0.1", server.server_port))
            client.sendall(HALF)
            client.settimeout(1)
            spent = time.process_time()
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert time.process_time() - spent < 0.3
        client.settimeout(SECONDS)
        client.sendall(b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (None, 200),
        ("localhost", 200),
        ("localhost:9464", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:9464", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example@localhost.evil", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_foreign_hosts_are_refused(
    server: HttpServer, host: str | None, status: int
) -> None:
    """A web page whose name was made to resolve to this machine reads no metrics."""
    found, text = fetch(server.server_port, host)
    assert found == status
    assert ("answered" in text) == (status == 200)


def test_a_close_waits_for_an_answer_and_leaves_no_thread() -> None:
    before = threading.active_count()
    entered, passed = threading.Event(), threading.Event()

    def see() -> Seen:
        entered.set()
        assert passed.wait(SECONDS)
        return Seen(NodeStatus({}, {}, (), (), (), 0, (), 0, None), {"finished": 1})

    server = MetricsServer(0, see)
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as client:
        client.sendall(HALF + b"\r\n")
        assert entered.wait(SECONDS)
        closing = threading.Thread(target=server.close)
        closing.start()
        passed.set()
        closing.join(SECONDS)
        assert not closing.is_alive()
        assert client.recv(1000).startswith(b"HTTP/1.0 200 OK")
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{server.port}", timeout=SECONDS)
