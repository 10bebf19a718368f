"""Rows: a figure beside its floor, held against a goal; and tables of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from benchmarks.timing import Block, Pair, percentile

UNITS: Final = {"us": 1e3, "ms": 1e6, "us a task": 1e3}
"""Nanoseconds of each unit of time."""
MS: Final = 1_000_000
NO_GOAL: Final = "no goal"
BUSY: Final = "the machine is busy"
SLOWEST_FLOOR: Final = 30_000
"""Nanoseconds. A floor on one core whose p50 is above this was measured on a busy
machine; what a core takes to wake, where there are two, is the machine's own."""
LOWEST_RATE: Final = 80_000
"""The same for pipelined calls of the floor, in calls per second."""
HEAD: Final = (
    *("", "p50", "p99", "unit", "floor p50", "p99"),
    *("ratio", "note", "goal", "verdict"),
)
ON_THE_LEFT: Final = {0, 3, 7, 8, 9}
"""Columns of words."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: enough to hold against a goal, or just that it runs."""

    is_quick: bool = False

    def __call__(self, full: int, quick: int) -> int:
        """Return the number of a full run, or of a quick one."""
        return quick if self.is_quick else full


class UnavailableError(Exception):
    """This machine lacks what the row needs."""


def require(*modules: str) -> None:
    """Raise `UnavailableError` if one of these is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise UnavailableError(f"{module} is not installed")


@dataclass(frozen=True, slots=True)
class Goal:
    """The bound of a figure: the most that it may be, or the least."""

    bound: float
    unit: str
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g} {self.unit}"

    def admits(self, figure: float) -> bool:
        """Return whether the figure keeps to the bound."""
        return figure >= self.bound if self.is_least else figure <= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        p50, p99, floor, floor_p99, ratio: None where the row has none.
        note: what else is to be known, such as the spread of the blocks.
        verdict: "met", "not met", or why there is none.
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
    """Return the verdict of a figure; a `fault` makes the run invalid."""
    if fault:
        return f"INVALID: {fault}"
    if goal is None:
        return NO_GOAL
    if scale.is_quick:
        return "not judged: --quick makes too few calls"
    return "met" if goal.admits(figure) else "not met"


def spread(ratios: Sequence[float]) -> str:
    """Return the lowest and the highest, for a note."""
    return f"blocks {min(ratios):.2f} to {max(ratios):.2f}"


def slow_floor(blocks: Sequence[Block]) -> str:
    """Return a fault if calls of the floor, on one core, took too long."""
    if percentile(blocks, 50) <= SLOWEST_FLOOR:
        return ""
    return f"the floor's p50 is above {SLOWEST_FLOOR / 1e3:g} us; {BUSY}"


def time_row(
    name: str,
    unit: str,
    pair: Pair,
    goal: Goal | None,
    scale: Scale,
    *notes: str,
    calls: int = 1,
    fault: str = "",
) -> Row:
    """Times beside the floor's; the goal is about their ratio.

    Args:
        name: of the row.
        unit: of time.
        pair: what was measured.
        goal: None to report only.
        scale: whether there was enough of it.
        notes: what is to be said besides the spread.
        calls: that each sample stands for, on both sides.
        fault: what makes the run invalid.
    """
    each = UNITS[unit] * calls
    return Row(
        name,
        unit,
        judge(pair.ratio, goal, scale, fault),
        p50=percentile(pair.workload, 50) / each,
        p99=percentile(pair.workload, 99) / each,
        floor=percentile(pair.floor, 50) / each,
        floor_p99=percentile(pair.floor, 99) / each,
        ratio=pair.ratio,
        note="; ".join([spread(pair.ratios), *notes]),
        goal=str(goal or ""),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def rate_row(
    name: str,
    unit: str,
    pair: Pair,
    calls: int,
    goal: Goal | None,
    scale: Scale,
    *notes: str,
    absolute: bool = False,
    lowest: float = LOWEST_RATE,
) -> Row:
    """Rates of overlapping calls beside the floor's; the ratio is one of rates.

    Args:
        name: of the row.
        unit: "calls/s" or the like.
        pair: what was measured.
        calls: in a block.
        goal: of the ratio, or of the rate itself if `absolute`.
        scale: whether there was enough of it.
        notes: what is to be said besides the spread.
        absolute: whether the goal is about the rate.
        lowest: rate of the floor below which the run is invalid.
    """
    rate = calls * 1e9 / percentile(pair.workload, 50)
    floor = calls * 1e9 / percentile(pair.floor, 50)
    fault = ""
    if floor < lowest and not absolute:
        fault = f"the floor is below {lowest / 1000:g} k/s; {BUSY}"
    return Row(
        name,
        unit,
        judge(rate if absolute else 1 / pair.ratio, goal, scale, fault),
        p50=rate,
        floor=floor,
        ratio=1 / pair.ratio,
        note="; ".join([spread([1 / ratio for ratio in pair.ratios]), *notes]),
        goal=str(goal or ""),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def slowest_row(
    name: str, samples: Block, goal: Goal, scale: Scale, *notes: str, fault: str = ""
) -> Row:
    """Milliseconds of which the slowest is judged: the goal holds for every one."""
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


def plain_row(
    name: str, blocks: Sequence[Block], goal: Goal | None, scale: Scale
) -> Row:
    """Milliseconds by themselves; the goal is about their p50."""
    p50, p99 = percentile(blocks, 50) / MS, percentile(blocks, 99) / MS
    verdict = judge(p50, goal, scale)
    text = str(goal or "")
    return Row(name, "ms", verdict, p50, p99, goal=text, samples=blocks)


def figure_row(
    name: str,
    unit: str,
    figure: float,
    goal: Goal | None,
    scale: Scale,
    note: str = "",
    fault: str = "",
) -> Row:
    """One figure that is no time of a call, with its goal."""
    verdict = judge(figure, goal, scale, fault)
    return Row(name, unit, verdict, figure, note=note, goal=str(goal or ""))


def missing_row(name: str, reason: object) -> Row:
    """Say what cannot be measured here, and why."""
    return Row(name, "", f"not measured: {reason}")


def run_alone(module: str, *arguments: object) -> Any:
    """Run a module as a program, so that its memory is its own; load its JSON.

    Blocks the loop, which has nothing else to do.
    """
    words = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def cells(row: Row) -> tuple[str, ...]:
    """Return the row's text for each column of `HEAD`."""
    return (
        row.name,
        _number(row.p50),
        _number(row.p99),
        row.unit,
        _number(row.floor),
        _number(row.floor_p99),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.note,
        row.goal,
        row.verdict,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}"


def table(rows: Iterable[Row]) -> str:
    """Render the rows for a terminal."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in ON_THE_LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
