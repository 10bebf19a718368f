"""The classes of the Ray actors' tests: light to import, since workers import them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import aiogpu
from tests.support.gate import pass_gate


@aiogpu.remote
class Adder:
    """Has plain methods."""

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


@aiogpu.remote
class Picky:
    """Has a constructor that fails if it is told to."""

    def __init__(self, is_failing: bool) -> None:
        if is_failing:
            raise LookupError("told to fail")

    def take(self, what: int) -> int:
        return what


@aiogpu.remote(concurrency_groups={"narrow": 1})
class Grouped:
    """Has coroutines, some of them in a group of their own."""

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

    async def total(self, handles: list[Any]) -> int:
        await asyncio.sleep(0)
        return sum([await handle for handle in handles])

    async def close(self) -> None:
        Path(self.path).touch()


@aiogpu.remote
def pid_of(actor: aiogpu.ActorHandle[Adder]) -> int:
    """Return an actor's process id, asked in plain code."""
    return int(aiogpu.get(actor.pid.remote()))


@aiogpu.remote
def add_in_threads(actor: aiogpu.ActorHandle[Adder], numbers: list[int]) -> int:
    """Call an actor in threads of a task; return the largest sum."""

    def add(number: int) -> int:
        return int(aiogpu.get(actor.add.remote(number)))

    with ThreadPoolExecutor(2) as threads:
        return max(threads.map(add, numbers))


@aiogpu.remote(concurrency_groups={"narrow": 1}, max_concurrency=2)
class ThreadGroups:
    """Has plain methods in threads, some of them in a group of their own."""

    def wait(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    @aiogpu.method(concurrency_group="narrow")
    def narrow(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    def numbers(self) -> Iterator[int]:
        yield 1


@aiogpu.remote
def call_narrow(actor: aiogpu.ActorHandle[ThreadGroups], path: str, name: str) -> str:
    """Call a method of a group by a handle that was an argument."""
    return str(aiogpu.get(actor.narrow.remote(path, name)))


@aiogpu.remote
def numbers_by_name(_given: aiogpu.ActorHandle[ThreadGroups], name: str) -> list[int]:
    """Stream from an actor found by name, in a process that has a handle already."""
    return list(aiogpu.get_actor(name).numbers.remote())


@aiogpu.remote
class Keeper:
    """Notes in which thread it is called, and its arguments."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.told: list[int | str] = []

    def is_in_its_thread(self) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self.thread == threading.get_ident()

    def gated(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    def tell(self, what: int) -> None:
        self.told.append(what)

    def all_told(self) -> list[int | str]:
        return self.told

    def endless(self) -> Iterator[int]:
        try:
            yield from count()
        finally:
            self.told.append("ended")
