"""Tasks to profile. Light to import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import aiogpu
from aiogpu import sync
from aiogpu.profiling import profiled
from tests.support.gate import pass_gate


def square(number: int) -> int:
    return number * number


@aiogpu.remote(num_gpus=1)
def plain(number: int) -> int:
    return square(number)


@aiogpu.remote
async def coroutine(number: int) -> int:
    await asyncio.sleep(0)
    return square(number)


@aiogpu.remote
def generator(end: int) -> Iterator[int]:
    for number in range(end):
        yield square(number)


@aiogpu.remote
async def async_generator(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield square(number)


@aiogpu.remote(max_retries=0)
def fails(number: int) -> int:
    return square(number) // 0


@aiogpu.remote
def waits(path: str) -> None:
    pass_gate(path, "waits")


@aiogpu.remote
def removes_directory(path: str) -> int:
    os.rmdir(path)
    return square(3)


@aiogpu.remote
def multiply() -> float:
    """Multiply matrices of torch."""
    import torch

    matrix = torch.ones(8, 8)
    return float((matrix @ matrix).sum())


@sync.remote
def blocking(number: int) -> int:
    return square(number)


@profiled
@aiogpu.remote
def decorated(number: int) -> int:
    return square(number)
