"""Rows: a figure beside its floor, compared with a goal; and a table of rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Final, NamedTuple

from benchmarks.timing import Block, Pair, percentile

UNITS: Final = {"us": 1e3, "ms": 1e6}
"""Nanoseconds of each unit of time."""
MS: Final = 1_000_000
BUSY: Final = "the machine is busy"
SLOWEST_FLOOR: Final = 30_000
"""Nanoseconds. A floor on one core with a higher p50 was measured on a busy machine. On
two cores the time for a core to wake up depends on the machine."""
LOWEST_RATE: Final = 80_000
"""Calls per second: the same limit for gathered calls of the floor."""
HEAD: Final = (
    *("", "p50", "p99", "unit", "floor p50", "p99"),
    *("ratio", "note", "goal", "verdict"),
)
SIDES: Final = "<>><>>><<<"
"""The alignment of each column in a terminal: words left, numbers right."""

Scale = Callable[[int, int], int]
"""Returns its first argument in a full run, its second in a quick run."""


class UnavailableError(Exception):
    """This machine lacks what the row needs."""


def require(*modules: str) -> None:
    """Raise `UnavailableError` if one of these is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise UnavailableError(f"{module} is not installed")


class Goal(NamedTuple):
    """The upper bound of a figure, or its lower bound."""

    bound: float
    unit: str
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g} {self.unit}"

    def admits(self, figure: float) -> bool:
        """Return True if the figure is within the bound."""
        return figure >= self.bound if self.is_least else figure <= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        p50, p99, floor, floor_p99, ratio: None where the row has none.
        judged: the figure that is compared with the goal, `p50` by default.
        note: more facts, such as the spread of the blocks.
        fault: why the run is invalid, or why there are no figures.
        samples, floor_samples: nanoseconds, block by block.
    """

    name: str
    unit: str = ""
    p50: float | None = None
    goal: Goal | None = None
    note: str = ""
    fault: str = ""
    p99: float | None = None
    floor: float | None = None
    floor_p99: float | None = None
    ratio: float | None = None
    judged: float | None = None
    samples: Sequence[Block] = field(default=(), repr=False)
    floor_samples: Sequence[Block] = field(default=(), repr=False)

    def verdict(self, is_quick: bool) -> str:
        """Return "met", "not met", or why there is no verdict."""
        if self.p50 is None:
            return f"not measured: {self.fault}"
        if self.fault:
            return f"INVALID: {self.fault}"
        if self.goal is None:
            return "no goal"
        if is_quick:
            return "not judged: --quick makes too few calls"
        figure = self.p50 if self.judged is None else self.judged
        return "met" if self.goal.admits(figure) else "not met"

    def cells(self, is_quick: bool) -> tuple[str, ...]:
        """Return the row's text for each column of `HEAD`."""
        figures = self.p50, self.p99, self.floor, self.floor_p99
        p50, p99, floor, floor_p99 = map(_number, figures)
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            *(self.name, p50, p99, self.unit, floor, floor_p99, ratio, self.note),
            *(str(self.goal or ""), self.verdict(is_quick)),
        )


Benchmark = Callable[[Scale], Awaitable[list[Row]]]


def spread(ratios: Sequence[float]) -> str:
    """Return the lowest and the highest ratio as a note."""
    return f"blocks {min(ratios):.2f} to {max(ratios):.2f}"


def slow_floor(blocks: Sequence[Block]) -> str:
    """Return a fault if the floor's calls, on one core, took too long."""
    if percentile(blocks, 50) <= SLOWEST_FLOOR:
        return ""
    return f"the floor's p50 is above {SLOWEST_FLOOR / 1e3:g} us; {BUSY}"


def times(
    name: str,
    unit: str,
    pair: Pair,
    goal: Goal | None = None,
    *notes: str,
    ratio: float | None = None,
    calls: int = 1,
    fault: str = "",
) -> Row:
    """Return a row of times; the goal is about their ratio to the floor's.

    Args:
        name: name of the row.
        unit: "us" or "ms".
        pair: the blocks.
        goal: None to report only.
        notes: notes after the spread.
        ratio: the pair's ratio by default.
        calls: calls in each sample, on both sides.
        fault: why the run is invalid.
    """
    ratio, each = pair.ratio if ratio is None else ratio, UNITS[unit] * calls
    return Row(
        name,
        unit,
        percentile(pair.workload, 50) / each,
        goal,
        "; ".join([spread(pair.ratios), *notes]),
        fault,
        p99=percentile(pair.workload, 99) / each,
        floor=percentile(pair.floor, 50) / each,
        floor_p99=percentile(pair.floor, 99) / each,
        ratio=ratio,
        judged=ratio,
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def rates(
    name: str,
    unit: str,
    pair: Pair,
    calls: int,
    goal: Goal | None,
    absolute: bool = False,
    lowest: float = LOWEST_RATE,
) -> Row:
    """Return a row of rates of overlapping calls; the ratio is one of rates.

    Args:
        name: name of the row.
        unit: "calls/s" or the like.
        pair: the blocks, of one sample each.
        calls: calls in a block.
        goal: goal of the ratio, or of the rate itself if `absolute`.
        absolute: compare the rate with the goal.
        lowest: rate of the floor below which the run is invalid.
    """
    rate, floor = (calls * 1e9 / percentile(each, 50) for each in pair[::-1])
    is_slow = floor < lowest and not absolute
    return Row(
        name,
        unit,
        rate,
        goal,
        spread([1 / ratio for ratio in pair.ratios]),
        f"the floor is below {lowest / 1000:g} k/s; {BUSY}" if is_slow else "",
        floor=floor,
        ratio=1 / pair.ratio,
        judged=rate if absolute else 1 / pair.ratio,
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def plain(name: str, blocks: Sequence[Block], goal: Goal) -> Row:
    """Return a row of milliseconds without a floor; the goal is about their p50."""
    p50, p99 = (percentile(blocks, each) / MS for each in (50, 99))
    return Row(name, "ms", p50, goal, p99=p99, samples=blocks)


def slowest(name: str, samples: Block, goal: Goal, *notes: str, fault: str = "") -> Row:
    """Return a row of milliseconds; the goal is about the slowest sample."""
    most = max(samples) / MS
    note = "; ".join([f"slowest of {len(samples)}: {most:.1f} ms", *notes])
    row = plain(name, [samples], goal)
    return replace(row, note=note, fault=fault, judged=most)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Render lines of cells for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pairs = zip(SIDES, widths, strict=True)
    line = "  ".join(f"{{:{side}{width}}}" for side, width in pairs)
    return "\n".join(line.format(*cells).rstrip() for cells in lines)
