"""What a run has found, in Markdown: each system's figures beside the floor's and
aiogpu's.

A block is divided by the block of the other in the same turn; the median of these
ratios is the figure, and their quartiles are its spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median, quantiles
from typing import Final, NamedTuple

from benchmarks.field.process import FLOOR
from benchmarks.field.run import Entry
from benchmarks.field.workloads import Metric, Workload
from benchmarks.report import markdown

OURS: Final = "aiogpu"
"""The system beside which the others are put."""
NO_PEERS: Final = frozenset({FLOOR, OURS, "node"})
LEAST: Final = 1e-9
"""Seconds or bytes; below this there is nothing to divide by."""
FAMILIES: Final = {
    "calls": "Calls",
    "values": "Values",
    "processes": "Processes",
    "day": "A mixed day on four GPUs",
    "waiting": "Very many waiting tasks",
}
"""Headings of the tables, in order."""
UNITS: Final = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e6, "MB"), (1e3, "KB"), (1, "B")),
}


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
    """One system's figures of one metric.

    Attributes:
        turns: the median of each block.
        p50, p99: of all samples; None where there are none.
        beside_floor: how many times the floor's.
        beside_ours: how many times aiogpu's.
        why: why there are no figures; empty if there are.
    """

    metric: Metric
    workload: str
    system: str
    turns: Sequence[float]
    p50: float | None
    p99: float | None
    beside_floor: Ratio | None
    beside_ours: Ratio | None
    notes: Sequence[str]
    why: str


def lines(
    workloads: Mapping[str, Workload], entries: Sequence[Entry]
) -> dict[str, list[Line]]:
    """Return the lines by metric, in the order of the entries."""
    found: dict[str, list[Line]] = {}
    by_name = {(entry.workload, entry.system): entry for entry in entries}
    for entry in entries:
        floor, ours = (by_name.get((entry.workload, name)) for name in (FLOOR, OURS))
        for metric in workloads[entry.workload].metrics:
            samples = sorted(chain.from_iterable(_blocks(metric, entry)))
            last = len(samples) - 1
            line = Line(
                metric,
                entry.workload,
                entry.system,
                [median(block) for block in _blocks(metric, entry)],
                median(samples) if samples else None,
                samples[min(len(samples) * 99 // 100, last)] if samples else None,
                _beside(metric, entry, floor),
                _beside(metric, entry, ours),
                entry.notes,
                entry.why,
            )
            found.setdefault(metric.name, []).append(line)
    return found


def _blocks(metric: Metric, entry: Entry) -> list[list[float]]:
    return [turn[metric.name] for turn in entry.turns if turn.get(metric.name)]


def _beside(metric: Metric, entry: Entry, other: Entry | None) -> Ratio | None:
    """Divide turn by turn; None where one of the two has nothing."""
    if other is None:
        return None
    pairs = zip(_blocks(metric, entry), _blocks(metric, other), strict=False)
    return spread(
        [median(own) / median(their) for own, their in pairs if median(their) > LEAST]
    )


def spread(values: Sequence[float]) -> Ratio | None:
    """Return their median and quartiles; None of no values."""
    if len(values) < 2:
        return Ratio(*[values[0]] * 3) if values else None
    return Ratio(*quantiles(values, n=4, method="inclusive"))


def peers(found: Mapping[str, Sequence[Line]]) -> Iterable[tuple[Line, Ratio]]:
    """Return each pair of a metric and a peer, with its ratio to aiogpu."""
    for line in chain.from_iterable(found.values()):
        if line.system not in NO_PEERS and line.beside_ours is not None:
            yield line, line.beside_ours


def rank(ratio: Ratio) -> int:
    """Return 0 for ten times aiogpu's, 1 for twice, 2 for more, 3 equal, 4 for less.

    Where the quartiles lie on both sides of 1, the two are equal.
    """
    if ratio.low <= 1 <= ratio.high:
        return 3
    if ratio.middle < 1:
        return 4
    return 0 if ratio.middle >= 10 else 1 if ratio.middle >= 2 else 2


def conclusion(found: Mapping[str, Sequence[Line]]) -> str:
    """Say how often aiogpu wins and by how much, and all that it loses."""
    counts = [0] * 5
    losses: list[tuple[Ratio, Line]] = []
    for line, ratio in peers(found):
        counts[rank(ratio)] += 1
        if rank(ratio) == 4:
            losses.append((ratio, line))
    tenfold, twofold, faster, equal, slower = counts
    text = (
        f"Of {sum(counts)} comparisons with peers, aiogpu needs a tenth or less (an "
        f"order of magnitude) in {tenfold}, a half or less in {twofold} more, less in "
        f"{faster} more; it is equal (the quartiles lie on both sides) in {equal}, and "
        f"needs more in {slower}."
    )
    if not losses:
        return f"{text}\n\nNo peer was faster than aiogpu in anything that was asked."
    items = "\n".join(
        f"- {line.metric.title}: {line.system} needs "
        f"{amount(line.p50, line.metric.unit)}, {ratio} of what aiogpu needs"
        for ratio, line in sorted(losses, key=lambda each: each[0])
    )
    return f"{text}\n\n**Where aiogpu loses:**\n\n{items}"


def amount(value: float | None, unit: str) -> str:
    """Render a figure in the unit in which it is read best."""
    if value is None:
        return ""
    if not value:
        return f"0 {unit}"
    factor, name = next(
        (pair for pair in UNITS[unit] if value >= pair[0]), UNITS[unit][-1]
    )
    scaled = value / factor
    return f"{scaled:,.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"


def overview(found: Mapping[str, Sequence[Line]]) -> str:
    """Render a line for each metric, a column for each system."""
    systems = list(
        dict.fromkeys(line.system for each in found.values() for line in each)
    )
    rows = [["", *systems]]
    for each in found.values():
        by_name = {line.system: line for line in each}
        cells = [_cell(by_name.get(system)) for system in systems]
        rows.append([each[0].metric.title, *cells])
    return markdown(rows)


def _cell(line: Line | None) -> str:
    if line is None or line.p50 is None:
        return "-"
    figure = amount(line.p50, line.metric.unit)
    beside = line.beside_ours
    if line.system in (FLOOR, OURS) or beside is None:
        return figure
    times = f"{beside.middle:,.0f}" if beside.middle >= 10 else f"{beside.middle:.2g}"
    return f"{figure} (**{times}**)"


def details(
    workloads: Mapping[str, Workload], found: Mapping[str, Sequence[Line]]
) -> str:
    """Render a table for each family, with notes and reasons; and the floors."""
    parts = []
    for family, title in FAMILIES.items():
        rows = [
            _row(line)
            for line in chain.from_iterable(found.values())
            if workloads[line.workload].family == family
        ]
        if rows:
            head = ["", "", "p50", "p99", "x floor", "x aiogpu", "blocks", "notes"]
            parts += [f"### {title}", markdown([head, *rows])]
    names = dict.fromkeys(line.workload for line in chain.from_iterable(found.values()))
    floors = [["workload", "floor"], *([name, workloads[name].floor] for name in names)]
    return "\n\n".join([*parts, "### Floors", markdown(floors)])


def _row(line: Line) -> list[str]:
    unit = line.metric.unit
    notes = [line.why] if line.why else list(line.notes)
    return [
        line.metric.title,
        line.system,
        amount(line.p50, unit),
        amount(line.p99, unit),
        str(line.beside_floor or "") if line.system != FLOOR else "",
        str(line.beside_ours or "") if line.system != OURS else "",
        f"{len(line.turns)}",
        "; ".join(note.replace("|", "/").replace("\n", " ") for note in notes),
    ]
