"""What `aiogpu doctor` says of the node that a user's programs share."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from aiogpu.runtime.checks import node as service
from aiogpu.runtime.checks.finding import Finding, Level
from aiogpu.runtime.checks.node import check_service

STAT = "7 (a) b) S " + " ".join(map(str, range(4, 53)))
"""A process that began at tick 22, as the kernel tells of it."""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             unlimited            unlimited            processes
Max open files            {soft}                 {hard}                files
"""


class Place:
    """A node's directory, and a proc filesystem of paper.

    Attributes:
        path: of the node's socket.
    """

    def __init__(self, root: Path) -> None:
        self.path = str(root / "aiogpu" / "node.sock")
        self._root = root
        os.mkdir(root / "aiogpu", 0o700)
        os.mkdir(root / "proc")

    def note(self, pid: int, version: str = "1") -> None:
        said = json.dumps({"pid": pid, "started": 22, "version": version})
        Path(self.path).with_suffix(".pid").write_text(said)

    def live(self, pid: int, soft: int = 1024, hard: int = 65536) -> None:
        """Have a process be there."""
        place = self._root / "proc" / str(pid)
        (place / "fd").mkdir(parents=True)
        (place / "stat").write_text(STAT)
        (place / "limits").write_text(LIMITS.format(soft=soft, hard=hard))

    def bind(self) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(self.path)
        return bound

    def found(self) -> list[Finding]:
        proc, linger = self._root / "proc", self._root / "linger"
        return list(check_service(self.path, "1", proc, linger))

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
    place.note(7)
    assert "one that was process 7 is left" in place.one(Level.OK)
    Path(place.path).with_suffix(".pid").write_text("garbage")
    assert "none need" in place.one(Level.OK)


@pytest.mark.usefixtures("listening")
def test_a_node_that_runs_and_its_limits(place: Place) -> None:
    assert place.one(Level.OK) == f"a node runs at {place.path}"
    place.note(7)
    place.live(7)
    service, limits = place.found()
    assert service == Finding(
        "service", Level.OK, f"a node runs at {place.path}, pid 7"
    )
    assert (limits.name, limits.level) == ("service limits", Level.OK)
    assert limits.found.startswith("1024 may be open, 0 are; room for 4080 workers")


@pytest.mark.usefixtures("listening")
def test_a_node_with_low_limits(place: Place) -> None:
    place.note(7)
    place.live(7, soft=64, hard=256)
    _, limits = place.found()
    assert limits.level is Level.WARN
    assert "LimitNOFILE=" in limits.advice


@pytest.mark.usefixtures("listening")
def test_a_node_of_another_version(place: Place) -> None:
    place.note(8, version="0.9")
    assert "it runs aiogpu 0.9, this is 1" in place.one(Level.WARN)


def test_a_socket_that_was_left(place: Place) -> None:
    place.bind().close()
    told = place.one(Level.WARN)
    assert "Connection refused; a node that has ended has left it" in told


def test_a_process_that_does_not_answer(place: Place) -> None:
    place.note(7)
    place.live(7)
    assert "No such file or directory, though process 7 lives" in place.one(Level.WARN)


def test_another_process_of_that_number_is_not_the_node(place: Place) -> None:
    place.live(7)
    said = json.dumps({"pid": 7, "started": 23})
    Path(place.path).with_suffix(".pid").write_text(said)
    assert "process 7 is left" in place.one(Level.OK)


def test_a_node_whose_queue_is_full(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PATIENCE", 0.01)
    place.note(7)
    place.live(7)
    with place.bind() as bound, ExitStack() as waiting:
        bound.listen(0)
        for _ in range(2):
            visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            with suppress(BlockingIOError):
                visitor.connect(place.path)
        told = place.one(Level.WARN)
    assert "no answer within 0.01 s, though process 7 lives" in told


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
    monkeypatch.setattr("aiogpu.runtime.checks.node.RUN_USER", str(tmp_path))
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: type("E", (), {"pw_name": "me"}))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("aiogpu.runtime.checks.node._directory", lambda _: None)
    with place.bind() as bound:
        bound.listen()
        _, lingers = place.found()
        assert "loginctl enable-linger me" in lingers.advice
        (tmp_path / "linger").mkdir()
        (tmp_path / "linger" / "me").touch()
        place.one(Level.OK)
