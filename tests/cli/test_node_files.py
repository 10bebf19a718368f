"""The place of a node: its directory, its files, and the lock on its pidfile."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.daemon import place as pidfile
from aiogpu.daemon.place import (
    MAX_SOCKET_PATH,
    PidfileLock,
    Place,
    Record,
    check_length,
    living_node,
    read_record,
    start_time,
)
from aiogpu.errors import NodeRunningError, NodeStartError

# Names of files, and unsuitable directories.


def test_a_place_names_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Place.at() == (
        "/run/user/7/aiogpu/node.sock",
        "/run/user/7/aiogpu/node.pid",
        "/run/user/7/aiogpu/node.drain",
        "/run/user/7/aiogpu/logs",
    )
    first, second = Place.at("/there/node.sock"), Place.at("/there/b.sock")
    assert not set(first) & set(second), "two places in one directory share nothing"
    assert (second.pidfile, second.logs) == ("/there/b.pid", "/there/b-logs")
    monkeypatch.chdir(tmp_path)
    place = Place.at("a.sock", "l")
    assert (place.socket, place.logs) == (f"{tmp_path}/a.sock", f"{tmp_path}/l")


def test_missing_directories_are_created_private(tmp_path: Path) -> None:
    place = Place.at(f"{tmp_path}/d/node.sock")
    place.prepare()
    place.prepare()
    for path in (tmp_path / "d", tmp_path / "d" / "logs"):
        assert path.stat().st_mode & 0o7777 == 0o700


def test_a_socket_path_is_at_most_107_bytes(tmp_path: Path) -> None:
    check_length("/" + "x" * (MAX_SOCKET_PATH - 1))
    with pytest.raises(NodeStartError, match=r"has 108 bytes; Linux allows 107"):
        check_length("/" + "é" * 53 + "x")


def refusal_of(place: Place) -> str:
    with pytest.raises(NodeStartError) as error:
        place.prepare()
    return str(error.value)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(0o710)
    text = refusal_of(Place.at(f"{directory}/node.sock"))
    assert "has mode 0710" in text
    assert "chmod 700" in text
    assert "--socket" in text
    assert not list(directory.iterdir())
    (directory / "passwd").write_text("is read by all")
    text = refusal_of(Place.at(f"{directory}/node.sock"))
    assert "has mode 0710" in text
    assert "mkdir -m 700" in text
    assert "chmod" not in text


def test_a_public_directory_is_refused_without_advising_chmod(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    text = refusal_of(Place.at(f"{tmp_path}/node.sock"))
    assert "is open to all users (mode 1777)" in text
    assert "`mkdir -m 700`, or name another place by --socket" in text
    assert "chmod" not in text


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(0o700)
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "d" / "node.sock").write_text("mine")
    for path, message in (
        ("d", f"is to listen at {tmp_path}/d, but that is a directory"),
        ("link/node.sock", "is a symbolic link"),
        ("file/node.sock", "is a regular file"),
        ("no/such/node.sock", "cannot be made: No such file or directory"),
        ("d/node.sock", "is a regular file, which is left as it is"),
    ):
        assert message in refusal_of(Place.at(f"{tmp_path}/{path}"))
    for file in (tmp_path / "file", tmp_path / "d" / "node.sock"):
        assert file.read_text() == "mine"


def test_a_log_directory_may_be_readable_but_not_writable_by_others(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o755)
    place = Place.at(f"{tmp_path}/d/node.sock", str(logs))
    place.prepare()
    logs.chmod(0o775)
    assert "--log-dir" in refusal_of(place)


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = os.geteuid(), 3_000_000_000
    monkeypatch.setattr(os, "geteuid", lambda: other)
    text = refusal_of(Place.at(f"{tmp_path}/node.sock"))
    assert f"belongs to uid {owner}" in text
    assert f"and this is uid {other}: a node's files" in text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(0o500)
    text = refusal_of(Place.at(f"{tmp_path}/d/node.sock"))
    assert "may not be written to by this user" in text


def test_an_existing_socket_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "d"
    directory.mkdir(0o700)
    monkeypatch.chdir(directory)  # its whole path may be too long to bind
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("n")
    monkeypatch.setattr("aiogpu.daemon.place.MAX_SOCKET_PATH", 1000)
    Place.at("n").prepare()


# The lock and its holder.


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


def test_a_pidfile_names_the_holder_of_the_lock(
    place: Place, lock: PidfileLock
) -> None:
    assert living_node(place.pidfile) is None
    mine = record(place)
    lock.write(mine)
    assert living_node(place.pidfile) == mine
    assert os.stat(place.pidfile).st_mode & 0o777 == 0o600
    shorter = mine._replace(version="")
    lock.write(shorter)
    assert read_record(place.pidfile) == shorter
    # A process id that was reused.
    lock.write(mine._replace(started=mine.started - 1))
    assert read_record(place.pidfile)
    assert living_node(place.pidfile) is None


def test_a_second_node_learns_who_holds_the_lock(
    place: Place, lock: PidfileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pidfile, "WRITTEN_WITHIN", 0.02)
        with pytest.raises(NodeRunningError, match="another node is starting or stopp"):
            PidfileLock.take(place)
    lock.write(record(place))
    with pytest.raises(NodeRunningError) as error:
        PidfileLock.take(place)
    assert f"at {place.socket} already (pid {os.getpid()})" in str(error.value)
    assert f"`aiogpu stop --socket {place.socket}`" in str(error.value)


def test_release_removes_only_the_own_pidfile(place: Place) -> None:
    Path(place.pidfile).write_text(json.dumps(record(place)._asdict()))
    PidfileLock.take(place).release()
    assert not os.path.exists(place.pidfile), "a file without a lock is taken over"
    first = PidfileLock.take(place)
    os.unlink(place.pidfile)
    second = PidfileLock.take(place)
    first.release()
    second.write(record(place))
    assert living_node(place.pidfile)
    second.release()


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


def test_start_time_of_a_process() -> None:
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


def test_an_unreadable_pidfile_is_no_node(place: Place) -> None:
    for text in ("", "4711\n", "[1]", '{"pid": 1}', "\0" * 10):
        Path(place.pidfile).write_text(text)
        assert read_record(place.pidfile) is None
    os.unlink(place.pidfile)
    os.mkdir(place.pidfile)
    assert read_record(place.pidfile) is None
    with pytest.raises(NodeStartError, match="cannot be written: Is a directory"):
        PidfileLock.take(place)


def test_a_full_disk_fails_the_lock(place: Place) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    directory = os.open(os.path.dirname(place.pidfile), os.O_RDONLY)
    lock = PidfileLock(place.pidfile, full, directory)
    # /dev/full cannot be truncated; the kernel reports that first.
    with pytest.raises(NodeStartError, match=r"node\.pid cannot be written: .*room"):
        lock.write(record(place))
    lock.release()
