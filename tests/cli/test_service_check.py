"""What `aiogpu doctor` says of the node that a user's programs share."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from aiogpu import __version__
from aiogpu.cli import checks as service
from aiogpu.cli.checks import Check, Finding, Level, check_service, examine
from aiogpu.daemon.place import Record, start_time


class Place:
    """A node's directory.

    Attributes:
        path: of the node's socket.
    """

    def __init__(self, root: Path) -> None:
        self.path = str(root / "aiogpu" / "node.sock")
        self._root = root
        os.mkdir(root / "aiogpu", 0o700)

    def note(self, pid: int, version: str = __version__, *, is_alive: bool) -> None:
        """Have a pidfile name a process, or one that had its number before it."""
        started = start_time(pid) or 0
        record = Record(pid, started - (not is_alive), self.path, "", 0, 0, version)
        Path(self.path).with_suffix(".pid").write_text(json.dumps(record._asdict()))

    def bind(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(self.path)
        return bound

    def found(self) -> list[Finding]:
        run = partial(check_service, self.path, self._root / "linger")
        return list(examine([Check("service", run)]))

    def one(self, level: Level) -> str:
        """What is found, if it is but one thing; what is not well says what to do."""
        (finding,) = self.found()
        assert finding.level is level, finding
        assert not finding.is_fatal
        assert bool(finding.means) is bool(finding.advice) is (level is not Level.OK)
        return " ".join(filter(None, (finding.found, finding.means, finding.advice)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def listening(place: Place) -> Iterator[None]:
    """A node listens there."""
    with place.bind() as bound:
        bound.listen()
        yield


def test_none_need_run(place: Place) -> None:
    assert place.one(Level.OK).startswith("none runs, and none need; `aiogpu start")
    os.rmdir(os.path.dirname(place.path))
    assert place.one(Level.OK).startswith("none runs, and none need; `aiogpu start")


def test_a_pidfile_that_was_left_is_no_node(place: Place) -> None:
    place.note(7, is_alive=False)
    assert "one that was process 7 is left" in place.one(Level.OK)
    Path(place.path).with_suffix(".pid").write_text("garbage")
    assert "none need" in place.one(Level.OK)


@pytest.fixture
def child() -> Iterator[int]:
    """A process that stands for a node."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["/bin/cat"], stdin=pipe, stdout=pipe) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        # Until it answers, the loader may still have files open.
        os.write(cat.stdin.fileno(), b"?")
        assert os.read(cat.stdout.fileno(), 1) == b"?"
        yield cat.pid


@pytest.mark.usefixtures("listening")
def test_a_node_that_runs_and_its_limits(place: Place, child: int) -> None:
    assert place.one(Level.OK) == f"a node runs at {place.path}"
    place.note(child, is_alive=True)
    resource.prlimit(child, resource.RLIMIT_NOFILE, (4096, 4096))
    service, limits = place.found()
    assert service.found == f"a node runs at {place.path}, pid {child}"
    assert (service.name, service.level) == ("service", Level.OK)
    assert (limits.name, limits.level) == ("service limits", Level.OK)
    used = len(os.listdir(f"/proc/{child}/fd"))
    assert limits.found.startswith(f"4096 may be open, {used} are; room for 79")


@pytest.mark.usefixtures("listening")
def test_a_node_with_low_limits(place: Place, child: int) -> None:
    place.note(child, is_alive=True)
    resource.prlimit(child, resource.RLIMIT_NOFILE, (64, 256))
    _, limits = place.found()
    assert limits.level is Level.WARN
    assert "LimitNOFILE=" in limits.advice


@pytest.mark.usefixtures("listening")
def test_a_node_of_another_version(place: Place) -> None:
    place.note(8, version="0.9", is_alive=False)
    assert f"it runs aiogpu 0.9, this is {__version__}" in place.one(Level.WARN)


def test_a_socket_that_was_left(place: Place) -> None:
    place.bind().close()
    told = place.one(Level.WARN)
    assert "Connection refused; a node that has ended has left it" in told


def test_a_process_that_does_not_answer(place: Place, child: int) -> None:
    place.note(child, is_alive=True)
    told = place.one(Level.WARN)
    assert f"No such file or directory, though process {child} lives" in told


def test_another_process_of_that_number_is_not_the_node(
    place: Place, child: int
) -> None:
    place.note(child, is_alive=False)
    assert f"process {child} is left" in place.one(Level.OK)


def test_a_node_whose_queue_is_full(
    place: Place, child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PATIENCE", 0.01)
    place.note(child, is_alive=True)
    with place.bind() as bound, ExitStack() as waiting:
        bound.listen(0)
        is_full = False
        while not is_full:
            visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            try:
                visitor.connect(place.path)
            except BlockingIOError:
                is_full = True
        told = place.one(Level.WARN)
    assert f"no answer within 0.01 s, though process {child} lives" in told


def test_a_directory_that_others_can_enter(place: Place) -> None:
    directory = os.path.dirname(place.path)
    os.chmod(directory, 0o755)
    told = place.one(Level.WARN)
    assert f"{directory} has mode 0755" in told
    assert f"chmod 700 {directory}" in told


def test_a_directory_of_another_user(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 3_000_000_000)
    told = place.one(Level.WARN)
    assert f"belongs to uid {owner}" in told
    assert "and this is uid 3000000000" in told


def test_what_is_no_directory(place: Place) -> None:
    directory = os.path.dirname(place.path)
    os.rmdir(directory)
    Path(directory).write_text("")
    assert "is a regular file, where a directory is needed" in place.one(Level.WARN)


def test_logging_out_would_take_it_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "RUN_USER", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: type("E", (), {"pw_name": "me"}))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(service.directories, "unfit_directory", lambda _: None)
    with place.bind() as bound:
        bound.listen()
        _, lingers = place.found()
        assert "loginctl enable-linger me" in lingers.advice
        (tmp_path / "linger").mkdir()
        (tmp_path / "linger" / "me").touch()
        place.one(Level.OK)
