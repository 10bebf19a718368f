"""A node's process: its life on paper, how it is stopped, and what others are told."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiogpu.daemon import place as pidfile
from aiogpu.daemon import stop as stop_module
from aiogpu.daemon.place import PidfileLock, Place, Record, living_node, start_time
from aiogpu.daemon.process import Plan, Service, bind, drain_seconds
from aiogpu.daemon.readiness import (
    Notifier,
    Ready,
    report_failure,
    report_ready,
    wait_for_report,
)
from aiogpu.daemon.stop import stop
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import (
    AiogpuError,
    DeviceError,
    NodeClosedError,
    NodeError,
    NodeStartError,
)
from tests.cli.box import Box
from tests.cli.paper_node import PaperNode
from tests.support.program import environment
from tests.support.until import until


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


@pytest.mark.either_loop
async def test_it_is_met_when_it_is_ready(life: Life, place: Place) -> None:
    Path(place.drain_file).write_text("99")
    life.node.may_open.clear()
    life.begin()
    await until(lambda: life.node.asked)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionError):
        client.connect(place.socket)  # nobody comes in before it is open
    life.node.may_open.set()
    await until(lambda: life.ready)
    assert not os.path.exists(place.drain_file), "it was meant for another node"
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


@pytest.mark.either_loop
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


@pytest.mark.either_loop
async def test_it_does_not_open(life: Life, place: Place) -> None:
    life.node.may_open.clear()
    life.begin()
    await until(lambda: life.node.asked)
    life.service.ask_to_stop("SIGTERM")
    with pytest.raises(NodeClosedError, match="before it was ready"):
        await life.end()
    assert life.node.asked == ["open", "close"]
    life.node.may_open.set()
    life.node.error = DeviceError("no such device")
    life.service = Service(Plan(NodeOptions(), place), Notifier(), lambda *_: life.node)
    life.begin()
    with pytest.raises(DeviceError):
        await life.end()
    assert life.ready is None
    assert life.node.asked == ["open", "close"] * 2
    assert not os.path.exists(place.socket)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3), ("-1", 0), ("inf", None), ("soon", 30), ("", 30)]
)
def test_what_a_wish_may_be(place: Place, text: str, seconds: float | None) -> None:
    Path(place.drain_file).write_text(text)
    found = drain_seconds(place, 30)
    assert found == seconds if seconds is not None else found > 1e300


@pytest.mark.either_loop
async def test_the_service_manager_is_told(place: Place, lock: PidfileLock) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{place.drain_file}.manager")
        manager.setblocking(False)
        life = Life(place, lock, Notifier(f"{place.drain_file}.manager", 1e-3))
        life.begin()
        await until(lambda: life.ready)
        loop = asyncio.get_running_loop()
        told = [await loop.sock_recv(manager, 1000) for _ in range(3)]
        life.service.hang_up()  # as good as a signal
        await life.end()
        while not told[-1].startswith(b"STOPPING"):
            told.append(await loop.sock_recv(manager, 1000))
    os.unlink(f"{place.drain_file}.manager")
    assert told[0].startswith(f"READY=1\nSTATUS=serves at {place.socket}: ".encode())
    assert set(told[1:-1]) == {b"WATCHDOG=1"}


def test_a_dead_nodes_socket_is_replaced(place: Place) -> None:
    first, second = bind(place.socket), bind(place.socket)
    with first, second, socket.socket(socket.AF_UNIX) as client:
        second.listen()
        client.connect(place.socket)
    with pytest.raises(NodeStartError, match="cannot be made: No such file"):
        bind(f"{place.logs}/no/such/node.sock")


# A node is asked to end, waited for, and killed if it will not.


@contextmanager
def daemon(here: Box, how: str) -> Iterator[subprocess.Popen[str]]:
    """A node of paper that is ready."""
    command = [sys.executable, "-m", "tests.cli.paper_node"]
    with subprocess.Popen(
        [*command, here.place.socket, how],
        env=environment(XDG_RUNTIME_DIR=here.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ready {process.pid}\n"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """What it says until it has ended, well."""
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


def test_it_drains_and_ends(here: Box) -> None:
    waits: list[tuple[Record, float]] = []
    with daemon(here, "calm") as process:
        ended = stop(here.place, on_wait=lambda *wait: waits.append(wait))
        assert said(process) == ["drain 60", "close"]
    assert ended is not None
    assert (ended.record.pid, ended.is_forced) == (process.pid, False)
    assert waits == [(ended.record, 60)]
    assert here.files == []
    assert stop(here.place) is None


def test_how_long_it_drains_may_be_said(here: Box) -> None:
    with daemon(here, "deaf") as process:
        os.mkdir(here.place.drain_file)
        with pytest.raises(NodeError, match=r"Leave --drain out, or make room there"):
            stop(here.place, drain=3)
        os.rmdir(here.place.drain_file)
        assert process.poll() is None
        assert stop(here.place, drain=0.01)
        assert said(process) == ["drain 0.01", "close"]
    assert here.files == []


def test_asked_once_more_it_ends_at_once(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(here, "deaf") as process:
        monkeypatch.setattr(stop_module, "SLACK", -80.0)  # its drain, and its end
        with pytest.raises(NodeError) as error:
            stop(here.place)
        assert f"(pid {process.pid}) has not ended within 0 s" in str(error.value)
        assert "Kill it by `aiogpu stop --force`" in str(error.value)
        assert process.stdout is not None
        assert process.stdout.readline() == "drain 60\n"
        monkeypatch.undo()
        assert stop(here.place)
        assert said(process) == ["force_close", "close"]


def test_one_that_cannot_end_is_killed(here: Box) -> None:
    with daemon(here, "stuck") as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stop_module, "SLACK", -20.0)
            with pytest.raises(NodeError, match="has not ended"):
                stop(here.place, drain=0)
        ended = stop(here.place, force=True)
        assert ended is not None
        assert ended.is_forced
        assert process.wait(60) == -9
    assert here.files == []


def test_a_process_of_the_same_number_is_not_hit(here: Box) -> None:
    here.place.prepare()
    lock = PidfileLock.take(here.place)
    started = start_time(os.getpid())
    assert started is not None
    mine = Record(os.getpid(), started - 1, "", "", 0.0, 0.0, "")
    lock.write(mine)
    assert stop(here.place, force=True) is None
    lock.release()


def test_a_node_that_ends_while_it_is_looked_for(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its pidfile and the hold on its process."""
    child = subprocess.Popen(["true"])
    child.wait()
    gone = Record(child.pid, 1, "", "", 0.0, 0.0, "")
    monkeypatch.setattr(stop_module, "living_node", lambda _path: gone)
    assert stop(here.place) is None
    monkeypatch.setattr(
        stop_module, "living_node", lambda _path: gone._replace(pid=os.getpid())
    )
    assert stop(here.place, force=True) is None


