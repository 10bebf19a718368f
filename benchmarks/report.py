"""What is kept of a run: the machine's facts and all samples; and a table of it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.port import Environment
from benchmarks.rows import Row

SCHEMA = 1
BEGIN = "<!-- figures: begin"
END = "<!-- figures: end -->"
HEAD = (
    "",
    "p50",
    "p99",
    "unit",
    "floor p50",
    "p99",
    "ratio",
    "note",
    "goal",
    "verdict",
)


def machine_facts(environment: Environment) -> dict[str, Any]:
    """What a reader must know of where it ran."""
    return machine_with({name: version(name) for name in environment.libraries})


def machine_with(libraries: Mapping[str, str]) -> dict[str, Any]:
    """The same, where the versions are known."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": dict(libraries),
        "load_average": os.getloadavg(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def report(
    environment: Environment, machine: dict[str, Any], rows: Sequence[Row], quick: bool
) -> dict[str, Any]:
    """All of a run; `machine` was taken before it."""
    return {
        "schema": SCHEMA,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment.name,
        "is_quick": quick,
        "machine": machine,
        "load_average_after": os.getloadavg(),
        "rows": [asdict(row) for row in rows],
    }


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write it as JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def heading(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    libraries = ", ".join(f"{name} {v}" for name, v in machine["libraries"].items())
    return (
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"Linux {machine['kernel']}, Python {machine['python']}, {libraries}; "
        f"load average {load_average(machine['load_average'])}"
    )


def load_average(averages: Sequence[float] | None = None) -> str:
    """These load averages, or the present ones, as text."""
    return " ".join(f"{load:.2f}" for load in averages or os.getloadavg())


def table(rows: Iterable[Row]) -> str:
    """The rows for the terminal."""
    lines = [HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in {0, 3, 7, 8, 9} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def fill(path: Path, machine: dict[str, Any], rows: Iterable[Row]) -> None:
    """Put the run's facts and its table between the marks of a Markdown page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    facts = f"{heading(machine)} before and {load_average()} after."
    put(path, f"{facts}\n\n{grid([HEAD, *map(_cells, rows)])}")


def grid(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its head."""
    head, *rest = lines
    ruled = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def put(path: Path, found: str) -> None:
    """Put a text between the marks of a Markdown page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} must hold {BEGIN}...--> and below it {END}")
    mark, close, _ = rest.partition("-->")
    path.write_text(
        f"{before}{begin}{mark}{close}\n\n{found}\n\n{end}{after}", encoding="utf-8"
    )


def _cells(row: Row) -> tuple[str, ...]:
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
