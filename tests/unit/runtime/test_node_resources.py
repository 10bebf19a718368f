"""Resources of a node: the descriptor limit, its directory, its cgroup."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup import Cgroup, ParentCgroup
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime import node_cgroup
from aiogpu.runtime.descriptors import (
    NOFILE,
    PER_SLOT,
    RESERVE,
    DescriptorLimit,
    raised,
    slots_within,
    soft_limit,
    used_descriptors,
)
from aiogpu.runtime.directories import LONGEST, create_directory
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.wire.messages import descriptor_path
from tests.support.cgroups import groups_of, needs_cgroup

pytestmark = pytest.mark.either_loop

ALL = RESERVE + PER_SLOT * SLOTS
ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        *[(1024, 1 << 20, 100 + ALL), (1024, 4096, 4096), (1024, ENDLESS, 100 + ALL)],
        *[(100 + ALL, 1 << 20, 100 + ALL), (1 << 19, 1 << 20, 1 << 19)],
        (ENDLESS, ENDLESS, ENDLESS),
    ],
)
def test_limit_is_raised_as_slots_need_it(soft: int, hard: int, expected: int) -> None:
    assert raised(soft, hard, used=100) == expected


@pytest.mark.parametrize(
    ("soft", "slots"),
    [(1024, 178), (100 + ALL, SLOTS), (1 << 20, SLOTS), (ENDLESS, SLOTS), (90, 0)],
)
def test_number_of_slots_follows_from_the_limit(soft: int, slots: int) -> None:
    assert slots_within(soft, used=100) == slots


@pytest.fixture
def low() -> Iterator[int]:
    """Set this process's soft limit too low for any slot; return the limit."""
    soft, hard = resource.getrlimit(NOFILE)
    low = used_descriptors() + RESERVE
    resource.setrlimit(NOFILE, (low, hard))
    yield low
    resource.setrlimit(NOFILE, (soft, hard))


def child_limit(limit: DescriptorLimit) -> int:
    """Return the soft limit of a child that got the program's original limit."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    limit.hand_down(child.pid)
    soft, _ = resource.prlimit(child.pid, NOFILE)
    child.communicate()
    limit.hand_down(child.pid)  # a child that ended is no error
    return soft


def test_limit_is_raised_for_the_first_node_and_restored_at_the_end(low: int) -> None:
    _, hard = resource.getrlimit(NOFILE)
    limit = DescriptorLimit()
    assert child_limit(limit) == low
    slots = limit.acquire()
    ours = raised(low, hard, used_descriptors())
    assert (soft_limit(), slots) == (ours, slots_within(ours, used_descriptors()))
    limit.acquire()
    assert child_limit(limit) == low
    assert repr(limit) == f"<DescriptorLimit {low} -> {ours}, 2 nodes>"
    limit.release()
    assert soft_limit() == ours
    limit.release()
    assert soft_limit() == low
    assert child_limit(limit) == low


def test_limit_that_cannot_be_raised_is_used_unchanged(
    low: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this sandbox")

    _, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (low + PER_SLOT, hard))
    limit = DescriptorLimit()
    with monkeypatch.context() as patch:
        patch.setattr("aiogpu.runtime.descriptors.resource.setrlimit", refuse)
        assert limit.acquire() == 1
        limit.release()
    assert "not in this sandbox" in caplog.text
    assert soft_limit() == low + PER_SLOT


def test_too_low_limit_is_an_error(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.descriptors.raised", lambda soft, *_: soft)
    with pytest.raises(
        NodeStartError, match=f"(?s)may have {low} descriptors open.*`ulimit -Hn`"
    ):
        DescriptorLimit().acquire()


def test_sockets_fit_into_longest_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ag") as short:
        for length, is_used in ((LONGEST, True), (LONGEST + 1, False)):
            folder = f"{short}/{'x' * (length - len(short) - 1)}"
            os.mkdir(folder)
            monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
            monkeypatch.setenv("TMPDIR", short)
            path = create_directory()
            assert (os.path.dirname(path) == folder) == is_used
            for name in (f"{path}/node.sock", descriptor_path(path)):
                with socket.socket(socket.AF_UNIX) as listening:
                    listening.bind(name)


def test_directory_error_lists_places_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, _mode: int) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr("os.mkdir", refuse)
    with pytest.raises(NodeStartError, match="XDG_RUNTIME_DIR or TMPDIR") as caught:
        create_directory()
    assert "/run/user/1, /var/tmp, /tmp: [Errno 13]" in str(caught.value)


def fork_in(path: str) -> int:
    """Fork a process into a cgroup of its own; return its id."""
    group = Cgroup(path)
    group.make()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            group.enter()
            os.write(writing, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return pid


@needs_cgroup
async def test_processes_that_do_not_die_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_cgroup, "LIMIT", 0.01)
    node = NodeCgroup(asyncio.get_running_loop())
    node.choose("aiogpu-test")
    pid = fork_in(f"{node.path}/3")
    with monkeypatch.context() as patch:
        patch.setattr(Cgroup, "kill", lambda _group: None)
        path = node.path
        await node.remove()
        assert f"{path} cannot be removed: [{pid}]" in caplog.text
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    node.path = path
    await node.remove()
    assert groups_of(os.getpid()) == []


async def test_node_without_cgroup_has_none_for_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        node_cgroup, "find_cgroup", lambda: ParentCgroup(None, "why not")
    )
    node = NodeCgroup(asyncio.get_running_loop())
    assert repr(node) == "<NodeCgroup the node has not started>"
    node.choose("aiogpu-test")
    assert (node.path, node.reason) == ("", "why not")
    assert repr(node) == "<NodeCgroup why not>"
    assert node.of_slot(3) is None
    await node.remove()
