"""Nothing outlives its lease: with cgroups beside the keepers, and without them.

What a task leaves is a daemon in a session of its own that holds its end of a pipe;
the test sees it go, whoever was killed and in whatever order.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

import aiogpu
from aiogpu.linux.cgroup import Place
from aiogpu.runtime import node_cgroup
from tests.contract import tasks
from tests.contract.alive import is_alive
from tests.support.cgroups import PLACE, all_groups, groups_of
from tests.support.gate import Gate
from tests.support.program import start

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture(params=["with cgroup2", "without"])
def has_cgroup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        monkeypatch.setattr(node_cgroup, "find_cgroup", lambda: Place(None, "a test"))
        return False
    if PLACE.directory is None:
        pytest.skip(PLACE.reason)
    return True


class House:
    """A node whose one task has left a daemon and runs on."""

    def __init__(self, gate: Gate, handle: Awaitable[str]) -> None:
        self.handle = handle
        self.daemon = psutil.Process(gate.pids["daemon"])
        self.worker = psutil.Process(gate.pids["task"])
        keeper = self.worker.parent()
        assert keeper is not None
        self.keeper = keeper
        zygote = keeper.parent()
        assert zygote is not None
        self.zygote = zygote

    async def see_end(self, process: psutil.Process) -> None:
        async with asyncio.timeout(60):
            while is_alive(process):
                await asyncio.sleep(0)


@asynccontextmanager
async def house(gate: Gate) -> AsyncIterator[House]:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        task = tasks.leave_daemon_and_wait.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path)
        await gate.entered("daemon", "task")
        yield House(gate, handle)


async def test_a_worker_is_born_in_its_slots_group(
    has_cgroup: bool, gate: Gate
) -> None:
    async with house(gate) as it:
        found = [group_of(process.pid) for process in (it.daemon, it.worker, it.keeper)]
        assert len(set(found)) == 1
        groups = groups_of(os.getpid())
        if has_cgroup:
            assert [name in found[0] for name in groups] == [True]
            assert found[0].endswith("/0")
            assert group_of(it.zygote.pid) == group_of(os.getpid())
        else:
            assert (groups, found[0]) == ([], group_of(os.getpid()))
        gate.release("task")
        await it.handle


def group_of(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return line.strip()
    return ""


@pytest.mark.usefixtures("has_cgroup")
async def test_a_daemon_ends_before_its_share_is_free(gate: Gate) -> None:
    async with house(gate) as it:
        gate.release("task")
        await it.handle
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(it.daemon)


@pytest.mark.usefixtures("has_cgroup")
async def test_a_killed_keeper_takes_all_along(gate: Gate) -> None:
    async with house(gate) as it:
        it.keeper.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await it.handle
        assert not is_alive(it.daemon)
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("first", ["zygote", "keeper"])
async def test_zygote_and_keeper_are_killed(
    first: str, has_cgroup: bool, gate: Gate
) -> None:
    """Then nobody adopts the daemon; its group is what it cannot leave."""
    async with house(gate) as it:
        if first == "zygote":
            it.zygote.kill()
            await it.see_end(it.zygote)
            it.keeper.kill()
        else:
            it.zygote.suspend()
            it.keeper.kill()
            await it.see_end(it.keeper)
            it.zygote.kill()
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await it.handle
        if has_cgroup:
            assert not is_alive(it.daemon)
        else:
            # What docs/decisions/0009 says of a machine without cgroups.
            assert is_alive(it.daemon)
            it.daemon.kill()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_an_end_while_a_slot_is_being_ended(has_cgroup: bool, gate: Gate) -> None:
    async with house(gate) as it:
        it.zygote.kill()
        await it.see_end(it.zygote)
        it.keeper.kill()
    with pytest.raises(aiogpu.AiogpuError):
        await it.handle
    if not has_cgroup:
        it.daemon.kill()
    await it.see_end(it.daemon)


DRIVER = """
    import asyncio, sys, aiogpu
    from aiogpu.linux.cgroup import Place
    from aiogpu.runtime import node_cgroup
    from tests.contract import tasks
    if sys.argv[2] == "without":
        node_cgroup.find_cgroup = lambda: Place(None, "a test")
    async def main():
        async with aiogpu.init(num_cpus=4, num_gpus=1):
            first = tasks.leave_daemon_and_wait.options(num_gpus=1).remote(sys.argv[1])
            second = tasks.gated.remote(sys.argv[1], "second")
            await first
    aiogpu.run(main())
"""

LATE = "driver, and later the zygote"
FIRST: dict[str, Callable[[House], object]] = {
    "driver": bool,
    "driver and keeper": lambda it: it.keeper.kill(),
    "driver and zygote": lambda it: it.zygote.kill(),
    # So it is where it was killed in time but has no CPU to end on.
    LATE: lambda it: it.zygote.suspend(),
}


@pytest.mark.parametrize("who", FIRST)
async def test_a_killed_driver_leaves_nothing(
    who: str, has_cgroup: bool, gate: Gate
) -> None:
    # Others may have left some long ago, whose driver had the same process id.
    others = all_groups()
    driver = start(DRIVER, gate.path, "with" if has_cgroup else "without")
    try:
        await gate.entered("daemon", "task", "second")
        it = House(gate, asyncio.sleep(0, ""))
        everyone = psutil.Process(driver.pid).children(recursive=True)
        assert {it.daemon, it.worker, it.keeper, it.zygote} <= set(everyone)
        assert len({*groups_of(driver.pid)} - others) == has_cgroup
        keepers = it.zygote.children()
        FIRST[who](it)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    async with asyncio.timeout(60):
        if who == LATE:
            while any(map(is_alive, keepers)):
                await asyncio.sleep(0)
            it.zygote.kill()
        while any(map(is_alive, everyone)):
            await asyncio.sleep(0)
        # The last of them has them removed just before it ends.
    assert {*groups_of(driver.pid)} <= others
    await it.handle
