"""Where a node is met: names of its files, and places that are not fit."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from aiogpu.daemon.place import MAX_SOCKET_PATH, Place, check_length
from aiogpu.errors import NodeStartError


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Place.at() == (
        "/run/user/7/aiogpu/node.sock",
        "/run/user/7/aiogpu/node.pid",
        "/run/user/7/aiogpu/node.drain",
        "/run/user/7/aiogpu/logs",
    )


def test_two_places_in_one_directory_share_nothing() -> None:
    one, other = Place.at("/there/node.sock"), Place.at("/there/b.sock")
    assert not set(one) & set(other)
    assert other.pidfile == "/there/b.pid"
    assert other.logs == "/there/b-logs"


def test_paths_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place.at("a.sock", "l")
    assert (place.socket, place.logs) == (f"{tmp_path}/a.sock", f"{tmp_path}/l")


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    place = Place.at(f"{tmp_path}/d/node.sock")
    place.prepare()
    place.prepare()
    for path in (tmp_path / "d", tmp_path / "d" / "logs"):
        assert path.stat().st_mode & 0o7777 == 0o700


def test_a_path_of_the_greatest_length_can_be_bound(tmp_path: Path) -> None:
    check_length("/" + "x" * (MAX_SOCKET_PATH - 1))
    with pytest.raises(NodeStartError, match=r"has 108 bytes; Linux allows 107"):
        check_length("/" + "é" * 53 + "x")


def refused(place: Place) -> str:
    with pytest.raises(NodeStartError) as error:
        place.prepare()
    return str(error.value)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(0o710)
    told = refused(Place.at(f"{directory}/node.sock"))
    assert "has mode 0710" in told
    assert "chmod 700" in told
    assert "--socket" in told
    assert not list(directory.iterdir())


def test_nobody_is_told_to_take_from_others_what_is_everybodys(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    told = refused(Place.at(f"{tmp_path}/node.sock"))
    assert "is everybody's (mode 1777)" in told
    assert "`mkdir -m 700`, or name another place by --socket" in told
    assert "chmod" not in told


def test_a_directory_is_no_socket(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    told = refused(Place.at(f"{tmp_path}/d"))
    assert f"is to listen at {tmp_path}/d, but that is a directory" in told


def test_logs_may_be_read_by_others_and_not_written(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o755)
    place = Place.at(f"{tmp_path}/d/node.sock", str(logs))
    place.prepare()
    logs.chmod(0o775)
    assert "--log-dir" in refused(place)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "d").symlink_to("real")
    assert "is a symbolic link" in refused(Place.at(f"{tmp_path}/d/node.sock"))


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "d").touch()
    assert "is a regular file" in refused(Place.at(f"{tmp_path}/d/node.sock"))


def test_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = os.geteuid(), 3_000_000_000
    monkeypatch.setattr(os, "geteuid", lambda: other)
    told = refused(Place.at(f"{tmp_path}/node.sock"))
    assert f"belongs to uid {owner}" in told
    assert f"and this is uid {other}: a node's files" in told


def test_the_directory_above_must_be_there(tmp_path: Path) -> None:
    told = refused(Place.at(f"{tmp_path}/no/such/node.sock"))
    assert "cannot be made: No such file or directory" in told


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(0o500)
    told = refused(Place.at(f"{tmp_path}/d/node.sock"))
    assert "may not be written to by this user" in told


def test_what_is_no_socket_is_left_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir(0o700)
    (directory / "node.sock").write_text("mine")
    told = refused(Place.at(f"{directory}/node.sock"))
    assert "is a regular file, which is left as it is" in told
    assert (directory / "node.sock").read_text() == "mine"


def test_a_socket_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "d"
    directory.mkdir(0o700)
    monkeypatch.chdir(directory)  # its whole path may be too long to bind
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("n")
    monkeypatch.setattr("aiogpu.daemon.place.MAX_SOCKET_PATH", 1000)
    Place.at("n").prepare()