def test_a_pidfile_of_another_user(here: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> None:
        raise PermissionError

    monkeypatch.setattr(stop_module, "living_node", refuse)
    with pytest.raises(NodeError, match="by the user who has started it"):
        stop(here.place)


def test_the_next_node_is_not_touched(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has begun where another was killed keeps its files."""
    monkeypatch.setattr(pidfile, "WRITTEN_WITHIN", 0.0)
    here.place.prepare()
    lock = PidfileLock.take(here.place)
    place: Place = here.place
    with open(place.drain_file, "w", encoding="ascii"):
        stop_module._clear(place)
    assert os.path.exists(place.drain_file)
    lock.release()
    stop_module._clear(place)
    assert here.files == []


# What a node says to whoever starts it, and to the service manager.


READY = Ready(4711, {"CPU": 2.0, "GPU": 1.0}, "/there/node.sock", "/there/logs")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test has closed it


def test_it_is_ready_or_says_nothing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with pytest.raises(TimeoutError):
        wait_for_report(reading, 0)
    report_ready(writing, READY)
    assert wait_for_report(reading, 0) == READY
    os.close(reading)
    report_ready(writing, READY)  # nobody listens any more


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (DeviceError("strange"), DeviceError),
        (type("RemoteTraceback", (AiogpuError,), {})("strange"), NodeStartError),
        (type("annotations", (AiogpuError,), {})("strange"), NodeStartError),
        (type("NewerError", (AiogpuError,), {})("strange"), NodeStartError),
    ],
    ids=lambda value: "" if isinstance(value, type) else type(value).__name__,
)
def test_it_has_failed(
    pipe: tuple[int, int], error: AiogpuError, known: type[Exception]
) -> None:
    """Of what is known here, or not."""
    reading, writing = pipe
    report_failure(writing, error)
    with pytest.raises(known, match="strange"):
        wait_for_report(reading, 0)


def test_it_has_ended_without_a_word(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b'{"rea')
    os.close(writing)
    assert wait_for_report(reading, 0) is None


def test_a_plan_arrives_as_it_was() -> None:
    options = NodeOptions(
        num_cpus=2.5, num_gpus=4, resources={"license": 2}, preload=("json", "math")
    )
    place = Place.at("/there/node.sock", "/elsewhere")
    plan = Plan(options, place, 3.5, ("/a", "/b"))
    assert Plan.unpacked(plan.packed()) == plan
    assert plan.ends_within == 22
    assert plan.opens_within == 240


@pytest.fixture(params=["file", "abstract"])
def notify_socket(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"/tmp/agn-{os.getpid()}-{tmp_path.name[-8:]}"
    return f"@aiogpu-test-{os.getpid()}-{tmp_path.name[-8:]}"


def test_a_manager_hears_it(notify_socket: str) -> None:
    address = notify_socket
    where = f"\0{address[1:]}" if address.startswith("@") else address
    environ = {"NOTIFY_SOCKET": address, "HOME": "/"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(where)
        try:
            notifier = Notifier.take(environ)
            notifier.send(READY=1, STATUS="serves at /there: {GPU: 2}")
        finally:
            if address.startswith("/"):
                os.unlink(address)
        said = manager.recv(1000)
    assert said == b"READY=1\nSTATUS=serves at /there: {GPU: 2}"
    assert environ == {"HOME": "/"}, "no worker speaks for the node"
    assert notifier.interval == 0


@pytest.mark.parametrize(
    ("pid", "interval"),
    [("", 15.0), (os.getpid(), 15.0), (1, 0.0)],
    ids=["for all", "for us", "for another"],
)
def test_a_watchdog_and_whom_it_watches(pid: object, interval: float) -> None:
    environ = {"NOTIFY_SOCKET": "/there", "WATCHDOG_USEC": "30000000"}
    if pid:
        environ["WATCHDOG_PID"] = str(pid)
    assert Notifier.take(environ).interval == interval
    assert not environ
    # Without a socket there is none.
    assert Notifier.take({"WATCHDOG_USEC": "30000000"}).interval == 0


def test_a_manager_that_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier.take({}).send(READY=1)
    assert not caplog.records
    Notifier.take({"NOTIFY_SOCKET": f"{tmp_path}/n"}).send(READY=1)
    assert "cannot be told 'READY=1'" in caplog.text
    caplog.clear()
    Notifier.take({"NOTIFY_SOCKET": "vsock:2:1"}).send(READY=1)
    assert [record.getMessage() for record in caplog.records] == [
        "! NOTIFY_SOCKET=vsock:2:1 is not understood; nothing is told"
    ]
