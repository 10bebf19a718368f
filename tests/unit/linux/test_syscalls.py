"""Linux facilities that change a process, each in a program of its own."""

from __future__ import annotations

import os

import pytest

from aiogpu.linux import syscalls as kernel
from tests.support.program import run


def test_a_process_has_a_name() -> None:
    source = """
    from aiogpu.linux import syscalls as kernel
    kernel.set_process_name("aiogpu-work-123456")
    print(open("/proc/self/comm").read(), end="")
    """
    assert run(source) == "aiogpu-work-123\n"


def test_children_are_found_in_both_ways() -> None:
    """With awkward names, zombies included; grandchildren are not ours."""
    source = """
    import os, signal
    import sys
    from aiogpu.linux import syscalls as kernel
    before = set(sys.modules)
    assert kernel.children() == []
    assert set(sys.modules) == before, "a zygote shall look without an import"
    assert kernel._children_by_search() == []
    def child(name, ends):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            kernel.set_process_name(name)
            if ends:
                os._exit(0)
            me = os.getpid()
            if os.fork() == 0:
                kernel.die_with_parent(me)
                os.write(writing, b".")
            signal.pause()
        if ends:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        else:
            os.read(reading, 1)
        return pid
    pids = {child("a) S 1 (b", False), child(" ", False)}
    zombie = child("z", True)
    try:
        assert set(kernel.children()) == pids | {zombie}, kernel.children()
        assert set(kernel._children_by_search()) == pids | {zombie}
    finally:
        for pid in pids | {zombie}:
            kernel.kill(pid)
            os.waitpid(pid, 0)
    kernel.kill(zombie)
    assert kernel.children() == []
    """
    run(source)


def test_orphans_are_adopted() -> None:
    source = """
    import os
    from aiogpu.linux import syscalls as kernel
    kernel.adopt_orphans()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.setsid()
            os.close(writing)
            os.read(reading, 1)  # until the last of the others closes it
            os._exit(7)
        os._exit(0)
    os.waitpid(pid, 0)
    (orphan,) = kernel.children()
    os.close(writing)
    print(os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]))
    """
    assert run(source) == "7\n"


def test_a_kernel_that_cannot_adopt_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_prctl", lambda *_: -1)
    with pytest.raises(OSError, match="subreaper"):
        kernel.adopt_orphans()


def test_a_child_dies_with_its_parent() -> None:
    source = """
    import os, signal
    from aiogpu.linux import syscalls as kernel
    kernel.adopt_orphans()
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        me = os.getpid()
        if os.fork() == 0:
            kernel.die_with_parent(me)
            os.write(writing, b".")
            signal.pause()
        signal.pause()
    os.read(reading, 1)
    os.kill(parent, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) for _ in range(2)]
    print(statuses)
    """
    assert run(source) == "[-9, -9]\n"


def test_a_child_whose_parent_has_gone_ends_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent(1 << 30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_forks_inherit_what_is_raised_meanwhile() -> None:
    source = """
    import os
    from aiogpu.linux.syscalls import OomScore
    def own():
        return open("/proc/self/oom_score_adj").read().strip()
    before = own()
    score = OomScore()
    score.expose()
    pid = os.fork()
    if pid == 0:
        os._exit(own() == "1000")
    score.restore()
    assert own() == before
    assert os.waitpid(pid, 0)[1] == 1 << 8
    score.close()
    score.expose()
    assert own() == before
    """
    run(source)


def test_where_it_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    score = kernel.OomScore()
    monkeypatch.setattr(kernel.os, "pwrite", forbidden)
    score.expose()
    score.restore()
    score.close()
    monkeypatch.setattr(kernel.os, "open", forbidden)
    absent = kernel.OomScore()
    absent.expose()
    absent.close()
    assert os.path.exists("/proc/self/oom_score_adj")
