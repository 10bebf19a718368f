"""The tables of a run, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.field.figures import OURS, Line, Verdict, losses, verdict
from benchmarks.field.question import FLOOR, Question
from benchmarks.report import grid

FAMILIES: Final = {
    "calls": "Calls",
    "values": "Values",
    "processes": "Processes",
    "day": "A mixed day on four GPUs",
    "waiting": "Very many waiting tasks",
}
"""What they are called, in the order in which they are told."""
UNITS: Final = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e6, "MB"), (1e3, "KB"), (1, "B")),
}


def amount(value: float | None, unit: str) -> str:
    """A figure in the unit in which it is read best."""
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
    """A line for each metric, a column for each contestant."""
    contestants = list(
        dict.fromkeys(line.contestant for each in found.values() for line in each)
    )
    rows = [["", *contestants]]
    for each in found.values():
        by_name = {line.contestant: line for line in each}
        cells = [_cell(by_name.get(contestant)) for contestant in contestants]
        rows.append([each[0].metric.title, *cells])
    return grid(rows)


def _cell(line: Line | None) -> str:
    if line is None or line.p50 is None:
        return "-"
    figure = amount(line.p50, line.metric.unit)
    beside = line.beside_ours
    if line.contestant in (FLOOR, OURS) or beside is None:
        return figure
    times = f"{beside.middle:,.0f}" if beside.middle >= 10 else f"{beside.middle:.2g}"
    return f"{figure} (**{times}**)"


def details(
    questions: Mapping[str, Question], found: Mapping[str, Sequence[Line]]
) -> str:
    """A table for each family, with spread, notes and reasons."""
    parts = []
    for family, title in FAMILIES.items():
        rows = [
            ["", "", "p50", "p99", "x floor", "x aiogpu", "blocks", "notes"],
            *(
                _row(line)
                for each in found.values()
                for line in each
                if questions[line.question].family == family
            ),
        ]
        if len(rows) > 1:
            parts += [f"### {title}", f"![{title}](plots/{family}.svg)", grid(rows)]
    return "\n\n".join(parts)


def _row(line: Line) -> list[str]:
    unit = line.metric.unit
    notes = [line.why] if line.why else list(line.notes)
    return [
        line.metric.title,
        line.contestant,
        amount(line.p50, unit),
        amount(line.p99, unit),
        str(line.beside_floor or "") if line.contestant != FLOOR else "",
        str(line.beside_ours or "") if line.contestant != OURS else "",
        f"{len(line.turns)}",
        "; ".join(note.replace("|", "/").replace("\n", " ") for note in notes),
    ]


def judgement(found: Mapping[str, Sequence[Line]]) -> str:
    """How often aiogpu wins and by how much, and all that it loses."""
    counted, lost = verdict(found), losses(found)
    text = [_sentence(counted)]
    if lost:
        text.append("**Where aiogpu loses:**")
        text.append(
            "\n".join(
                f"- {line.metric.title}: {line.contestant} needs "
                f"{amount(line.p50, line.metric.unit)}, "
                f"{line.beside_ours} of what aiogpu needs"
                for line in lost
            )
        )
    else:
        text.append("No peer was faster than aiogpu in anything that was asked.")
    return "\n\n".join(text)


def _sentence(counted: Verdict) -> str:
    return (
        f"Of {counted.all} comparisons with peers, aiogpu needs a tenth or less (an "
        f"order of magnitude) in {counted.tenfold}, a half or less in "
        f"{counted.twofold} more, less in {counted.faster} more; it is equal (the "
        f"quartiles lie on both sides) in {counted.equal}, and needs more in "
        f"{counted.slower}."
    )


def floors(questions: Mapping[str, Question]) -> str:
    """What the floor of each question is."""
    rows = [["question", "floor"]]
    rows += [[question.name, question.what_floor] for question in questions.values()]
    return grid(rows)
