"""What is kept of a run: the machine's facts, JSON, and tables in Markdown pages."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN = "<!-- figures: begin"
END = "<!-- figures: end -->"


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed distributions."""
    return {name: version(name) for name in libraries}


def machine_facts(libraries: Mapping[str, str]) -> dict[str, Any]:
    """Return what a reader must know of where it ran; `libraries` are versions."""
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


def heading(machine: Mapping[str, Any]) -> str:
    """Describe the machine in one line."""
    libraries = ", ".join(f"{name} {v}" for name, v in machine["libraries"].items())
    return (
        f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores, "
        f"Linux {machine['kernel']}, Python {machine['python']}, {libraries}; "
        f"load average {load_average(machine['load_average'])}"
    )


def load_average(averages: Sequence[float] | None = None) -> str:
    """Render these load averages, or the present ones."""
    return " ".join(f"{load:.2f}" for load in averages or os.getloadavg())


def write_json(path: Path, machine: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Write a run; `machine` was taken before it. Directories are made."""
    content = {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "load_average_after": load_average(),
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Render a table; the first line is its head."""
    head, *rest = lines
    ruled = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def fill_page(path: Path, text: str) -> None:
    """Put a text between the marks of a Markdown page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} must hold {BEGIN}...--> and below it {END}")
    mark, close, _ = rest.partition("-->")
    path.write_text(
        f"{before}{begin}{mark}{close}\n\n{text}\n\n{end}{after}", encoding="utf-8"
    )
