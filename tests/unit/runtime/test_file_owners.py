"""Files and directories that other users could replace are refused."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.linux.sockets import (
    UnexpectedFileError,
    is_own,
    is_trusted,
    open_checked,
)
from aiogpu.runtime.directories import LINKS, replaceable

OTHER = 54321


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agf-", dir="/tmp") as directory:
        yield Path(directory)


def problem_of(path: Path) -> str:
    unfit = replaceable(str(path))
    return "" if unfit is None else f"{unfit.problem}; {unfit.remedy}"


@pytest.mark.parametrize(
    ("mode", "is_safe"),
    [
        (0o700, True),
        (0o755, True),
        (0o1777, True),
        (0o1770, True),
        (0o777, False),
        (0o703, False),
    ],
)
def test_modes_of_a_directory_and_of_those_above(
    place: Path, mode: int, is_safe: bool
) -> None:
    below = place / "directory" / "below"
    below.mkdir(parents=True)
    (place / "directory").chmod(mode)
    for path in (place / "directory", below):
        problem = problem_of(path)
        assert (problem == "") == is_safe, problem
        if problem:
            assert f"all users may write to {place}/directory" in problem
            assert f"(mode {mode:04o})" in problem
            assert f"chmod +t {place}/directory" in problem


@as_root
def test_a_directory_of_another_user_is_refused(place: Path) -> None:
    below = place / "theirs" / "below"
    below.mkdir(parents=True)
    os.chown(place / "theirs", OTHER, OTHER)
    for mode in (0o700, 0o1777):
        (place / "theirs").chmod(mode)
        for path in (place / "theirs", below):
            assert f"{place}/theirs belongs to uid {OTHER}" in problem_of(path)


@as_root
def test_a_group_that_may_write_must_have_no_other_members(place: Path) -> None:
    place.chmod(0o770)
    os.chown(place, 0, OTHER)
    assert f"group {OTHER} may write to {place} (mode 0770)" in problem_of(place)
    place.chmod(0o1770)
    assert problem_of(place) == ""
    os.chown(place, 0, 0)
    place.chmod(0o770)
    assert problem_of(place) == "", "the group of root"


@as_root
def test_the_private_group_of_a_user_may_write(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    users = [entry for entry in pwd.getpwall() if entry.pw_uid == entry.pw_gid != 0]
    if not users:
        pytest.skip("this machine has no other users with a group of their own")
    for entry in users:
        os.chown(place, entry.pw_uid, entry.pw_gid)
        place.chmod(0o770)
        monkeypatch.setattr(os, "geteuid", lambda entry=entry: entry.pw_uid)
        if problem_of(place) == "":
            break
    else:
        pytest.fail("no user may use a directory of a private group")


@as_root
def test_links_are_checked_at_each_step(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "open" / "target").mkdir()
    (place / "safe").mkdir()
    (place / "relative").symlink_to("open/target")
    (place / "absolute").symlink_to(place / "open" / "target")
    (place / "back").symlink_to("open/../safe")
    (place / "plain").symlink_to("safe")
    (place / "theirs").symlink_to("safe")
    os.chown(place / "theirs", OTHER, OTHER, follow_symlinks=False)
    (place / "loop").symlink_to("loop")
    assert problem_of(place / "plain") == ""
    for name in ("relative", "absolute", "back"):
        assert f"all users may write to {place}/open" in problem_of(place / name)
    assert f"{place}/theirs belongs to uid {OTHER}" in problem_of(place / "theirs")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        problem_of(place / "loop")
    assert LINKS == 40


def test_a_part_that_is_missing_is_an_error(place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replaceable(f"{place}/a/b")


def test_only_the_expected_file_is_opened(place: Path) -> None:
    file, fifo, link = place / "file", place / "fifo", place / "link"
    file.write_text("text")
    os.mkfifo(fifo)
    link.symlink_to("file")
    with open(open_checked(str(file), os.O_RDONLY, stat.S_ISREG, is_own)) as opened:
        assert opened.read() == "text"
    before = len(os.listdir("/proc/self/fd"))
    for path, kind in ((fifo, "a named pipe"), (place, "a directory")):
        with pytest.raises(UnexpectedFileError, match=f"it is {kind} of uid"):
            open_checked(str(path), os.O_RDONLY, stat.S_ISREG, is_own)
    with pytest.raises(OSError, match="symbolic links"):
        open_checked(str(link), os.O_RDONLY, stat.S_ISREG, is_own)
    assert len(os.listdir("/proc/self/fd")) == before


@as_root
def test_a_file_of_another_user_is_not_opened(place: Path) -> None:
    (place / "file").touch()
    os.chown(place / "file", OTHER, OTHER)
    for is_owner in (is_own, is_trusted):
        with pytest.raises(UnexpectedFileError, match=f"a regular file of uid {OTHER}"):
            open_checked(f"{place}/file", os.O_RDONLY, stat.S_ISREG, is_owner)


def test_a_socket_has_a_name(place: Path) -> None:
    from aiogpu.linux.sockets import kind

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/s")
    assert kind(os.stat(place / "s")) == "a socket"
    assert kind(os.stat("/dev/null")) == "a device"
