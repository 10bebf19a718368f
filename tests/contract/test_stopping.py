"""`is_stopping` and `stop_grace`: a task that knows that its program or node stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.cli.box import box
from tests.contract import timed_tasks
from tests.contract.node_here import node_here
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.mark.needs("stop graces")
async def test_it_has_its_grace_when_the_node_is_closed(
    address: str, gate: Gate
) -> None:
    kinds: dict[str, Any] = {"soft": timed_tasks.save}
    if address != "inline":  # where one runs at a time
        kinds |= {"plain": timed_tasks.save_plainly}
    async with aiogpu.init(address=address, num_cpus=2):
        handles = [
            kind.options(stop_grace=60).remote(gate.path, name)
            for name, kind in kinds.items()
        ]
        await gate.entered(*(f"{name}-False" for name in kinds))
        closing = asyncio.ensure_future(aiogpu.shutdown())
        await gate.entered(*(f"{name}-told" for name in kinds))
        assert not closing.done()
        for name in kinds:
            gate.release(f"{name}-told")
        await gate.entered(*(f"{name}-saved" for name in kinds))
        await closing
        for handle in handles:
            with pytest.raises(aiogpu.errors.NodeClosedError):
                await handle


@pytest.mark.needs("stop graces")
async def test_who_needs_longer_than_its_grace_is_stopped(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = timed_tasks.save.options(stop_grace=0.1).remote(gate.path, "in")
        await gate.entered("in-False")
        closing = asyncio.ensure_future(aiogpu.shutdown())
        await gate.entered("in-told-cancelled")
        await closing
        assert "in-saved" not in gate.pids
        assert handle.done()


@pytest.mark.needs("stop graces")
@pytest.mark.parametrize("kind", ["task", "method"])
async def test_one_that_is_cancelled_knows_and_has_no_grace(
    address: str, kind: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        assert not aiogpu.get_runtime_context().is_stopping
        if kind == "task":
            call: Any = timed_tasks.look_as_task.options(stop_grace=60)
            handle = call.remote(gate.path, "in")
            await gate.entered("in")
            handle.cancel()
            await gate.entered("in-True")
        else:
            async with timed_tasks.Looking.remote() as actor:
                handle = actor.look.remote(gate.path, "in")
                await gate.entered("in")
                handle.cancel()
                await gate.entered("in-False")  # the call ends, the actor goes on
                assert await actor.is_stopping.remote() is False


async def test_the_tasks_of_a_program_that_leaves_are_told_alone(
    tmp_path: Path, gate: Gate
) -> None:
    """What it has left detached goes on, and so does what others have."""
    async with node_here(tmp_path) as here:
        async with here.join() as leaves:
            half = timed_tasks.save.options(num_cpus=0.5)
            kept = half.options(lifetime="detached").remote(gate.path, "kept")
            handle = half.options(stop_grace=60).remote(gate.path, "own")
            await gate.entered("own-False", "kept-False")
            await leaves.shutdown(at_once=True)
            await gate.entered("own-told")
            assert handle.done()
            assert kept.done()
        async with here.join():
            other = timed_tasks.look_as_task.remote(gate.path, "other")
            await gate.entered("other")
            gate.release("other", "own-told")
            await other
            await gate.entered("own-saved", "other-False")
        assert "kept-told" not in gate.pids


async def test_a_drain_tells_all_and_waits_for_who_needs_longer(gate: Gate) -> None:
    """The one that has no grace is stopped when the drain is over."""
    with box() as here:
        await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in here.variables.items():
                patch.setenv(name, value)
            async with aiogpu.init(address="auto"):
                patient = timed_tasks.save.options(stop_grace=60)
                saves = patient.remote(gate.path, "in")
                other = timed_tasks.look_as_task.remote(gate.path, "other")
                await gate.entered("in-False", "other")
                stopping = asyncio.ensure_future(
                    asyncio.to_thread(here.run, "stop", "--drain=0.5")
                )
                await gate.entered("in-told", "other-True")
                assert not stopping.done()
                gate.release("in-told")
                await gate.entered("in-saved")
                await stopping
                for handle in (saves, other):
                    with pytest.raises(aiogpu.errors.NodeError):
                        await handle
