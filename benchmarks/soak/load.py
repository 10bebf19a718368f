"""The load of one program: operations, drawn one after the other, some at a time."""

from __future__ import annotations

import asyncio
import random

from benchmarks.soak.operation import Account, Operation
from benchmarks.soak.operations import OPERATIONS


class Load:
    """Goes on until it is told to stop.

    Attributes:
        account: what came of it.
    """

    def __init__(self, seed: str, in_flight: int, account: Account) -> None:
        self.account = account
        self._seed = seed
        self._in_flight = in_flight
        self._hand = random.Random(seed)
        self._number = 0
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Begin operations until it is to stop; then let all of them end."""
        ended = asyncio.create_task(stop.wait())
        while not stop.is_set():
            while len(self._running) < self._in_flight:
                self._begin()
            await asyncio.wait(
                [*self._running, ended], return_when=asyncio.FIRST_COMPLETED
            )
        while self._running:
            await asyncio.wait(self._running)

    def _begin(self) -> None:
        self._number += 1
        (operate,) = self._hand.choices(list(OPERATIONS), tuple(OPERATIONS.values()))
        one = Operation(operate.__name__, self._number, self._seed, self.account)
        task = asyncio.create_task(one.run(operate))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def break_off(self) -> None:
        """Nobody wants any of it any more."""
        for task in self._running:
            task.cancel()
