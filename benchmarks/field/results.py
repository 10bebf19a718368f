"""What a run has found, in Markdown: each system beside the floor and aiogpu.

A block is divided by the block of the other in the same turn; the median of these
ratios is the figure, and their quartiles are its spread.
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

OURS: Final = "aiogpu"
"""The system beside which the others are put."""
NO_PEERS: Final = frozenset({FLOOR, OURS, "node"})
LEAST: Final = 1e-9
"""Seconds or bytes; below this there is nothing to divide by."""
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
        low, middle, high = (
            f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in self
        )
        return f"{middle} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Line:
    """One system's figures of one metric.

    Attributes:
        p50, p99: of all samples; None where there are none.
        beside_floor: how many times the floor's.
        beside_ours: how many times aiogpu's.
    """

    metric: Metric
    entry: Entry
    p50: float | None
    p99: float | None
    beside_floor: Ratio | None
    beside_ours: Ratio | None

    def amount(self, value: float | None) -> str:
        """Render a figure in the unit in which it is read best."""
        unit = self.metric.unit
        if not value:
            return "" if value is None else f"0 {unit}"
        fitting = (pair for pair in UNITS[unit] if value >= pair[0])
        factor, name = next(fitting, UNITS[unit][-1])
        scaled = value / factor
        return f"{scaled:,.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"

    def cell(self) -> str:
        """Return the figure, and how many times aiogpu's it is."""
        if self.p50 is None:
            return "-"
        figure, beside = self.amount(self.p50), self.beside_ours
        if self.entry.system == FLOOR or beside is None:
            return figure
        times = f"{beside.middle:{',.0f' if beside.middle >= 10 else '.2g'}}"
        return f"{figure} (**{times}**)"

    def cells(self) -> list[str]:
        """Return its line of the whole table."""
        notes = "; ".join([self.entry.why] if self.entry.why else self.entry.notes)
        return [
            *(self.metric.title, self.entry.system),
            *(self.amount(self.p50), self.amount(self.p99)),
            *(
                "" if not each else f"{each}"
                for each in (self.beside_floor, self.beside_ours)
            ),
            *(f"{len(self.entry.turns)}", notes.replace("|", "/").replace("\n", " ")),
        ]


def lines(entries: Sequence[Entry]) -> list[list[Line]]:
    """Return for each metric the line of each system."""
    found: dict[str, list[Line]] = {}
    by_name = {(entry.workload, entry.system): entry for entry in entries}
    for entry in entries:
        others = [by_name.get((entry.workload, name)) for name in (FLOOR, OURS)]
        for index, metric in enumerate(WORKLOADS[entry.workload].metrics):
            samples = sorted(chain.from_iterable(turn[index] for turn in entry.turns))
            p99 = samples[len(samples) * 99 // 100] if samples else None
            p50 = median(samples) if samples else None
            ratios = (_beside(index, entry, other) for other in others)
            line = Line(metric, entry, p50, p99, *ratios)
            found.setdefault(metric.title, []).append(line)
    return list(found.values())


def _beside(index: int, entry: Entry, other: Entry | None) -> Ratio | None:
    """Divide turn by turn; None where one has nothing, or both are the same."""
    their = other.turns if other and other is not entry else ()
    pairs = zip(entry.turns, their, strict=False)
    both = [(median(a[index]), median(b[index])) for a, b in pairs]
    ratios = [a / b for a, b in both if b > LEAST]
    if len(ratios) < 2:
        return Ratio(*ratios * 3) if ratios else None
    return Ratio(*quantiles(ratios, n=4, method="inclusive"))


def rank(ratio: Ratio) -> int:
    """Return 0 for ten times aiogpu's, 1 for twice, 2 for more, 3 equal, 4 for less.

    Where the quartiles lie on both sides of 1, the two are equal.
    """
    if ratio.low <= 1 <= ratio.high:
        return 3
    return next((i for i, n in enumerate((10, 2, 1)) if ratio.middle >= n), 4)


def conclusion(found: Sequence[Sequence[Line]]) -> str:
    """Say how often aiogpu wins and by how much, and all that it loses."""
    counts = [0] * 5
    losses: list[tuple[Ratio, str]] = []
    for line in chain.from_iterable(found):
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
        return f"{text}\n\nNo peer was faster than aiogpu in anything that was asked."
    items = "\n".join(item for _, item in sorted(losses))
    return f"{text}\n\n**Where aiogpu loses:**\n\n{items}"


def overview(found: Sequence[Sequence[Line]]) -> str:
    """Render a line for each metric, a column for each system."""
    systems = list(dict.fromkeys(line.entry.system for each in found for line in each))
    rows = [["", *systems]]
    for each in found:
        cells = {line.entry.system: line.cell() for line in each}
        titled = [cells.get(system, "-") for system in systems]
        rows.append([each[0].metric.title, *titled])
    return markdown(rows)


def details(found: Sequence[Sequence[Line]]) -> str:
    """Render a table of all lines, with notes and reasons; and the floors."""
    whole = markdown([HEAD, *(line.cells() for line in chain.from_iterable(found))])
    names = dict.fromkeys(each[0].entry.workload for each in found)
    floors = [["workload", "floor"], *([name, WORKLOADS[name].floor] for name in names)]
    return f"### All figures\n\n{whole}\n\n### Floors\n\n{markdown(floors)}"
