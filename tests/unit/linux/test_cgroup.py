"""A group of cgroup2, where this machine lets a test make one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.linux.cgroup import Cgroup
from tests.support.cgroups import group, needs_cgroup
from tests.support.program import run


@pytest.fixture
def made() -> Iterator[Cgroup]:
    with group("one") as made:
        yield made


def enter(made: Cgroup) -> int:
    """Have a process that ignores signals in it, in a session of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            made.enter()
            os.write(writing, b".")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    os.close(writing)
    return pid


@needs_cgroup
def test_who_is_in_it(made: Cgroup) -> None:
    assert (made.pids(), made.is_populated) == ([], False)
    assert made.wait_until_empty(0)
    below = made.child("below")
    below.make()
    pid = enter(below)
    assert below.pids() == [pid]
    assert (made.pids(), made.is_populated) == ([], True), "those below count"
    assert not made.wait_until_empty(0)
    assert not made.remove()
    made.kill()
    os.waitpid(pid, 0)
    assert made.wait_until_empty(10)


@needs_cgroup
@pytest.mark.parametrize("way", ["at once", "one by one"])
def test_all_in_it_and_below_are_ended(
    way: str, made: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = made.child("below")
    below.make()
    pids = [enter(made), enter(below)]
    if way == "one by one":

        def write(_group: Cgroup, name: str, _value: bytes) -> None:
            raise FileNotFoundError(name)

        monkeypatch.setattr(Cgroup, "_write", write)
    made.kill()
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert made.wait_until_empty(10)


@needs_cgroup
def test_one_that_kills_by_hand_spares_itself() -> None:
    source = """
    from aiogpu.linux.cgroup import Cgroup
    from tests.support.cgroups import group
    with group("self") as made:
        made.enter()
        made._kill_each()
        Cgroup("/".join(made.path.split("/")[:-1])).enter()
        print("alive")
    """
    assert run(source) == "alive\n"


@needs_cgroup
def test_it_is_empty_when_only_zombies_are_left(made: Cgroup) -> None:
    pid = enter(made)
    made.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert made.wait_until_empty(10)
    assert made.pids() == []
    os.waitpid(pid, 0)


@needs_cgroup
def test_making_and_removing(made: Cgroup) -> None:
    deep = made.child("a").child("b")
    deep.make()
    deep.make()
    assert [child.path for child in made.children()] == [f"{made.path}/a"]
    assert made.remove()
    assert not os.path.exists(made.path)
    assert made.remove(), "it has gone"


def test_one_that_is_not_there(tmp_path: Path) -> None:
    gone = Cgroup(f"{tmp_path}/gone")
    assert repr(gone) == f"<Cgroup {tmp_path}/gone>"
    assert (gone.pids(), gone.children(), gone.is_populated) == ([], [], False)
    assert gone.wait_until_empty(10)
    assert gone.remove()
    gone.kill()
    with pytest.raises(FileNotFoundError):
        gone.enter()
