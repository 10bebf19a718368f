"""The actors of the soak, of the three kinds. Light to import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import aiogpu
from benchmarks.soak.shares import take
from benchmarks.soak.tasks import echo, fingerprint


class Resident:
    """Holds its share for life; its calls begin in the order of their caller."""

    def __init__(self, amount: float = 0) -> None:
        self.last = -1
        self.view: memoryview | None = None
        gpus = [int(one) for one in aiogpu.get_gpu_ids()]
        self.share = take(gpus, amount) if amount else []

    def add(self, number: int) -> int:
        return number + 1

    def fail(self, number: int) -> int:
        raise ValueError(number)

    def spin(self, number: int, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return number + 1

    def ask(self, number: int) -> int:
        """Have a task of its own."""
        return aiogpu.get(echo.remote(number + 1))

    def keep(self, view: memoryview) -> int:
        self.view = view
        return fingerprint(view)

    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    def die(self, number: int) -> int:
        os._exit(number % 100)

    def leave(self, number: int) -> int:
        aiogpu.exit_actor()


class SoftResident(Resident):
    """The same with coroutines."""

    async def add(self, number: int) -> int:  # type: ignore[override]
        from asyncio import sleep

        await sleep(0)
        return number + 1

    async def wait(self, number: int, seconds: float) -> int:
        from asyncio import sleep

        await sleep(seconds)
        return number + 1

    async def ask(self, number: int) -> int:  # type: ignore[override]
        return await echo.remote(number + 1)


class InOrder(Resident):
    """Sees that calls come in order, as one caller has sent them."""

    def add(self, number: int) -> int:
        assert number > self.last, (number, self.last)
        self.last = number
        return number + 1


@aiogpu.remote
def call(actor: aiogpu.ActorHandle[Any], number: int) -> int:
    """Call an actor from another process."""
    found: int = aiogpu.get(actor.add.remote(number))
    return found


SERIAL = aiogpu.remote(InOrder)
THREADED = aiogpu.remote(max_concurrency=4)(Resident)
SOFT = aiogpu.remote(SoftResident)
