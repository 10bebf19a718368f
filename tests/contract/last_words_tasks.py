"""Actors and tasks that answer and die at once: light to import."""

from __future__ import annotations

import asyncio
import os

import aiogpu
from tests.support.gate import say


@aiogpu.remote(max_concurrency=10_000)
class Crowd:
    """Answers many calls in one turn of its loop, and ends its process after it."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.unanswered = 0

    async def answer(self, number: int) -> int:
        self.unanswered += 1
        await self.opened.wait()
        self.unanswered -= 1
        return number

    async def answer_all_and_die(self, path: str, fifo: str) -> None:
        """Wait for a byte, have all answered, die."""
        say(path, "ready")
        with open(fifo, "rb") as file:
            file.read(1)
        self.opened.set()
        while self.unanswered:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what was answered in one turn is sent in the next
        os._exit(3)
