"""Scenarios of tasks and actors, during which processes are killed. Light to import."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import aiogpu

Scenario = Callable[[int], Awaitable[object]]
"""Runs some tasks with this number of retries; returns 2 if all is well."""


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
async def async_parent(number: int, max_retries: int) -> int:
    return await child.options(max_retries=max_retries).remote(number)


@aiogpu.remote
def leaves_a_daemon(number: int) -> int:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return number + 1


async def run_isolated_task(max_retries: int) -> object:
    return await isolated.options(num_gpus=1, max_retries=max_retries).remote(1)


async def run_reused_tasks(max_retries: int) -> object:
    task = reused.options(max_retries=max_retries)
    return max(await asyncio.gather(*(task.remote(1) for _ in range(3))))


async def run_parent_and_child(max_retries: int) -> object:
    return await parent.options(max_retries=max_retries).remote(1, max_retries)


async def run_async_parent_and_child(max_retries: int) -> object:
    return await async_parent.options(max_retries=max_retries).remote(1, max_retries)


async def run_task_with_daemon(max_retries: int) -> object:
    return await leaves_a_daemon.options(num_gpus=1, max_retries=max_retries).remote(1)


@aiogpu.remote(max_buffered=2)
def yields(number: int) -> Iterator[int]:
    for _ in range(3):
        yield number + 1


@aiogpu.remote(max_buffered=2)
def passes_on(number: int, max_retries: int) -> Iterator[int]:
    yield from yields.options(max_retries=max_retries).remote(number)  # type: ignore[misc]


async def run_stream_and_child(max_retries: int) -> object:
    task = passes_on.options(max_retries=max_retries)
    items = [each async for each in task.remote(1, max_retries)]
    async for each in task.remote(1, max_retries):
        if each:
            break
    assert items == [2] * 3, items
    return 2


@aiogpu.remote
class Adder:
    """An actor that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += 1
        return number + 1


@aiogpu.remote
class AsyncAdder(Adder.__wrapped__):  # type: ignore[name-defined, misc]
    async def add(self, number: int) -> int:
        self.count += 1
        await asyncio.sleep(0)
        return number + 1


async def _run_actor(kind: Any, max_retries: int) -> object:
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


async def run_actor(max_retries: int) -> object:
    return await _run_actor(Adder, max_retries)


async def run_async_actor(max_retries: int) -> object:
    return await _run_actor(AsyncAdder, max_retries)


async def _lost_calls(actor: Any, calls: int) -> list[BaseException]:
    """Make calls at once; return the errors of those that failed."""
    results = await asyncio.gather(
        *(actor.add.remote(1) for _ in range(calls)), return_exceptions=True
    )
    lost = [error for error in results if isinstance(error, BaseException)]
    assert results.count(2) == calls - len(lost)
    return lost


async def run_actor_without_call_retries(max_retries: int) -> object:
    """An actor that may restart loses at most the call that had begun."""
    actor = Adder.options(num_gpus=1, max_restarts=max_retries).remote()
    # A single call may also be the one during which the process is killed.
    lost = await _lost_calls(actor, 3) or await _lost_calls(actor, 1)
    if max_retries:
        assert len(lost) <= 1
        assert all(getattr(error, "is_restarting", False) for error in lost), lost
        assert not lost or await actor.add.remote(1) == 2
    elif lost:
        raise lost[0]
    return 2


SCENARIOS: Final[dict[str, Scenario]] = {
    "isolated": run_isolated_task,
    "reused": run_reused_tasks,
    "nested": run_parent_and_child,
    "nested-async": run_async_parent_and_child,
    "stream": run_stream_and_child,
    "daemon": run_task_with_daemon,
    "actor": run_actor,
    "actor-async": run_async_actor,
    "actor-lossy": run_actor_without_call_retries,
}
