"""The results of a run in Markdown: each system beside the floor and aiogpu.

A block is divided by the other system's block of the same turn. The median of these
ratios is the figure, and their quartiles are the spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median, quantiles
from typing import Final, NamedTuple

from benchmarks.field.process import FLOOR
from benchmarks.field.run import Entry
from benchmarks.field.workloads import WORKLOADS, Metric
from benchmarks.report import markdown
from benchmarks.timing import percentile

OURS: Final = "aiogpu"
"""The system with which the others are compared."""
NO_PEERS: Final = frozenset({FLOOR, OURS, "node"})
LEAST: Final = 1e-9
"""Seconds or bytes; a smaller divisor gives no ratio."""
UNITS: Final = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e6, "MB"), (1e3, "KB"), (1, "B")),
}
HEAD: Final = ("", "", "p50", "p99", "x floor", "x aiogpu", "blocks", "notes")


class Ratio(NamedTuple):
    """The median of some ratios, and their quartiles."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        low, middle, high = map(_number, self)
        return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One system's figures of one metric.

    Attributes:
        p50, p99: percentiles of all samples; None if there are none.
        beside_floor: ratio to the floor.
        beside_ours: ratio to aiogpu.
    """

    metric: Metric
    entry: Entry
    p50: float | None
    p99: float | None
    beside_floor: Ratio | None
    beside_ours: Ratio | None

    def amount(self, value: float | None) -> str:
        """Render a figure in a suitable unit."""
        unit = self.metric.unit
        if not value:
            return "" if value is None else f"0 {unit}"
        fitting = (pair for pair in UNITS[unit] if value >= pair[0])
        factor, name = next(fitting, UNITS[unit][-1])
        return f"{_number(value / factor)} {name}"

    def cell(self) -> str:
        """Return the figure, and its ratio to aiogpu's."""
        if self.p50 is None:
            return "-"
        figure, beside = self.amount(self.p50), self.beside_ours
        if self.entry.system == FLOOR or beside is None:
            return figure
        times = f"{beside.middle:{',.0f' if beside.middle >= 10 else '.2g'}}"
        return f"{figure} (**{times}**)"

    def cells(self) -> list[str]:
        """Return the cells of the detailed table."""
        notes = "; ".join([self.entry.why] if self.entry.why else self.entry.notes)
        return [
            *(self.metric.title, self.entry.system),
            *(self.amount(self.p50), self.amount(self.p99)),
            *(str(each or "") for each in (self.beside_floor, self.beside_ours)),
            *(f"{len(self.entry.turns)}", notes.replace("|", "/").replace("\n", " ")),
        ]


def lines(entries: Sequence[Entry]) -> list[list[Line]]:
    """Return the lines of all systems, metric by metric."""
    table: dict[str, list[Line]] = {}
    by_name = {(entry.workload, entry.system): entry for entry in entries}
    for entry in entries:
        others = [by_name.get((entry.workload, name)) for name in (FLOOR, OURS)]
        for index, metric in enumerate(WORKLOADS[entry.workload].metrics):
            blocks = [turn[index] for turn in entry.turns]
            p50 = median(chain.from_iterable(blocks)) if blocks else None
            p99 = percentile(blocks, 99) if blocks else None
            ratios = (_beside(index, entry, other) for other in others)
            line = Line(metric, entry, p50, p99, *ratios)
            table.setdefault(metric.title, []).append(line)
    return list(table.values())


def _beside(index: int, entry: Entry, other: Entry | None) -> Ratio | None:
    """Divide turn by turn; None if there is no turn of both, or both are the same."""
    their = other.turns if other and other is not entry else ()
    pairs = zip(entry.turns, their, strict=False)
    both = [(median(a[index]), median(b[index])) for a, b in pairs]
    ratios = [a / b for a, b in both if b > LEAST]
    if len(ratios) < 2:
        return Ratio(*ratios * 3) if ratios else None
    return Ratio(*quantiles(ratios, n=4, method="inclusive"))


def rank(ratio: Ratio) -> int:
    """Rank a ratio to aiogpu: 0 from 10 on, 1 from 2 on, 2 from 1 on, 3 equal, 4 less.

    Equal means that the quartiles lie on both sides of 1.
    """
    if ratio.low <= 1 <= ratio.high:
        return 3
    return next((i for i, n in enumerate((10, 2, 1)) if ratio.middle >= n), 4)


def conclusion(table: Sequence[Sequence[Line]]) -> str:
    """Say how often aiogpu wins and by how much, and list what it loses."""
    counts = [0] * 5
    losses: list[tuple[Ratio, str]] = []
    for line in chain.from_iterable(table):
        ratio = line.beside_ours
        if line.entry.system in NO_PEERS or ratio is None:
            continue
        counts[rank(ratio)] += 1
        if rank(ratio) == 4:
            figure = f"{line.entry.system} needs {line.amount(line.p50)}"
            text = f"- {line.metric.title}: {figure}, {ratio} of what aiogpu needs"
            losses.append((ratio, text))
    tenfold, twofold, faster, equal, slower = counts
    text = (
        f"Of {sum(counts)} comparisons with peers, aiogpu needs a tenth or less (an "
        f"order of magnitude) in {tenfold}, a half or less in {twofold} more, less in "
        f"{faster} more; it is equal (the quartiles lie on both sides) in {equal}, and "
        f"needs more in {slower}."
    )
    if not losses:
        return f"{text}\n\nNo peer was faster than aiogpu in any workload."
    items = "\n".join(item for _, item in sorted(losses))
    return f"{text}\n\n**Where aiogpu loses:**\n\n{items}"


def overview(table: Sequence[Sequence[Line]]) -> str:
    """Render a line for each metric, a column for each system."""
    systems = list(dict.fromkeys(line.entry.system for each in table for line in each))
    rows = [["", *systems]]
    for lines_of_one in table:
        cells = {line.entry.system: line.cell() for line in lines_of_one}
        title = lines_of_one[0].metric.title
        rows.append([title, *(cells.get(system, "-") for system in systems)])
    return markdown(rows)


def details(table: Sequence[Sequence[Line]]) -> str:
    """Render a table of all lines, with notes and reasons; and the floors."""
    whole = markdown([HEAD, *(line.cells() for line in chain.from_iterable(table))])
    names = dict.fromkeys(each[0].entry.workload for each in table)
    floors = [["workload", "floor"], *([name, WORKLOADS[name].floor] for name in names)]
    return f"### All figures\n\n{whole}\n\n### Floors\n\n{markdown(floors)}"
