"""The cgroup of a worker slot: its keeper starts in it, and all in it can be ended."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import Cgroup, SlotCgroup, end_node, end_slot, fork_into_slot
from tests.support.cgroups import group, needs_cgroup
from tests.support.program import run

pytestmark = needs_cgroup


@pytest.fixture
def node() -> Iterator[Cgroup]:
    with group("node") as node:
        yield node


def fork_into(node: Cgroup) -> tuple[str, int]:
    """Fork a slot's keeper; the group that it finds itself in, and its exit code."""
    reading, writing = os.pipe()
    pid = fork_into_slot(node.path, 3)
    if pid == 0:
        try:
            with open("/proc/self/cgroup", "rb") as file:
                os.write(writing, file.read())
        finally:
            os._exit(7)
    os.close(writing)
    with os.fdopen(reading) as file:
        (mine,) = (line for line in file.read().splitlines() if line[:3] == "0::")
    return os.path.basename(mine), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_keeper_is_born_in_its_group(node: Cgroup) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert fork_into(node) == ("3", 7)
    assert fork_into(node) == ("3", 7)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_group_that_was_killed_before(node: Cgroup) -> None:
    """Such a group kills what is born in it; it is made anew, or not used."""
    slot = node.child("3")
    slot.make()
    slot.kill()
    assert fork_into(node) == ("3", 7)
    slot.child("in the way").make()
    slot.kill()
    slot.child("in the way").remove()
    assert fork_into(node)[1] == 7


def test_a_kernel_that_cannot_do_so(
    node: Cgroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests have left is not to go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(kernel, "SYS_CLONE3", 1 << 20)
    with pytest.raises(OSError, match="clone3"):
        kernel.fork_into(0)
    mine, code = fork_into(node)
    assert (mine != "3", code) == (True, 7)
    assert len(os.listdir("/proc/self/fd")) == before
    assert fork_into(Cgroup(""))[1] == 7


PROGRAM = """
    import os, signal, sys
    from aiogpu.linux.cgroup import Cgroup
    from aiogpu.linux import cgroup
    from aiogpu.linux import syscalls as kernel
    from aiogpu.linux.cgroup import SlotCgroup, end_node
    from aiogpu.worker.zygote.keeper import end_children
    from tests.support.cgroups import PLACE

    node = f"{PLACE.directory}/test-keeper-{os.getpid()}"
    kernel.adopt_orphans()

    def mine():
        lines = open("/proc/self/cgroup").read().splitlines()
        return [line for line in lines if line.startswith("0::")][0]

    origin = mine()
    slot = SlotCgroup(node, 3)
    assert mine().endswith("/3"), mine()
    assert not slot.has_others
    """


def test_all_but_the_keeper_are_ended() -> None:
    source = """
    reading, writing = os.pipe()
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.write(writing, b".")
            signal.pause()
    os.read(reading, 1), os.read(reading, 1)
    assert slot.has_others
    slot.end_others()
    assert not slot.has_others
    assert mine().endswith("/3"), mine()
    end_children()
    Cgroup(node).child("4").make()
    slot.remove()
    assert mine() == origin
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


def test_what_runs_away_by_forking_is_caught() -> None:
    """A chain of daemons, each gone before it can be signalled."""
    source = """
    kernel.kill = lambda pid, number=9: True
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, b".")
        while True:
            os.setsid()
            if os.fork():
                os._exit(0)
    os.read(reading, 1)
    end_children(slot.end_others)
    assert kernel.children() == []
    assert not slot.has_others
    slot.remove()
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


def test_what_may_not_be_signalled_is_ended() -> None:
    source = """
    pid = os.fork()
    if pid == 0:
        signal.pause()
    def forbidden(pid, number=9):
        return False
    kernel.kill = forbidden
    end_children(slot.end_others)
    assert kernel.children() == []
    slot.remove()
    """
    run(PROGRAM + source)


def test_one_that_cannot_step_out_ends_them_one_by_one() -> None:
    source = """
    for _ in range(3):
        if os.fork() == 0:
            signal.pause()
    slot._origin = Cgroup("/nowhere")
    slot.end_others()
    assert not slot.has_others
    end_children()
    slot._origin = Cgroup(os.path.dirname(node))
    slot.remove()
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


def test_one_that_cannot_come_back_does_without() -> None:
    source = """
    if os.fork() == 0:
        signal.pause()
    enter = Cgroup.enter
    def enter_but_the_slot(group):
        if group.path.endswith("/3"):
            raise OSError("full")
        enter(group)
    Cgroup.enter = enter_but_the_slot
    slot.end_others()
    end_children()
    assert not slot.has_others
    slot.end_others()
    assert mine() == origin
    end_node(node)
    assert not os.path.exists(node)
    """
    run(PROGRAM + source)


def test_without_a_group_nothing_is_done(tmp_path: object) -> None:
    for node in ("", f"{tmp_path}/no/cgroup2"):
        slot = SlotCgroup(node, 3)
        assert not slot.has_others
        slot.end_others()
        slot.forget()
        slot.remove()
    end_node("")
    end_slot("", 3)
    assert not os.path.exists(f"{tmp_path}/no/cgroup2/3/cgroup.procs")
