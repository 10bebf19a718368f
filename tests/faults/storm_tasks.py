"""The tasks of `test_storm.py`. Light to import."""

from __future__ import annotations

import asyncio
import os

import aiogpu
from tests.contract.phase_tasks import spin, swallowed


@aiogpu.remote
def quick(number: int) -> int:
    return number


@aiogpu.remote
async def soft(number: int) -> int:
    await asyncio.sleep(0)
    return number


@aiogpu.remote
def slow(number: int) -> int:
    for _ in range(number * 1_000 % 500_000):
        pass
    return number


@aiogpu.remote
def failing(number: int) -> int:
    raise ValueError(number)


@aiogpu.remote
def dying(number: int) -> int:
    os._exit(number % 200)


@aiogpu.remote
def deaf(number: int) -> int:
    while True:
        with swallowed():
            spin()
    return number


@aiogpu.remote
def nested(number: int) -> int:
    return aiogpu.get(quick.remote(number))


@aiogpu.remote
async def nested_softly(number: int) -> int:
    numbers = await asyncio.gather(*(soft.remote(number) for _ in range(3)))
    return max(numbers)


@aiogpu.remote
def forgetful(number: int) -> int:
    """Leave child tasks behind, which end with this task."""
    for _ in range(3):
        deaf.remote(number)
    return number
