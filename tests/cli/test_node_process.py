"""The process of a node: start, stop, and reports to its starter and its manager."""

from __future__ import annotations

import asyncio
import os
import signal
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
from aiogpu.daemon.place import (
    PidfileLock,
    Place,
    Record,
    extended_for,
    living_node,
    start_time,
)
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
from tests.cli.fake_node import FakeNode
from tests.cli.sandbox import Sandbox
from tests.support.program import environment
from tests.support.waits import until


@pytest.fixture
def place() -> Iterator[Place]:
    """A place with a short path: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="agt-", dir="/tmp") as directory:
        place = Place.at(f"{directory}/node.sock")
        place.prepare()
        yield place


@pytest.fixture
def lock(place: Place) -> Iterator[PidfileLock]:
    lock = PidfileLock.take(place)
    yield lock
    lock.release()


class ServiceRun:
    """A service around a fake node.

    Attributes:
        ready: the report of the service once it is ready.
    """

    def __init__(self, place: Place, lock: PidfileLock, notifier: Notifier) -> None:
        self.ready: Ready | None = None
        self.node = FakeNode(NodeOptions())
        plan = Plan(NodeOptions(), place, drain=7)
        self.service = Service(plan, notifier, lambda *_: self.node)
        self._lock = lock
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.service.run(self._lock, self._on_ready))

    def _on_ready(self, ready: Ready) -> None:
        self.ready = ready

    async def wait_ended(self) -> None:
        assert self.task is not None
        await asyncio.wait_for(self.task, 20)


@pytest.fixture
def run(place: Place, lock: PidfileLock) -> ServiceRun:
    return ServiceRun(place, lock, Notifier())


@pytest.mark.either_loop
async def test_a_node_can_be_reached_once_it_is_ready(
    run: ServiceRun, place: Place
) -> None:
    Path(place.drain_file).write_text("99")
    run.node.may_open.clear()
    run.start()
    await until(lambda: run.node.calls)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionError):
        client.connect(place.socket)  # no client connects before the node is open
    run.node.may_open.set()
    await until(lambda: run.ready)
    assert not os.path.exists(place.drain_file), "an old drain request is removed"
    assert run.ready == (
        os.getpid(),
        {"CPU": 2.0, "GPU": 1.0},
        place.socket,
        place.logs,
    )
    record = living_node(place.pidfile)
    assert record is not None
    assert (record.pid, record.drain, record.ends_within) == (os.getpid(), 7, 22)
    assert os.stat(place.socket).st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.socket)
    run.service.ask_to_stop("SIGTERM")
    await run.wait_ended()
    assert run.node.calls == ["open", "serve", "drain 7", "close"]
    assert run.node.logs == place.logs
    assert sorted(os.listdir(os.path.dirname(place.socket))) == ["logs", "node.pid"]


@pytest.mark.either_loop
async def test_a_second_signal_ends_a_node_at_once(run: ServiceRun) -> None:
    run.node.may_drain.clear()
    run.start()
    await until(lambda: run.ready)
    run.service.ask_to_stop("SIGINT")
    await until(lambda: "drain 7" in run.node.calls)
    run.service.hang_up()
    assert "force_close" not in run.node.calls, "a closed terminal is no second signal"
    run.service.ask_to_stop("SIGINT")
    run.service.ask_to_stop("SIGINT")
    await run.wait_ended()
    assert run.node.calls[2:] == ["drain 7", "force_close", "close"]


@pytest.mark.either_loop
async def test_a_node_that_fails_to_open_is_closed(
    run: ServiceRun, place: Place
) -> None:
    run.node.may_open.clear()
    run.start()
    await until(lambda: run.node.calls)
    run.service.ask_to_stop("SIGTERM")
    with pytest.raises(NodeClosedError, match="before it was ready"):
        await run.wait_ended()
    assert run.node.calls == ["open", "close"]
    run.node.may_open.set()
    run.node.error = DeviceError("no such device")
    run.service = Service(Plan(NodeOptions(), place), Notifier(), lambda *_: run.node)
    run.start()
    with pytest.raises(DeviceError):
        await run.wait_ended()
    assert run.ready is None
    assert run.node.calls == ["open", "close"] * 2
    assert not os.path.exists(place.socket)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3), ("-1", 0), ("inf", None), ("soon", 30), ("", 30)]
)
def test_a_drain_request_is_parsed(
    place: Place, text: str, seconds: float | None
) -> None:
    Path(place.drain_file).write_text(text)
    drain = drain_seconds(place, 30)
    assert drain == seconds if seconds is not None else drain > 1e300


@pytest.mark.either_loop
async def test_the_service_manager_gets_the_state(
    place: Place, lock: PidfileLock
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{place.drain_file}.manager")
        manager.setblocking(False)
        run = ServiceRun(place, lock, Notifier(f"{place.drain_file}.manager", 1e-3))
        run.start()
        await until(lambda: run.ready)
        loop = asyncio.get_running_loop()
        messages = [await loop.sock_recv(manager, 1000) for _ in range(3)]
        run.service.hang_up()  # counts as a signal
        await run.wait_ended()
        while not messages[-1].startswith(b"EXTEND"):
            messages.append(await loop.sock_recv(manager, 1000))
    os.unlink(f"{place.drain_file}.manager")
    assert messages[0].startswith(
        f"READY=1\nSTATUS=serves at {place.socket}: ".encode()
    )
    states = [message for message in messages[1:] if message != b"WATCHDOG=1"]
    assert len(states) < len(messages) - 1
    assert states[0].startswith(b"STOPPING=1\n")
    # The end takes 22 seconds, once those tasks have ended that take 3.
    assert states[1:] == [b"EXTEND_TIMEOUT_USEC=25000000"]


def test_the_socket_of_a_dead_node_is_replaced(place: Place) -> None:
    first, second = bind(place.socket), bind(place.socket)
    with first, second, socket.socket(socket.AF_UNIX) as client:
        second.listen()
        client.connect(place.socket)
    with pytest.raises(NodeStartError, match="cannot be made: No such file"):
        bind(f"{place.logs}/no/such/node.sock")


# Stopping a node: request, wait, kill.


@contextmanager
def fake_service(sandbox: Sandbox, mode: str) -> Iterator[subprocess.Popen[str]]:
    """A fake node in a process of its own, which is ready."""
    command = [sys.executable, "-m", "tests.cli.fake_node"]
    with subprocess.Popen(
        [*command, sandbox.place.socket, mode],
        env=environment(XDG_RUNTIME_DIR=sandbox.directory),
        stdin=subprocess.PIPE,
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


def output_of(process: subprocess.Popen[str]) -> list[str]:
    """Lines of output until a process ends with status 0."""
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


def test_stop_drains_a_node_and_ends_it(sandbox: Sandbox) -> None:
    waits: list[tuple[Record, float]] = []
    with fake_service(sandbox, "calm") as process:
        ended = stop(sandbox.place, on_wait=lambda *wait: waits.append(wait))
        assert output_of(process) == ["drain 60", "close"]
    assert ended is not None
    assert (ended.record.pid, ended.is_forced) == (process.pid, False)
    assert waits == [(ended.record, 60)]
    assert sandbox.files == []
    assert stop(sandbox.place) is None


def test_stop_sets_the_seconds_of_the_drain(sandbox: Sandbox) -> None:
    with fake_service(sandbox, "deaf") as process:
        os.mkdir(sandbox.place.drain_file)
        with pytest.raises(NodeError, match=r"Leave --drain out, or make room there"):
            stop(sandbox.place, drain=3)
        os.rmdir(sandbox.place.drain_file)
        assert process.poll() is None
        assert stop(sandbox.place, drain=0.01)
        assert output_of(process) == ["drain 0.01", "close"]
    assert sandbox.files == []


def test_a_second_stop_ends_a_node_at_once(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_service(sandbox, "deaf") as process:
        monkeypatch.setattr(stop_module, "SLACK", -80.0)  # less than its drain
        with pytest.raises(NodeError) as error:
            stop(sandbox.place)
        assert f"(pid {process.pid}) has not ended within 0 s" in str(error.value)
        assert "Kill it by `aiogpu stop --force`" in str(error.value)
        assert process.stdout is not None
        assert process.stdout.readline() == "drain 60\n"
        monkeypatch.undo()
        assert stop(sandbox.place)
        assert output_of(process) == ["force_close", "close"]


def test_stop_waits_while_a_node_goes_on_ending(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close of a node with a million waiting tasks takes longer than usual."""
    with fake_service(sandbox, "slow") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "drain 60\n"
        assert process.stdout.readline() == "close\n"

        def end_after(path: str) -> float:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return extended_for(path)

        monkeypatch.setattr(stop_module, "SLACK", -20.0)
        monkeypatch.setattr(stop_module, "extended_for", end_after)
        ended = stop(sandbox.place, drain=0)
        assert ended is not None
        assert not ended.is_forced
        assert output_of(process) == ["force_close"]


