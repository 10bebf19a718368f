"""Tasks and actors that end in every way, for tests of what a node keeps of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import aiogpu


@aiogpu.remote(num_cpus=0)
async def forever() -> None:
    await asyncio.Event().wait()


@aiogpu.remote
def give(value: Any) -> Any:
    return value


@aiogpu.remote
def fail(_value: object) -> None:
    raise ValueError


@aiogpu.remote(max_retries=0)
def die() -> None:
    os._exit(1)


@aiogpu.remote
def count(most: int) -> Iterator[int]:
    yield from range(most)


@aiogpu.remote
async def leave_children(number: int, actor: Any) -> None:
    """End with children, calls and values that nothing awaits."""
    for _ in range(number):
        give.remote(forever.remote())
        actor.give.remote(forever.remote())
        aiogpu.put(number)


class Plain:
    def give(self, value: Any) -> Any:
        return value

    def hold(self) -> None:
        threading.Event().wait()

    def die(self) -> None:
        os._exit(1)


class Soft(Plain):
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @aiogpu.method(run_timeout=0.01)
    async def overrun(self) -> None:
        await asyncio.Event().wait()


OneByOne = aiogpu.remote(max_restarts=-1)(Plain)
OnALoop = aiogpu.remote(max_restarts=-1)(Soft)
