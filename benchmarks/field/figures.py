"""What a run has found: figures of each contestant, beside the floor's and aiogpu's.

A block is divided by the block of the other in the same turn; the median of these
ratios is the figure, and their quartiles are its spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median, quantiles
from typing import Final, NamedTuple

from benchmarks.field.contest import Entry
from benchmarks.field.question import FLOOR, Metric, Question

OURS: Final = "aiogpu"
"""The contestant against which the others are held."""
OWN: Final = frozenset({FLOOR, OURS, "node"})
"""Those who are not peers."""
LEAST: Final = 1e-9
"""Of seconds or bytes: below this there is nothing to divide by."""


class Ratio(NamedTuple):
    """The median of some ratios, and their quartiles."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.middle)} ({_short(self.low)} to {_short(self.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Line:
    """What one contestant gave for one metric.

    Attributes:
        turns: the median of each block.
        p50, p99: of all that was measured; None where nothing was.
        beside_floor: how many times the floor's.
        beside_ours: how many times aiogpu's.
        why: there are no figures; empty if there are.
    """

    metric: Metric
    question: str
    contestant: str
    turns: Sequence[float]
    p50: float | None
    p99: float | None
    beside_floor: Ratio | None
    beside_ours: Ratio | None
    notes: Sequence[str]
    why: str

    @property
    def is_peer(self) -> bool:
        """Whether it is of another system, and has figures beside aiogpu's."""
        return self.contestant not in OWN and self.beside_ours is not None


def lines(
    questions: Mapping[str, Question], entries: Sequence[Entry]
) -> dict[str, list[Line]]:
    """By metric, in the order of the entries."""
    found: dict[str, list[Line]] = {}
    by_name = {(entry.question, entry.contestant): entry for entry in entries}
    for entry in entries:
        floor, ours = (by_name.get((entry.question, name)) for name in (FLOOR, OURS))
        for metric in questions[entry.question].metrics:
            line = _line(metric, entry, floor, ours)
            found.setdefault(metric.name, []).append(line)
    return found


def _line(
    metric: Metric, entry: Entry, floor: Entry | None, ours: Entry | None
) -> Line:
    samples = sorted(chain.from_iterable(_blocks(metric, entry)))
    turns = [median(block) for block in _blocks(metric, entry)]
    return Line(
        metric,
        entry.question,
        entry.contestant,
        turns,
        median(samples) if samples else None,
        samples[min(len(samples) * 99 // 100, len(samples) - 1)] if samples else None,
        _beside(metric, turns, floor),
        _beside(metric, turns, ours),
        entry.notes,
        entry.why,
    )


def _blocks(metric: Metric, entry: Entry) -> list[list[float]]:
    return [turn[metric.name] for turn in entry.turns if turn.get(metric.name)]


def _beside(
    metric: Metric, turns: Sequence[float], other: Entry | None
) -> Ratio | None:
    """Turn by turn; None where one of the two has nothing."""
    theirs = [median(block) for block in _blocks(metric, other)] if other else []
    ratios = [
        own / their for own, their in zip(turns, theirs, strict=False) if their > LEAST
    ]
    return spread(ratios)


def spread(values: Sequence[float]) -> Ratio | None:
    """Their median and quartiles; None of no values."""
    if len(values) < 2:
        return Ratio(*[values[0]] * 3) if values else None
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Ratio(low, middle, high)


class Verdict(NamedTuple):
    """How often aiogpu is so many times as fast as a peer."""

    tenfold: int
    twofold: int
    faster: int
    equal: int
    slower: int

    @property
    def all(self) -> int:
        """How many comparisons there are."""
        return sum(self)


def verdict(found: Mapping[str, Sequence[Line]]) -> Verdict:
    """Counts each pair of a metric and a peer once."""
    counts = [0] * 5
    for line in chain.from_iterable(found.values()):
        if line.is_peer and line.beside_ours is not None:
            counts[_rank(line.beside_ours)] += 1
    return Verdict(*counts)


def _rank(ratio: Ratio) -> int:
    """Where the quartiles lie on both sides of 1, the two are equal."""
    if ratio.low <= 1 <= ratio.high:
        return 3
    if ratio.middle < 1:
        return 4
    return 0 if ratio.middle >= 10 else 1 if ratio.middle >= 2 else 2


def losses(found: Mapping[str, Sequence[Line]]) -> list[Line]:
    """Where a peer is faster or lighter, by how much."""
    slower = [
        line
        for line in chain.from_iterable(found.values())
        if line.is_peer and line.beside_ours and _rank(line.beside_ours) == 4
    ]
    return sorted(slower, key=lambda line: line.beside_ours or Ratio(0, 0, 0))
