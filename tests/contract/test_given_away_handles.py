"""[B16] Handles of a task's own calls, which the task gives away and then ends."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import aiogpu

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]

ROUNDS = 40


@aiogpu.remote
def quick() -> int:
    return 1


@aiogpu.remote
def large() -> bytes:
    return bytes(1 << 20)


@aiogpu.remote
def failing() -> None:
    raise KeyError("it")


@aiogpu.remote(max_calls=1)
def gives(kind: Any) -> list[Any]:
    return [kind.remote()]


@aiogpu.remote(max_calls=1)
async def gives_softly(kind: Any) -> list[Any]:
    return [kind.remote()]


@pytest.mark.parametrize("giver", [gives, gives_softly])
async def test_the_process_may_end_before_the_result_comes(giver: Any) -> None:
    """The result of the call may be on its way to the process that ends."""
    async with aiogpu.init(num_cpus=2), asyncio.timeout(60):
        for _ in range(ROUNDS):
            (handle,) = await giver.remote(quick)
            assert await handle == 1
        for _ in range(5):
            (handle,) = await giver.remote(large)
            assert len(await handle) == 1 << 20
            (handle,) = await giver.remote(failing)
            with pytest.raises(KeyError):
                await handle


@aiogpu.remote
class Box:
    def __init__(self) -> None:
        self.content: list[Any] = []

    def keep(self, content: list[Any]) -> None:
        self.content = content

    def take(self) -> list[Any]:
        return self.content


@aiogpu.remote(max_retries=0)
def gives_and_is_killed(box: Any) -> None:
    aiogpu.get(box.keep.remote([quick.remote()]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.needs("processes")
async def test_the_process_may_be_killed() -> None:
    """The result comes all the same, or an error says that it is lost."""
    async with aiogpu.init(num_cpus=3), asyncio.timeout(60):
        box = Box.remote()
        for _ in range(ROUNDS // 2):
            with pytest.raises(aiogpu.WorkerDiedError):
                await gives_and_is_killed.remote(box)
            (handle,) = await box.take.remote()
            (outcome,) = await asyncio.gather(handle, return_exceptions=True)
            lost = isinstance(outcome, aiogpu.WorkerDiedError)
            cancelled = isinstance(outcome, aiogpu.TaskCancelledError)
            assert outcome == 1 or lost or cancelled, outcome
            if lost:
                assert "is lost" in str(outcome)


@aiogpu.remote
def gives_call(box: Any) -> list[Any]:
    return [box.take.remote()]


async def test_the_call_may_be_of_an_actor_that_has_yet_to_start() -> None:
    """The actor has no process yet when the task that has called it ends."""
    async with aiogpu.init(num_cpus=3, num_gpus=1), asyncio.timeout(60):
        first = Box.options(num_gpus=1).remote()
        await first.take.remote()
        waiting = Box.options(num_gpus=1).remote()
        (handle,) = await gives_call.remote(waiting)
        aiogpu.kill(first)
        assert await handle == []
