"""What a run writes: facts about the machine, JSON, tables in benchmarks/results."""

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
    """Add the options that all commands share: see `keep_run`."""
    text = "Write the tables into this command's page in benchmarks/results."
    command = click.option("--keep", is_flag=True, help=text)(command)
    path = click.Path(dir_okay=False, path_type=Path)
    text = "Write all samples to FILE."
    command = click.option("--json", "file", type=path, help=text)(command)
    text = "Measure very little, to check that everything runs."
    return click.option("--quick", is_flag=True, help=text)(command)


def keep_run(
    page: Path, text: str, results: Mapping[str, Any], file: Path | None, keep: bool
) -> None:
    """Write the results to `file`, if any, and the text between the page's marks.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, separators=(",", ":")), encoding="utf-8")
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
    """Describe the machine, Python and the libraries, which have their versions."""
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
    """Return the current load averages."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Render a table of which the first line is the header."""
    head, *rest = lines
    ruled = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)
