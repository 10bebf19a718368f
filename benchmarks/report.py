"""What is kept of a run: the machine's facts, JSON, tables in benchmarks/results."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import click

RESULTS: Final = Path(__file__).with_name("results")
MARKS: Final = re.compile(
    r"(<!-- figures: begin.*?-->).*(<!-- figures: end -->)", re.DOTALL
)
Command = TypeVar("Command", bound=Callable[..., Any])


def options(command: Command) -> Command:
    """Add the options that the command of each part has: see `keep_run`."""
    text = "Put the tables into this part's page in benchmarks/results."
    command = click.option("--keep", is_flag=True, help=text)(command)
    path = click.Path(dir_okay=False, path_type=Path)
    text = "Write all that was found to FILE."
    command = click.option("--json", "file", type=path, help=text)(command)
    text = "Measure little: shows that all of it runs."
    return click.option("--quick", is_flag=True, help=text)(command)


def keep_run(
    page: Path, text: str, found: Mapping[str, Any], file: Path | None, keep: bool
) -> None:
    """Write what was found to the file, and the text between the marks of the page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
    if keep:
        before = page.read_text(encoding="utf-8")
        after, count = MARKS.subn(lambda m: f"{m[1]}\n\n{text}\n\n{m[2]}", before)
        if not count:
            raise ValueError(
                f"{page} must hold <!-- figures: begin --> and below it "
                f"<!-- figures: end -->"
            )
        page.write_text(after, encoding="utf-8")


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed distributions."""
    return {name: version(name) for name in libraries}


def machine(libraries: Mapping[str, str]) -> str:
    """Return what a reader must know of where it ran; `libraries` are versions."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    names = ", ".join(f"{name} {number}" for name, number in libraries.items())
    return (
        f"{model[1] if model else platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
        f"Linux {platform.release()}, Python {platform.python_version()}, {names}; "
        f"load average {load_average()}"
    )


def load_average() -> str:
    """Return the present load averages."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Render a table; the first line is its head."""
    head, *rest = lines
    ruled = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)
