"""A share is not free before its processes have ended.

SIGKILL does not end a process that waits in the kernel (state D). Until it ends, its
share stays taken, and status, `why()` and the log name the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu.linux.cgroup import Cgroup, ParentCgroup
from aiogpu.observe.status import NodeStatus
from aiogpu.runtime import node_cgroup
from aiogpu.runtime.callers import leases
from aiogpu.runtime.workers import pool, remains
from tests.contract import tasks
from tests.contract.unending_tasks import Holder, leave_init_and_wait
from tests.support.cgroups import PLACE, groups_of
from tests.support.gate import Gate
from tests.support.unending import frozen, needs_freezer, needs_namespaces, stuck

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node notice such processes after a tenth of the usual time."""
    monkeypatch.setattr(pool, "END_LIMIT", pool.END_LIMIT / 10)
    monkeypatch.setattr(pool, "CLOSE_LIMIT", pool.CLOSE_LIMIT / 10)
    monkeypatch.setattr(remains, "LIMIT", remains.LIMIT / 10)
    monkeypatch.setattr(leases, "LATE", leases.LATE / 100)


@pytest.fixture(params=["with cgroup2", "without"])
def has_cgroup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        monkeypatch.setattr(
            node_cgroup, "find_cgroup", lambda: ParentCgroup(None, "a test")
        )
        return False
    if PLACE.directory is None:
        pytest.skip(PLACE.reason)
    return True


class Way(NamedTuple):
    """A way to make a process that does not end.

    Attributes:
        task: the task, which holds a GPU and waits at the gate.
        find: returns the process, by that of the worker.
        hold: keeps the process from ending in a block.
        state: its state while it does not end.
    """

    task: Any
    find: Callable[[int], int]
    hold: Callable[[int], AbstractContextManager[None]]
    state: str


FREEZER = Way(
    tasks.gated.options(num_gpus=1, max_retries=0),
    lambda worker: worker,
    frozen,
    "state D, waits in the kernel",
)
NAMESPACE = Way(
    leave_init_and_wait,
    lambda worker: psutil.Process(worker).children()[0].pid,
    stuck,
    "state S, sleeps",
)
WAYS = [
    pytest.param(FREEZER, id="frozen worker", marks=needs_freezer),
    pytest.param(NAMESPACE, id="stuck descendant", marks=needs_namespaces),
]


async def until(is_so: Callable[[NodeStatus], object]) -> NodeStatus:
    """Wait until the status fulfils a condition; return the status."""
    async with asyncio.timeout(60):
        while not is_so(status := await aiogpu.status()):
            await asyncio.sleep(0)
    return status


