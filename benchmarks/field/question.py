"""What all contestants are asked: one question, and what an answer is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, NamedTuple

from benchmarks.port import Environment, Preload

FLOOR: Final = "floor"
"""The contestant that does the least that could be done."""


class Amount(NamedTuple):
    """How much is done in one block.

    Attributes:
        calls: at most.
        seconds: after which no further call begins.
        waiting: tasks that wait at once, where very many do.
        tasks: of one day.
    """

    calls: int
    seconds: float
    waiting: int = 0
    tasks: int = 0


class Metric(NamedTuple):
    """What is read off an answer. Less is better, whatever it is.

    Attributes:
        name: unique among all questions.
        title: what the table calls it.
        unit: "s" or "B", of one call, item or task.
    """

    name: str
    title: str
    unit: str = "s"


class Opening(NamedTuple):
    """How a system is started for a question.

    Attributes:
        is_fresh: for each block anew, so that it is alone meanwhile.
        is_open: False if the question starts the system by itself.
    """

    num_cpus: int = 2
    num_gpus: int = 0
    preload: Preload = None
    is_fresh: bool = False
    is_open: bool = True


PLAIN: Final = Opening()


@dataclass(slots=True)
class Stage:
    """What a question has while it is asked.

    Attributes:
        stack: ends with the question.
        notes: what a reader must know of this contestant's answer.
        has_preloaded: whether its processes were made with the modules asked for.
    """

    stack: AsyncExitStack
    has_preloaded: bool = True
    notes: dict[str, str] = field(default_factory=dict)


Figures = dict[str, list[float]]
"""For each metric what was measured."""

Ask = Callable[[Amount], Awaitable[Figures]]
"""Runs one block."""


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that is asked of all.

    Attributes:
        name: by which it is chosen.
        family: with which others it is drawn.
        prepare: makes a block of an open system; `UnsupportedError` if it cannot.
        floor: the same of the least that could be done.
        what_floor: is, in words.
        seconds: that the blocks of all contestants may take together, about.
        needs: a module without which nobody can be asked.
    """

    name: str
    family: str
    metrics: tuple[Metric, ...]
    prepare: Callable[[Environment, Stage], Awaitable[Ask]]
    floor: Callable[[Stage], Awaitable[Ask]]
    what_floor: str
    opening: Opening = PLAIN
    seconds: float = 20.0
    needs: str = ""


async def awaited(
    name: str, call: Callable[[int], Awaitable[object]], amount: Amount
) -> Figures:
    """One call after the other, at least one."""
    samples: list[float] = []
    until = perf_counter() + amount.seconds
    for number in range(amount.calls):
        start = perf_counter()
        if samples and start > until:
            break
        await call(number)
        samples.append(perf_counter() - start)
    return {name: samples}


class Batch:
    """So many at once as fill a block, found out in the first of them, or later."""

    def __init__(self, name: str, stage: Stage) -> None:
        self._name = name
        self._stage = stage
        self._size = 0

    async def run(
        self, whole: Callable[[int], Awaitable[object]], amount: Amount
    ) -> Figures:
        """Do that with so many; gives what each adds to the whole."""
        if not self._size:
            await self._find(whole, amount)
        start, size = perf_counter(), self._size
        await whole(size)
        took = perf_counter() - start
        self._stage.notes["batch"] = f"{size:,} at once"
        if took < amount.seconds / 2:  # something else had the machine at first
            self._size = min(amount.calls, 2 * size)
        return {self._name: [took / size]}

    async def _find(
        self, whole: Callable[[int], Awaitable[object]], amount: Amount
    ) -> None:
        await whole(4)  # which starts what is started late
        size, took = 1, 0.0
        while took < amount.seconds / 4 and size < amount.calls:
            size = min(4 * size, amount.calls)
            start = perf_counter()
            await whole(size)
            took = perf_counter() - start
        fitting = size * amount.seconds / took if took else size
        self._size = max(4, min(amount.calls, int(fitting)))