def test_stop_by_force_kills_a_node_that_cannot_end(sandbox: Sandbox) -> None:
    with fake_service(sandbox, "stuck") as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stop_module, "SLACK", -20.0)
            with pytest.raises(NodeError, match="has not ended"):
                stop(sandbox.place, drain=0)
        ended = stop(sandbox.place, force=True)
        assert ended is not None
        assert ended.is_forced
        assert process.wait(60) == -9
    assert sandbox.files == []


def test_stop_spares_a_process_with_the_same_pid(sandbox: Sandbox) -> None:
    sandbox.place.prepare()
    lock = PidfileLock.take(sandbox.place)
    started = start_time(os.getpid())
    assert started is not None
    mine = Record(os.getpid(), started - 1, "", "", 0.0, 0.0, "")
    lock.write(mine)
    assert stop(sandbox.place, force=True) is None
    lock.release()


def test_stop_accepts_a_node_that_ends_meanwhile(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node ends after its pidfile is read and before its process is opened."""
    child = subprocess.Popen(["true"])
    child.wait()
    gone = Record(child.pid, 1, "", "", 0.0, 0.0, "")
    monkeypatch.setattr(stop_module, "living_node", lambda _path: gone)
    assert stop(sandbox.place) is None
    monkeypatch.setattr(
        stop_module, "living_node", lambda _path: gone._replace(pid=os.getpid())
    )
    assert stop(sandbox.place, force=True) is None


def test_stop_refuses_a_pidfile_of_another_user(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: str) -> None:
        raise PermissionError

    monkeypatch.setattr(stop_module, "living_node", refuse)
    with pytest.raises(NodeError, match="by the user who has started it"):
        stop(sandbox.place)


def test_clearing_spares_the_files_of_the_next_node(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that starts where another was killed keeps its files."""
    monkeypatch.setattr(pidfile, "WRITTEN_WITHIN", 0.0)
    sandbox.place.prepare()
    lock = PidfileLock.take(sandbox.place)
    place: Place = sandbox.place
    with open(place.drain_file, "w", encoding="ascii"):
        stop_module._clear(place)
    assert os.path.exists(place.drain_file)
    lock.release()
    stop_module._clear(place)
    assert sandbox.files == []


# Reports of a node to its starter and to the service manager.


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


def test_a_starter_waits_for_the_report(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with pytest.raises(TimeoutError):
        wait_for_report(reading, 0)
    report_ready(writing, READY)
    assert wait_for_report(reading, 0) == READY
    os.close(reading)
    report_ready(writing, READY)  # with no reader


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
def test_a_starter_gets_the_error_of_the_node(
    pipe: tuple[int, int], error: AiogpuError, known: type[Exception]
) -> None:
    """An unknown class becomes `NodeStartError`."""
    reading, writing = pipe
    report_failure(writing, error)
    with pytest.raises(known, match="strange"):
        wait_for_report(reading, 0)


def test_a_starter_gets_none_from_a_node_that_dies(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b'{"rea')
    os.close(writing)
    assert wait_for_report(reading, 0) is None


def test_a_plan_survives_packing() -> None:
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


def test_a_service_manager_receives_a_notice(notify_socket: str) -> None:
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
        message = manager.recv(1000)
    assert message == b"READY=1\nSTATUS=serves at /there: {GPU: 2}"
    assert environ == {"HOME": "/"}, "workers do not inherit the variable"
    assert notifier.interval == 0


@pytest.mark.parametrize(
    ("pid", "interval"),
    [("", 15.0), (os.getpid(), 15.0), (1, 0.0)],
    ids=["for all", "for us", "for another"],
)
def test_a_watchdog_applies_to_the_process_it_names(
    pid: object, interval: float
) -> None:
    environ = {"NOTIFY_SOCKET": "/there", "WATCHDOG_USEC": "30000000"}
    if pid:
        environ["WATCHDOG_PID"] = str(pid)
    assert Notifier.take(environ).interval == interval
    assert not environ
    # Without a socket there is no watchdog.
    assert Notifier.take({"WATCHDOG_USEC": "30000000"}).interval == 0


def test_a_missing_service_manager_is_logged(
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
