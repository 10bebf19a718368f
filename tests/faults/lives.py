"""The lives of tasks whose steps are counted. Light to import."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import aiogpu

Life = Callable[[int], Awaitable[object]]
"""Runs some tasks, each retried so often; gives what came of them."""


@aiogpu.remote
def isolated(number: int) -> int:
    return number + 1


@aiogpu.remote
def reused(number: int) -> int:
    return number + 1


@aiogpu.remote
def child(number: int) -> int:
    return number + 1


@aiogpu.remote
def parent(number: int, max_retries: int) -> int:
    return aiogpu.get(child.options(max_retries=max_retries).remote(number))


@aiogpu.remote
async def soft_parent(number: int, max_retries: int) -> int:
    return await child.options(max_retries=max_retries).remote(number)


@aiogpu.remote
def leaves_a_daemon(number: int) -> int:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return number + 1


async def life_of_an_isolated_task(max_retries: int) -> object:
    return await isolated.options(num_gpus=1, max_retries=max_retries).remote(1)


async def life_of_reused_tasks(max_retries: int) -> object:
    task = reused.options(max_retries=max_retries)
    return max(await asyncio.gather(*(task.remote(1) for _ in range(3))))


async def life_of_a_parent_and_its_child(max_retries: int) -> object:
    return await parent.options(max_retries=max_retries).remote(1, max_retries)


async def life_of_a_soft_parent_and_its_child(max_retries: int) -> object:
    return await soft_parent.options(max_retries=max_retries).remote(1, max_retries)


async def life_of_a_task_with_a_daemon(max_retries: int) -> object:
    return await leaves_a_daemon.options(num_gpus=1, max_retries=max_retries).remote(1)


@aiogpu.remote(max_buffered=2)
def yields(number: int) -> Iterator[int]:
    for _ in range(3):
        yield number + 1


@aiogpu.remote(max_buffered=2)
def passes_on(number: int, max_retries: int) -> Iterator[int]:
    yield from yields.options(max_retries=max_retries).remote(number)  # type: ignore[misc]


async def life_of_a_stream_and_its_child(max_retries: int) -> object:
    task = passes_on.options(max_retries=max_retries)
    found = [each async for each in task.remote(1, max_retries)]
    async for each in task.remote(1, max_retries):
        if each:
            break
    assert found == [2] * 3, found
    return 2


@aiogpu.remote
class Resident:
    """An actor that keeps count."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += 1
        return number + 1


@aiogpu.remote
class SoftResident(Resident.__wrapped__):  # type: ignore[name-defined, misc]
    async def add(self, number: int) -> int:
        self.count += 1
        await asyncio.sleep(0)
        return number + 1


async def _life_of(kind: Any, max_retries: int) -> object:
    actor = kind.options(
        num_gpus=1, max_restarts=max_retries, max_task_retries=max_retries
    ).remote()
    results = await asyncio.gather(
        *(actor.add.remote(1) for _ in range(3)), return_exceptions=True
    )
    for error in results:
        if isinstance(error, BaseException):
            raise error
    assert results == [2, 2, 2]
    return 2


async def life_of_an_actor(max_retries: int) -> object:
    return await _life_of(Resident, max_retries)


async def life_of_a_soft_actor(max_retries: int) -> object:
    return await _life_of(SoftResident, max_retries)


async def _lost_of(actor: Any, calls: int) -> list[BaseException]:
    """What became of those calls that have failed."""
    results = await asyncio.gather(
        *(actor.add.remote(1) for _ in range(calls)), return_exceptions=True
    )
    lost = [error for error in results if isinstance(error, BaseException)]
    assert results.count(2) == calls - len(lost)
    return lost


async def life_of_an_actor_whose_calls_are_lost(max_retries: int) -> object:
    """Of calls in a row at most the one that had begun is lost, if it may restart."""
    actor = Resident.options(num_gpus=1, max_restarts=max_retries).remote()
    # One that comes alone may be the one that is struck as well.
    lost = await _lost_of(actor, 3) or await _lost_of(actor, 1)
    if max_retries:
        assert len(lost) <= 1
        assert all(getattr(error, "is_restarting", False) for error in lost), lost
        assert not lost or await actor.add.remote(1) == 2
    elif lost:
        raise lost[0]
    return 2


LIVES: Final[dict[str, Life]] = {
    "isolated": life_of_an_isolated_task,
    "reused": life_of_reused_tasks,
    "nested": life_of_a_parent_and_its_child,
    "nested-soft": life_of_a_soft_parent_and_its_child,
    "stream": life_of_a_stream_and_its_child,
    "daemon": life_of_a_task_with_a_daemon,
    "actor": life_of_an_actor,
    "actor-soft": life_of_a_soft_actor,
    "actor-lossy": life_of_an_actor_whose_calls_are_lost,
}
