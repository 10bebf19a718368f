"""The classes of the Ray actors' tests: light to import, since workers import them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiogpu


@aiogpu.remote
class Adder:
    """Plain."""

    def __init__(self, other: aiogpu.ActorHandle[Adder] | None = None) -> None:
        self.other = other
        self.sum = 0

    def add(self, what: int) -> int:
        self.sum += what
        return self.sum

    def pid(self) -> int:
        return os.getpid()

    def pass_on(self, what: int) -> int:
        assert self.other is not None
        return int(aiogpu.get(self.other.add.remote(what)))


@aiogpu.remote(concurrency_groups={"narrow": 1})
class Grouped:
    """With coroutines, some of them in a group of their own."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.opened: asyncio.Event | None = None
        self.running = self.most = 0

    async def wait(self) -> None:
        self.opened = asyncio.Event()
        await self.opened.wait()

    @aiogpu.method(concurrency_group="narrow")
    async def open(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        while self.opened is None:
            await asyncio.sleep(0)
        self.opened.set()
        await asyncio.sleep(0)
        self.running -= 1
        return self.most

    async def pid(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        Path(self.path).touch()


@aiogpu.remote
def pid_of(actor: aiogpu.ActorHandle[Adder]) -> int:
    """The process of an actor, asked by plain code."""
    return int(aiogpu.get(actor.pid.remote()))
