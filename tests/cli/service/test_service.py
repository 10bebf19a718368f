"""A node's life around the node: its socket, its end, and who is told of them."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.daemon import process as service_module
from aiogpu.daemon.place import PidfileLock, Place, living_node
from aiogpu.daemon.process import Plan, Service, bind, drain_seconds
from aiogpu.daemon.readiness import Notifier, Ready
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import DeviceError, NodeClosedError, NodeStartError
from tests.cli.service.paper_node import PaperNode
from tests.support.until import until

pytestmark = pytest.mark.either_loop


@pytest.fixture
def place() -> Iterator[Place]:
    """A short one: sockets have no long names."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as directory:
        place = Place.at(f"{directory}/node.sock")
        place.prepare()
        yield place


@pytest.fixture
def lock(place: Place) -> Iterator[PidfileLock]:
    lock = PidfileLock.take(place)
    yield lock
    lock.release()


class Life:
    """A service that runs.

    Attributes:
        said: by the service manager's socket.
        ready: what it has said when it was.
    """

    def __init__(self, place: Place, lock: PidfileLock, notifier: Notifier) -> None:
        self.ready: Ready | None = None
        self.node = PaperNode(NodeOptions())
        plan = Plan(NodeOptions(), place, drain=7)
        self.service = Service(plan, notifier, lambda *_: self.node)
        self._lock = lock
        self.running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.running = asyncio.create_task(self.service.run(self._lock, self._on_ready))

    def _on_ready(self, ready: Ready) -> None:
        self.ready = ready

    async def end(self) -> None:
        assert self.running is not None
        await asyncio.wait_for(self.running, 20)


@pytest.fixture
def life(place: Place, lock: PidfileLock) -> Life:
    return Life(place, lock, Notifier())


async def test_it_is_met_when_it_is_ready(life: Life, place: Place) -> None:
    life.begin()
    await until(lambda: life.ready)
    assert life.ready == (
        os.getpid(),
        {"CPU": 2.0, "GPU": 1.0},
        place.socket,
        place.logs,
    )
    found = living_node(place.pidfile)
    assert found is not None
    assert (found.pid, found.drain, found.ends_within) == (os.getpid(), 7, 22)
    assert os.stat(place.socket).st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.socket)
    life.service.ask_to_stop("SIGTERM")
    await life.end()
    assert life.node.asked == ["open", "serve", "drain 7", "close"]
    assert life.node.logs == place.logs
    assert sorted(os.listdir(os.path.dirname(place.socket))) == ["logs", "node.pid"]


async def test_nobody_comes_in_before_it_is_open(life: Life, place: Place) -> None:
    life.node.may_open.clear()
    life.begin()
    await until(lambda: life.node.asked)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionError):
        client.connect(place.socket)
    life.node.may_open.set()
    await until(lambda: life.ready)
    life.service.ask_to_stop("SIGTERM")
    await life.end()


async def test_asked_twice_it_ends_at_once(life: Life) -> None:
    life.node.may_drain.clear()
    life.begin()
    await until(lambda: life.ready)
    life.service.ask_to_stop("SIGINT")
    await until(lambda: "drain 7" in life.node.asked)
    life.service.hang_up()
    assert "force_close" not in life.node.asked, (
        "a terminal that goes asks for nothing more"
    )
    life.service.ask_to_stop("SIGINT")
    life.service.ask_to_stop("SIGINT")
    await life.end()
    assert life.node.asked[2:] == ["drain 7", "force_close", "close"]


async def test_a_terminal_that_goes_asks_it_to_end(life: Life) -> None:
    life.begin()
    await until(lambda: life.ready)
    life.service.hang_up()
    await life.end()


async def test_asked_before_it_is_open(life: Life, place: Place) -> None:
    life.node.may_open.clear()
    life.begin()
    await until(lambda: life.node.asked)
    life.service.ask_to_stop("SIGTERM")
    with pytest.raises(NodeClosedError, match="before it was ready"):
        await life.end()
    assert life.node.asked == ["open", "close"]
    assert not os.path.exists(place.socket)


async def test_it_cannot_open(life: Life, place: Place) -> None:
    life.node.error = DeviceError("no such device")
    life.begin()
    with pytest.raises(DeviceError):
        await life.end()
    assert life.ready is None
    assert life.node.asked == ["open", "close"]
    assert not os.path.exists(place.socket)


async def test_how_long_to_drain_may_be_said_late(life: Life, place: Place) -> None:
    Path(place.drain_file).write_text("99")
    life.begin()
    await until(lambda: life.ready)
    assert not os.path.exists(place.drain_file), "it was meant for another node"
    Path(place.drain_file).write_text("0.25")
    life.service.ask_to_stop("SIGTERM")
    await life.end()
    assert "drain 0.25" in life.node.asked
    assert not os.path.exists(place.drain_file)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3), ("-1", 0), ("inf", None), ("soon", 30), ("", 30)]
)
def test_what_a_wish_may_be(place: Place, text: str, seconds: float | None) -> None:
    Path(place.drain_file).write_text(text)
    found = drain_seconds(place, 30)
    assert found == seconds if seconds is not None else found > 1e300


async def test_the_service_manager_is_told(place: Place, lock: PidfileLock) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{place.drain_file}.manager")
        manager.setblocking(False)
        life = Life(place, lock, Notifier(f"{place.drain_file}.manager", 1e-3))
        life.begin()
        await until(lambda: life.ready)
        loop = asyncio.get_running_loop()
        told = [await loop.sock_recv(manager, 1000) for _ in range(3)]
        life.service.ask_to_stop("SIGTERM")
        await life.end()
        while not told[-1].startswith(b"STOPPING"):
            told.append(await loop.sock_recv(manager, 1000))
    os.unlink(f"{place.drain_file}.manager")
    assert told[0].startswith(f"READY=1\nSTATUS=serves at {place.socket}: ".encode())
    assert set(told[1:-1]) == {b"WATCHDOG=1"}


def test_a_dead_nodes_socket_is_replaced(place: Place) -> None:
    first = bind(place.socket)
    before = os.stat(place.socket).st_ino
    second = bind(place.socket)
    assert os.stat(place.socket).st_ino != before or first.fileno() != second.fileno()
    second.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.socket)
    first.close()
    second.close()


def test_a_socket_that_cannot_be_made(place: Place) -> None:
    with pytest.raises(NodeStartError, match="cannot be made: No such file"):
        bind(f"{place.logs}/no/such/node.sock")


def test_a_node_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    try:
        assert repr(service_module.make_node(NodeOptions(), loop)) == (
            "<LocalEngine None>"
        )
    finally:
        loop.close()
