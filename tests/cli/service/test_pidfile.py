"""One node at a place: the lock, who holds it, and who only seems to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.daemon import place as pidfile
from aiogpu.daemon.place import (
    PidfileLock,
    Place,
    Record,
    living_node,
    read_record,
    start_time,
)
from aiogpu.errors import NodeRunningError, NodeStartError


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place.at(f"{tmp_path}/d/node.sock")
    place.prepare()
    return place


@pytest.fixture
def lock(place: Place) -> Iterator[PidfileLock]:
    lock = PidfileLock.take(place)
    yield lock
    lock.release()


def record(place: Place, pid: int | None = None, started: int | None = None) -> Record:
    pid = os.getpid() if pid is None else pid
    if started is None:
        started = start_time(pid) or 0
    return Record(pid, started, place.socket, place.logs, 30.0, 20.0, "0.1")


def test_it_says_who_holds_it(place: Place, lock: PidfileLock) -> None:
    assert living_node(place.pidfile) is None
    mine = record(place)
    lock.write(mine)
    assert living_node(place.pidfile) == mine
    assert os.stat(place.pidfile).st_mode & 0o777 == 0o600
    shorter = mine._replace(version="")
    lock.write(shorter)
    assert read_record(place.pidfile) == shorter


def test_the_second_is_told_who_was_first(place: Place, lock: PidfileLock) -> None:
    lock.write(record(place))
    with pytest.raises(NodeRunningError) as error:
        PidfileLock.take(place)
    assert f"at {place.socket} already (pid {os.getpid()})" in str(error.value)
    assert f"`aiogpu stop --socket {place.socket}`" in str(error.value)


def test_who_has_not_said_his_name_is_there_too(
    place: Place, lock: PidfileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lock
    monkeypatch.setattr(pidfile, "WRITTEN_WITHIN", 0.02)
    with pytest.raises(NodeRunningError, match="another node is starting or stopping"):
        PidfileLock.take(place)


def test_it_is_removed_with_its_end(place: Place) -> None:
    first = PidfileLock.take(place)
    first.release()
    assert not os.path.exists(place.pidfile)
    PidfileLock.take(place).release()


def test_a_file_of_somebody_else_is_not_removed(place: Place) -> None:
    first = PidfileLock.take(place)
    os.unlink(place.pidfile)
    second = PidfileLock.take(place)
    first.release()
    second.write(record(place))
    assert living_node(place.pidfile)
    second.release()


def test_a_file_without_a_lock_is_taken_over(place: Place) -> None:
    Path(place.pidfile).write_text(json.dumps(record(place)._asdict()))
    lock = PidfileLock.take(place)
    lock.release()


def test_the_lock_ends_with_its_process(place: Place) -> None:
    program = (
        "import os, signal, sys\n"
        "from aiogpu.daemon.place import PidfileLock\n"
        "from aiogpu.daemon.place import Place\n"
        "lock = PidfileLock.take(Place.at(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, place.socket], check=False)
    assert ran.returncode == -9
    assert os.path.exists(place.pidfile)
    PidfileLock.take(place).release()


def test_a_process_id_that_was_given_away_again(
    place: Place, lock: PidfileLock
) -> None:
    started = start_time(os.getpid())
    assert started is not None
    lock.write(record(place, started=started - 1))
    assert read_record(place.pidfile)
    assert living_node(place.pidfile) is None


def test_the_time_at_which_a_process_began() -> None:
    child = subprocess.Popen(["sleep", "60"])
    began = start_time(child.pid)
    mine = start_time(os.getpid())
    assert began is not None
    assert mine is not None
    assert began >= mine
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None, "a zombie serves nobody"
    child.wait()
    assert start_time(child.pid) is None


@pytest.mark.parametrize("text", ["", "4711\n", "[1]", '{"pid": 1}', "\0" * 10])
def test_a_file_that_says_nothing_of_use(place: Place, text: str) -> None:
    Path(place.pidfile).write_text(text)
    assert read_record(place.pidfile) is None


def test_a_file_that_is_none(place: Place) -> None:
    os.mkdir(place.pidfile)
    assert read_record(place.pidfile) is None
    with pytest.raises(NodeStartError, match="cannot be written: Is a directory"):
        PidfileLock.take(place)


def test_a_full_disk(place: Place) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    directory = os.open(os.path.dirname(place.pidfile), os.O_RDONLY)
    lock = PidfileLock(place.pidfile, full, directory)
    # It cannot be cut to a length, as a file can; the kernel says so first.
    with pytest.raises(NodeStartError, match=r"node\.pid cannot be written: .*room"):
        lock.write(record(place))
    lock.release()
