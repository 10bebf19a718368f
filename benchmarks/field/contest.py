"""Who is asked what, in which order: rounds of questions, turns, blocks.

The systems stay started while questions need the same of them. Of each question all
run a block in turn, again and again; a block of one is held against the blocks of the
others in the same turn. Who fails or does not answer is out for that question.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from time import monotonic
from typing import Any, Final, NamedTuple

from benchmarks.field.question import Amount, Question
from benchmarks.field.seat import LateError, OutError, Seat
from benchmarks.port import UnsupportedError

REST: Final = 0.03
"""Seconds between blocks, in which what the one before has set off is done."""
PATIENCE: Final = 2
"""Times that a contestant may be late; then it is asked nothing more."""
OPENING: Final = 12.0
"""Seconds, about, that all systems take to start and to stop."""


class Limits(NamedTuple):
    """Seconds after which a contestant is out."""

    open: float
    block: float
    close: float


class Extent(NamedTuple):
    """How much of each question.

    Attributes:
        turns: at most; fewer if the question's time is over.
        least: turns that there are though it is over.
        seconds: in which all questions are to be done, if each keeps to its time.
        look: seconds for which it is seen what systems take that have nothing to do.
    """

    amount: Amount
    turns: int
    least: int
    seconds: float
    look: float
    limits: Limits


FULL: Final = Extent(
    Amount(500, 0.2, waiting=1_000_000, tasks=160),
    turns=15,
    least=3,
    seconds=640,
    look=2.0,
    limits=Limits(open=60, block=40, close=8),
)
QUICK: Final = Extent(
    Amount(8, 0.01, waiting=500, tasks=12),
    turns=1,
    least=1,
    seconds=60,
    look=0.1,
    limits=Limits(open=120, block=60, close=20),
)


@dataclass(slots=True)
class Entry:
    """What one contestant gave to one question.

    Attributes:
        turns: for each turn its figures, by metric.
        notes: what a reader must know of them.
        why: it has none; empty if it has.
    """

    question: str
    contestant: str
    turns: list[dict[str, list[float]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why: str = ""


@dataclass(slots=True)
class Findings:
    """All entries of a run, and what the systems take while they have nothing to do.

    Attributes:
        idle: of one core, by contestant.
        libraries: of which all are made, and their versions.
    """

    entries: list[Entry] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)


class Contest:
    """One run."""

    def __init__(
        self, questions: Sequence[Question], names: Sequence[str], extent: Extent
    ) -> None:
        self._names = names
        self._extent = extent
        self._late: Counter[str] = Counter()
        self._rounds = [
            list(group) for _, group in groupby(questions, lambda each: each.opening)
        ]
        self._left = sum(question.seconds for question in questions)
        self._left += OPENING * len(self._rounds)
        self._until = monotonic() + extent.seconds
        self.findings = Findings()

    async def run(self, tell: Callable[[str], None]) -> Findings:
        """Ask all of them everything; says what is done."""
        for questions in self._rounds:
            seats = [Seat(name) for name in self._names]
            try:
                for question in questions:
                    began = monotonic()
                    entries = await self._asked(question, seats)
                    self.findings.entries += entries
                    tell(_told(question, monotonic() - began, entries))
                    if not self.findings.idle:
                        self.findings.idle = await _idle(seats, self._extent.look)
                for seat in seats:
                    self.findings.libraries |= seat.libraries
            finally:
                close = self._extent.limits.close
                await asyncio.gather(*(seat.leave(close) for seat in seats))
            self._left -= OPENING
        return self.findings

    async def _asked(self, question: Question, seats: Sequence[Seat]) -> list[Entry]:
        """All turns of one question."""
        entries = {seat.name: Entry(question.name, seat.name) for seat in seats}
        if question.needs and find_spec(question.needs) is None:
            for entry in entries.values():
                entry.why = f"{question.needs} is not installed"
            self._left -= question.seconds
            return list(entries.values())
        if not question.opening.is_fresh:
            for seat in seats:  # a first block warms up and is not counted
                await self._turn(question, seat, entries[seat.name], is_first=True)
        until, least = self._plan(question)
        turn = 0
        while turn < self._extent.turns and (turn < least or monotonic() < until):
            for seat in seats:
                await self._turn(question, seat, entries[seat.name])
            turn += 1
        return list(entries.values())

    def _plan(self, question: Question) -> tuple[float, int]:
        """Until when there are turns, and how many at least."""
        share = min(1.0, max(0.0, self._until - monotonic()) / self._left)
        self._left -= question.seconds
        is_dear = share < 0.5 or question.opening.is_fresh
        least = 1 if is_dear else self._extent.least
        return monotonic() + question.seconds * share, least

    async def _turn(
        self, question: Question, seat: Seat, entry: Entry, *, is_first: bool = False
    ) -> None:
        """One block of one contestant; the entry says it if that was its last."""
        if self._late[seat.name] >= PATIENCE:
            entry.why = f"left out: it was late {PATIENCE} times before"
        if entry.why:
            return
        await asyncio.sleep(REST)
        is_fresh = question.opening.is_fresh
        try:
            found = await self._block(question, seat, is_new=is_first or is_fresh)
        except UnsupportedError as reason:
            entry.why = f"not supported: {reason}"
        except OutError as reason:
            entry.why = f"failed: {reason}"
            self._late[seat.name] += isinstance(reason, LateError)
            await seat.leave()
        else:
            entry.notes = found["notes"]
            if not is_first:
                entry.turns.append(found["figures"])
        if is_fresh:
            await seat.leave(self._extent.limits.close)

    async def _block(
        self, question: Question, seat: Seat, *, is_new: bool
    ) -> dict[str, Any]:
        limits = self._extent.limits
        if not seat.is_taken:
            await seat.sit(question.opening, limits.open)
        if is_new:
            await seat.prepare(question.name, limits.block)
        try:
            return await seat.block(self._extent.amount, limits.block)
        except UnsupportedError:
            await seat.leave()  # who knows what still runs in it
            raise


def _told(question: Question, took: float, entries: Sequence[Entry]) -> str:
    """A line for who waits for the run."""
    failed = [
        f"; {entry.contestant} {entry.why}"
        for entry in entries
        if entry.why.startswith("failed")
    ]
    return f"{question.name}: {took:.0f} s{''.join(failed)}"


async def _idle(seats: Sequence[Seat], look: float) -> dict[str, float]:
    present = [seat for seat in seats if seat.is_taken]
    before = [seat.cpu_time() for seat in present]
    await asyncio.sleep(look)
    return {
        seat.name: max(0.0, seat.cpu_time() - was) / look
        for seat, was in zip(present, before, strict=True)
    }
