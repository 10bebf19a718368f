"""The lives of tasks whose steps are counted. Light to import."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from typing import Final

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


LIVES: Final[dict[str, Life]] = {
    "isolated": life_of_an_isolated_task,
    "reused": life_of_reused_tasks,
    "nested": life_of_a_parent_and_its_child,
    "nested-soft": life_of_a_soft_parent_and_its_child,
    "daemon": life_of_a_task_with_a_daemon,
}
