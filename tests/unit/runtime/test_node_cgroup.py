"""The node's cgroup: the processes of a slot are ended in it, and it is removed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from aiogpu.linux.cgroup import Cgroup, Place
from aiogpu.runtime import node_cgroup
from aiogpu.runtime.node_cgroup import NodeCgroup
from tests.support.cgroups import PLACE, groups_of, needs_cgroup


def fork_in(path: str) -> int:
    """A process that is in a group of its own."""
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
async def test_a_slots_processes_are_ended_before_it_is_told() -> None:
    loop = asyncio.get_running_loop()
    node = NodeCgroup(loop)
    node.choose("aiogpu-test")
    assert node.path == f"{PLACE.directory}/aiogpu-test-{os.getpid()}"
    assert groups_of(os.getpid()) == [], "it is made with a slot's"
    first, other = (fork_in(f"{node.path}/{slot}") for slot in (3, 4))
    told = asyncio.Event()
    node.end_slot(3, told.set)
    async with asyncio.timeout(60):
        await told.wait()
    assert not Cgroup(f"{node.path}/3").is_populated
    assert Cgroup(f"{node.path}/4").is_populated
    told.clear()
    node.end_slot(5, told.set)
    assert told.is_set(), "nobody is there"
    await node.remove()
    assert groups_of(os.getpid()) == []
    for pid in (first, other):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    await node.remove()


@needs_cgroup
async def test_what_does_not_die_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_cgroup, "LIMIT", 0.01)
    node = NodeCgroup(asyncio.get_running_loop())
    node.choose("aiogpu-test")
    pid = fork_in(f"{node.path}/3")
    with monkeypatch.context() as patch:
        patch.setattr(Cgroup, "kill", lambda _group: None)
        told = asyncio.Event()
        node.end_slot(3, told.set)
        async with asyncio.timeout(60):
            await told.wait()
        assert f"processes [{pid}] of an ended worker do not die" in caplog.text
        path = node.path
        await node.remove()
        assert f"{path} cannot be removed: [{pid}]" in caplog.text
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    node.path = path
    await node.remove()
    assert groups_of(os.getpid()) == []


async def test_without_a_cgroup_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_cgroup, "find_cgroup", lambda: Place(None, "why not"))
    node = NodeCgroup(asyncio.get_running_loop())
    assert repr(node) == "<NodeCgroup the node has not started>"
    node.choose("aiogpu-test")
    assert (node.path, node.reason, repr(node)) == (
        "",
        "why not",
        "<NodeCgroup why not>",
    )
    told: list[int] = []
    node.end_slot(3, lambda: told.append(3))
    assert told == [3]
    await node.remove()
