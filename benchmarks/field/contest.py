"""Who is asked what, in which order: rounds of questions, turns, blocks.

The systems stay started while questions need the same of them. Of each question all
run a block in turn, again and again; a block of one is held against the blocks of the
others in the same turn. Who fails or does not answer is out for that question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from time import monotonic
from typing import Final, NamedTuple

from benchmarks.field.question import Amount, Question
from benchmarks.field.seat import OutError, Seat
from benchmarks.port import UnsupportedError

REST: Final = 0.03
"""Seconds between blocks, in which what the one before has set off is done."""
LOOK: Final = 2.0
"""Seconds for which it is looked what systems take that have nothing to do."""
LIMITS: Final = {"open": 90.0, "block": 45.0, "close": 15.0}
"""Seconds after which a contestant is out."""


class Extent(NamedTuple):
    """How much of each question.

    Attributes:
        turns: at most; fewer if the question's time is over, but never under three.
        share: of the time that a question takes in full.
    """

    amount: Amount
    turns: int
    share: float = 1.0


FULL: Final = Extent(Amount(500, 0.2, waiting=1_000_000, tasks=160), turns=15)
QUICK: Final = Extent(Amount(8, 0.01, waiting=500, tasks=12), turns=1, share=0.05)


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


Tell = Callable[[str], None]


async def contest(
    questions: Sequence[Question], names: Sequence[str], extent: Extent, tell: Tell
) -> Findings:
    """Ask all of them everything."""
    findings = Findings()
    for _, group in groupby(questions, key=lambda question: question.opening):
        seats = [Seat(name) for name in names]
        try:
            for question in group:
                began = monotonic()
                findings.entries += await _asked(question, seats, extent)
                tell(f"{question.name}: {monotonic() - began:.0f} s")
                if not findings.idle:
                    findings.idle = await _idle(seats)
            for seat in seats:
                findings.libraries |= seat.libraries
        finally:
            await _all_leave(seats, LIMITS["close"])
    return findings


async def _asked(
    question: Question, seats: Sequence[Seat], extent: Extent
) -> list[Entry]:
    entries = {seat.name: Entry(question.name, seat.name) for seat in seats}
    if question.needs and find_spec(question.needs) is None:
        for entry in entries.values():
            entry.why = f"{question.needs} is not installed"
        return list(entries.values())
    if not question.opening.is_fresh:
        for seat in seats:  # a first block warms up and is not counted
            await _turn(question, seat, extent.amount, entries[seat.name])
    until, turn = monotonic() + question.seconds * extent.share, 0
    while turn < extent.turns and (monotonic() < until or turn < min(3, extent.turns)):
        for seat in seats:
            entry = entries[seat.name]
            if not entry.why:
                await asyncio.sleep(REST)
                await _turn(question, seat, extent.amount, entry, is_counted=True)
        turn += 1
    return list(entries.values())


async def _turn(
    question: Question,
    seat: Seat,
    amount: Amount,
    entry: Entry,
    *,
    is_counted: bool = False,
) -> None:
    """One block of one contestant; the entry says it if that was its last."""
    is_fresh, is_prepared = question.opening.is_fresh, False
    try:
        if not seat.is_taken:
            await seat.sit(question.opening, LIMITS["open"])
        if is_fresh or not is_counted:
            await seat.prepare(question.name, LIMITS["block"])
        is_prepared = True
        found = await seat.block(amount, LIMITS["block"])
    except UnsupportedError as reason:
        entry.why = f"not supported: {reason}"
        if is_prepared:  # who knows what still runs in it
            await seat.leave()
    except OutError as reason:
        entry.why = f"failed: {reason}"
        await seat.leave()
    else:
        entry.notes = found["notes"]
        if is_counted:
            entry.turns.append(found["figures"])
    if is_fresh:
        await seat.leave(LIMITS["close"] if question.opening.is_open else 0)


async def _idle(seats: Sequence[Seat]) -> dict[str, float]:
    present = [seat for seat in seats if seat.is_taken]
    before = [seat.cpu_time() for seat in present]
    await asyncio.sleep(LOOK)
    return {
        seat.name: max(0.0, seat.cpu_time() - was) / LOOK
        for seat, was in zip(present, before, strict=True)
    }


async def _all_leave(seats: Sequence[Seat], limit: float) -> None:
    await asyncio.gather(*(seat.leave(limit) for seat in seats))
