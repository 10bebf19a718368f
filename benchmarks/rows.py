"""What a workload finds: rows, each a figure held against a floor and a goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.method import Block, Pair, Scale, percentile

US: Final = 1_000
MS: Final = 1_000_000
NO_GOAL: Final = "no goal"
BUSY: Final = "the machine is busy"

SLOWEST_FLOOR: Final = 30 * US
"""A floor of one core whose p50 is above this was measured on a busy machine; what a
core takes to wake, where there are two, is the machine's own."""
LEAST_RATE: Final = 80_000
"""The same for pipelined calls, in calls per second."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound of a figure, and of which of a row's figures it speaks.

    Attributes:
        bound: the most that the figure may be, or the least.
        is_least: which of the two.
    """

    bound: float
    unit: str
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g} {self.unit}"

    def admits(self, figure: float) -> bool:
        """Whether the figure keeps to the bound."""
        return figure >= self.bound if self.is_least else figure <= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        p50, p99, floor, floor_p99, ratio: None where the row has none.
        note: what else is to be known of the figure, such as its spread.
        verdict: "met", "not met", or in words why there is none.
        samples, floor_samples: raw, in nanoseconds, block by block.
    """

    name: str
    unit: str
    verdict: str
    p50: float | None = None
    p99: float | None = None
    floor: float | None = None
    floor_p99: float | None = None
    ratio: float | None = None
    note: str = ""
    goal: str = ""
    samples: Sequence[Block] = field(default=(), repr=False)
    floor_samples: Sequence[Block] = field(default=(), repr=False)


def judge(figure: float, goal: Goal | None, scale: Scale, fault: str = "") -> str:
    """What is to be said of a figure.

    Args:
        figure: the one of which the goal speaks.
        goal: None to report only.
        scale: whether there was enough of it.
        fault: what makes the run invalid, empty if nothing does.
    """
    if fault:
        return f"INVALID: {fault}"
    if goal is None:
        return NO_GOAL
    if not scale.is_judged:
        return "not judged: --quick makes too few calls"
    return "met" if goal.admits(figure) else "not met"


def latency_row(
    name: str,
    pair: Pair,
    goal: Goal,
    scale: Scale,
    known: Sequence[Block] | None = None,
) -> Row:
    """Calls awaited one at a time, beside the floor's.

    Args:
        name: of the row.
        pair: what was measured.
        goal: of the ratio.
        scale: whether there was enough of it.
        known: blocks of the floor on one core, if this row's is another one.
    """
    floor = percentile(pair.floor, 50)
    fault = ""
    if percentile(known or pair.floor, 50) > SLOWEST_FLOOR:
        fault = f"the floor's p50 is above {SLOWEST_FLOOR / US:g} us; {BUSY}"
    return Row(
        name,
        "us",
        judge(pair.ratio, goal, scale, fault),
        p50=percentile(pair.workload, 50) / US,
        p99=percentile(pair.workload, 99) / US,
        floor=floor / US,
        floor_p99=percentile(pair.floor, 99) / US,
        ratio=pair.ratio,
        goal=str(goal),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def spread(figures: Sequence[float]) -> str:
    """The lowest and the highest, for a note."""
    return f"blocks {min(figures):.2f} to {max(figures):.2f}"


def rate_row(
    name: str, pair: Pair, calls: int, goal: Goal | None, scale: Scale, *notes: str
) -> Row:
    """Calls per second of overlapping calls; the ratio is one of rates."""
    rate = calls * 1e9 / percentile(pair.workload, 50)
    floor = calls * 1e9 / percentile(pair.floor, 50)
    fault = ""
    if floor < LEAST_RATE:
        fault = f"the floor is below {LEAST_RATE / 1000:g} k/s; {BUSY}"
    return Row(
        name,
        "calls/s",
        judge(1 / pair.ratio, goal, scale, fault),
        p50=rate,
        floor=floor,
        ratio=1 / pair.ratio,
        note="; ".join([spread([1 / ratio for ratio in pair.ratios]), *notes]),
        goal=str(goal or ""),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def time_row(
    name: str, blocks: Sequence[Block], goal: Goal | None, scale: Scale
) -> Row:
    """Milliseconds by themselves."""
    figure = percentile(blocks, 50) / MS
    return Row(
        name,
        "ms",
        judge(figure, goal, scale),
        p50=figure,
        p99=percentile(blocks, 99) / MS,
        goal=str(goal or ""),
        samples=blocks,
    )


def beside_row(
    name: str, pair: Pair, goal: Goal | None, scale: Scale, *notes: str
) -> Row:
    """Milliseconds beside the floor's; of their ratio the goal speaks.

    Args:
        name: of the row.
        pair: what was measured.
        goal: None to report only.
        scale: whether there was enough of it.
        notes: what is to be said besides the spread.
    """
    return Row(
        name,
        "ms",
        judge(pair.ratio, goal, scale),
        p50=percentile(pair.workload, 50) / MS,
        p99=percentile(pair.workload, 99) / MS,
        floor=percentile(pair.floor, 50) / MS,
        floor_p99=percentile(pair.floor, 99) / MS,
        ratio=pair.ratio,
        note="; ".join([spread(pair.ratios), *notes]),
        goal=str(goal or ""),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def slowest_row(
    name: str, samples: Block, goal: Goal, scale: Scale, *notes: str, fault: str = ""
) -> Row:
    """Milliseconds of which the goal speaks for every one, so the slowest is judged.

    Args:
        name: of the row.
        samples: nanoseconds of each.
        goal: of the slowest.
        scale: whether there was enough of it.
        notes: what is to be said besides.
        fault: what makes the run invalid, empty if nothing does.
    """
    slowest = max(samples) / MS
    return Row(
        name,
        "ms",
        judge(slowest, goal, scale, fault),
        p50=percentile([samples], 50) / MS,
        p99=percentile([samples], 99) / MS,
        note="; ".join([f"slowest of {len(samples)}: {slowest:.1f} ms", *notes]),
        goal=str(goal),
        samples=[samples],
    )


def missing_row(name: str, reason: object) -> Row:
    """What cannot be measured here, and why."""
    return Row(name, "", f"not measured: {reason}")