async def started(way: Way, gate: Gate) -> tuple[aiogpu.types.Handle[Any], int]:
    """Start a task; return it with the process that will not end."""
    args = (gate.path,) if way is NAMESPACE else (gate.path, "in")
    handle = way.task.remote(*args)
    await gate.entered("in")
    return handle, way.find(gate.pids["in"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("has_cgroup")
async def test_a_share_stays_taken_until_its_process_ends(
    way: Way, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.01):
        handle, pid = await started(way, gate)
        with way.hold(pid):
            handle.cancel()
            following = tasks.pid.options(num_gpus=1).remote()
            status = await until(lambda status: status.unended)
            (left,) = status.unended
            assert pid in left.pids
            assert not left.is_lease
            named = f"{pid} ({way.state})"
            assert named in str(status)
            assert (status.available["GPU"], status.available["CPU"]) == (0, 1)
            (holder,) = status.devices[0].holders
            assert (holder.is_settling, holder.task) == (False, None)
            assert holder.unended.startswith("process")
            why = str(await following.why())
            assert named in why
            assert "after SIGKILL" in why
            assert f"keeps what it holds: process {named}" in caplog.text.replace(
                "es ", " "
            )
            # Nothing is reserved on a device of which the end is not known.
            assert status.reservation is None
            # The node serves what it can.
            assert await tasks.add.remote(1) == 2
            assert not following.done()
        assert await following
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
        assert (await aiogpu.status()).unended == ()
    assert "has ended at last; its share is released" in caplog.text


@pytest.mark.parametrize("way", WAYS)
async def test_a_task_with_such_a_process_fails_without_waiting_for_it(
    way: Way, has_cgroup: bool, gate: Gate
) -> None:
    """Its code has stopped; only what it holds is not free."""
    if has_cgroup and way is NAMESPACE:
        pytest.skip("it has left its cgroup, with its memory and its descriptors freed")
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        handle, pid = await started(way, gate)
        with way.hold(pid):
            # Also the worker: a killed keeper takes it along.
            keeper = psutil.Process(gate.pids["in"]).parent()
            assert keeper is not None
            keeper.kill()
            with pytest.raises(aiogpu.WorkerDiedError):
                await handle
            status = await aiogpu.status()
            assert status.available["GPU"] == 0
            assert pid in status.unended[0].pids or not status.unended[0].pids
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@needs_freezer
@pytest.mark.usefixtures("has_cgroup")
async def test_nothing_is_free_when_zygote_and_keeper_are_dead_too(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        handle, pid = await started(FREEZER, gate)
        with frozen(pid):
            keeper, zygote = psutil.Process(pid).parents()[:2]
            zygote.kill()
            keeper.kill()
            with pytest.raises(aiogpu.WorkerDiedError):
                await handle
            following = tasks.pid.options(num_gpus=1).remote()
            assert pid in (await until(lambda s: s.unended)).unended[0].pids
            assert str(pid) in str(await following.why())
            assert (await aiogpu.available_resources())["GPU"] == 0
        assert await following != pid


@needs_freezer
async def test_an_actor_restarts_elsewhere(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=2):
        actor = Holder.options(max_restarts=1).remote()
        call = actor.wait.remote(gate.path)
        await gate.entered("in")
        pid = gate.pids["in"]
        with frozen(pid):
            gate.forget("in")
            aiogpu.kill(actor, no_restart=False)
            with pytest.raises(aiogpu.ActorDiedError):
                await call
            again = actor.wait.remote(gate.path)
            await gate.let_pass("in")
            await again
            assert gate.pids["in"] != pid
            status = await aiogpu.status()
            assert status.available["GPU"] == 0
            assert pid in status.unended[0].pids
        await until(lambda status: status.available["GPU"] == 1)


@needs_namespaces
async def test_such_a_process_delays_no_other_slot(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zygote adopts it, and reports the ends of other keepers nevertheless."""
    monkeypatch.setattr(
        node_cgroup, "find_cgroup", lambda: ParentCgroup(None, "a test")
    )
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.01) as session:
        slots = session._session._engine._open_driver.pool.slots  # type: ignore[attr-defined]
        handle, pid = await started(NAMESPACE, gate)
        with stuck(pid):
            handle.cancel()
            await until(lambda status: status.unended)
            keeper = psutil.Process(await tasks.pid.remote()).parent()
            assert keeper is not None
            (slot,) = (slot for slot in slots if slot.keeper_pid == keeper.pid)
            keeper.kill()
            await until(lambda _: not slots.holds(slot))
            assert (await aiogpu.status()).unended


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.usefixtures("has_cgroup")
async def test_a_closed_node_names_the_process(
    way: Way, is_known: bool, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    node = await aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.01)
    handle, pid = await started(way, gate)
    with way.hold(pid):
        if is_known:
            handle.cancel()
            await until(lambda status: status.unended)
        async with asyncio.timeout(30):
            await node.shutdown()
        (said,) = (r for r in caplog.records if "could not end" in r.getMessage())
        assert said.levelno == logging.ERROR
        assert str(pid) in said.getMessage()
    # The node could not remove it while the process lived.
    for name in groups_of(os.getpid()):
        group = Cgroup(f"{PLACE.directory}/{name}")
        assert group.wait_until_empty(10)
        assert group.remove()
    if not is_known:
        with pytest.raises(aiogpu.AiogpuError):
            await handle


async def test_a_returned_lease_names_the_processes_that_use_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        async with aiogpu.lease(num_gpus=1) as gpu:
            environ = {**os.environ, **gpu.environ}
            started = await asyncio.create_subprocess_exec("sleep", "60", env=environ)
        (left,) = (await until(lambda status: status.unended)).unended
        assert (left.pids, left.is_lease) == ((started.pid,), True)
        following = tasks.pid.options(num_gpus=1).remote()
        assert f"process {started.pid} (state " in str(await following.why())
        await until(lambda _: f"process {started.pid}" in caplog.text)
        started.kill()
        await started.wait()
        assert await following
