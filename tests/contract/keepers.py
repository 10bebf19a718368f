"""Actors that keep what they are given: light to import, since workers do."""

from __future__ import annotations

import os
from typing import Any

import aiogpu
from tests.contract.odd_pickles import LoudError
from tests.support.gate import pass_gate


class Keeper:
    """Keeps what it is given, and tells of it."""

    def __init__(self, first: Any = None) -> None:
        self.kept: list[Any] = [first]

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def all(self) -> list[Any]:
        return self.kept

    def last(self) -> Any:
        return self.kept[-1]

    def drop(self) -> None:
        self.kept.clear()

    def add(self, a: Any, b: Any = 1) -> Any:
        return a + b

    def read_last(self) -> Any:
        """The value of the handle that it keeps."""
        return aiogpu.get(self.kept[-1]["handle"])

    @aiogpu.method(num_returns=2)
    def both(self, value: list[Any]) -> Any:
        return value

    def pass_gate(self, path: str, name: str) -> str:
        return pass_gate(path, name)

    def own_pid(self) -> int:
        return os.getpid()

    def fail(self, text: str) -> Any:
        raise LoudError(text)


@aiogpu.remote
class Serial(Keeper):
    pass


@aiogpu.remote(max_concurrency=2)
class Threaded(Keeper):
    pass


@aiogpu.remote
class Soft(Keeper):
    async def add(self, a: Any, b: Any = 1) -> Any:
        import asyncio

        await asyncio.sleep(0)
        return a + b

    async def read_last(self) -> Any:
        return await self.kept[-1]["handle"]
