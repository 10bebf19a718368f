"""System calls that change a process, and credentials of a socket's peer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aiogpu.client.references import Descriptors
from aiogpu.errors import NodeError
from aiogpu.linux import syscalls as kernel
from aiogpu.linux.sockets import peer_credentials, user
from aiogpu.memory.control_page import ControlPage
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.zygote.keeper import Watch
from tests.support.program import run


def test_children_are_found_both_ways() -> None:
    """With awkward names and zombies, without grandchildren."""
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


def test_adopt_orphans_raises_on_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_prctl", lambda *_: -1)
    with pytest.raises(OSError, match="subreaper"):
        kernel.adopt_orphans()


def test_child_dies_with_its_parent() -> None:
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


def test_child_without_a_parent_exits_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent(1 << 30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_unwritable_oom_score_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
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


OTHER = 3_000_000_000
"""A user id without a name; such large ones come from directory services."""


def test_peer_credentials_identify_the_peer() -> None:
    one, other = socket.socketpair()
    with one, other:
        told = peer_credentials(one)
    assert told == (os.getpid(), os.geteuid(), os.getegid())


def test_user_ids_are_shown_with_names() -> None:
    assert user(0) == "uid 0 (root)"
    assert user(OTHER) == f"uid {OTHER}"


def connect_channel(path: str) -> None:
    page = ControlPage.open(descriptor := ControlPage.create())
    os.close(descriptor)
    Channel(Interrupts(page)).connect(path, 7)


def connect_watch(path: str) -> None:
    Watch("keeper", 1, path, os.pidfd_open(os.getpid()))


def connect_descriptors(path: str) -> None:
    Descriptors(path, owner=7).receive(1)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # such a worker ends at once
@pytest.mark.parametrize(
    "connect", [connect_channel, connect_watch, connect_descriptors]
)
def test_server_of_another_user_is_refused(
    connect: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(20)
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        with pytest.raises(NodeError, match=f"listens at {path} .*nothing was sent"):
            connect(path)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(100) == b""
