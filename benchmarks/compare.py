"""`python -m benchmarks.compare`: aiogpu beside its peers, in three minutes.

It makes an environment of its own in `.compare`, installs aiogpu and its peers there,
runs six workloads of `benchmarks.field`, prints a table, and draws the README's chart.
`--kept` draws the chart again, from the figures that were kept.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from benchmarks import report

ROOT: Final = Path(__file__).parents[1]
ENVIRONMENT: Final = ROOT / ".compare"
FIGURES: Final = report.RESULTS / "compare.json"
CHART: Final = ROOT / "docs/pictures/compare.svg"
WORKLOADS: Final = {
    "call": "one call, awaited",
    "gathered": "one call, of many gathered",
    "fresh-bare": "a GPU task in a fresh process",
    "fresh-torch": "the same with torch imported",
    "cancel": "a busy loop, cancelled, has stopped",
    "start": "a new program to its first result",
}
"""The workloads, and their titles in the chart."""
SYSTEMS: Final = {
    "aiogpu": "aiogpu",
    "executor": "ProcessPoolExecutor",
    "ray": "Ray",
    "dask": "Dask",
}
"""The systems of the chart; the field measures more."""
COLOURS: Final = {
    "aiogpu": "#00796b",
    "executor": "#8d6e63",
    "ray": "#1976d2",
    "dask": "#ef6c00",
}
WIDTH, LEFT, BAR, GAP, TOP = 760, 260, 14, 14, 46
NOTHING: Final = "\N{EN DASH}"
"""The cell of a system that has no such thing."""
FLOOR, CEILING = 1e-5, 10.0
"""Seconds at both ends of the logarithmic axis."""
DECADES: Final = ((1e-5, "10 µs"), (1e-3, "1 ms"), (1e-1, "0.1 s"), (10.0, "10 s"))
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#666}"
    ".line{stroke:#ddd}@media(prefers-color-scheme:dark){text{fill:#ddd}"
    ".small{fill:#aaa}.line{stroke:#444}}"
)

Figures = Mapping[str, Mapping[str, float]]
"""Seconds, by workload and system; a system that has no such thing is left out."""


def in_words(seconds: float) -> str:
    """Render a time with three digits at most: 86 µs, 1.93 ms, 2.63 s."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor or unit == "µs":
            value = seconds / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError("a unit fits")


def medians(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the median of each system in each workload, from the field's JSON."""
    found: dict[str, dict[str, float]] = {name: {} for name in WORKLOADS}
    for entry in results["entries"]:
        workload, system = entry["workload"], entry["system"]
        if workload in found and system in SYSTEMS and entry["turns"]:
            samples = [value for turn in entry["turns"] for value in turn[0]]
            found[workload][system] = median(samples)
    return found


def table(figures: Figures) -> str:
    """Return the figures as a table in Markdown."""
    rows = [
        "".join(
            f" {in_words(found[name]) if name in found else NOTHING} |"
            for name in SYSTEMS
        )
        for found in figures.values()
    ]
    head = f"| | {' | '.join(SYSTEMS.values())} |\n|---{'|---' * len(SYSTEMS)}|\n"
    titles = (WORKLOADS[name] for name in figures)
    return head + "".join(
        f"| {title} |{row}\n" for title, row in zip(titles, rows, strict=True)
    )


def chart(figures: Figures, facts: str) -> str:
    """Return the figures as an SVG with a logarithmic axis; shorter is better."""
    scale = (WIDTH - LEFT - 90) / math.log10(CEILING / FLOOR)

    def x(seconds: float) -> float:
        return LEFT + scale * math.log10(max(seconds, FLOOR * 1.2) / FLOOR)

    parts: list[str] = []
    y = float(TOP)
    for workload, found in figures.items():
        middle = y + BAR * len(found) / 2 + 4
        title = escape(WORKLOADS[workload])
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{title}</text>'
        )
        for name in (each for each in SYSTEMS if each in found):
            end = x(found[name])
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 3}" '
                f'rx="2" fill="{COLOURS[name]}"/>'
                f'<text class="small" x="{end + 5:.1f}" y="{y + BAR - 5}">'
                f"{in_words(found[name])}</text>"
            )
            y += BAR
        y += GAP
    axis = [
        f'<line class="line" x1="{LEFT + scale * math.log10(at / FLOOR):.1f}" '
        f'x2="{LEFT + scale * math.log10(at / FLOOR):.1f}" y1="{TOP - 6}" y2="{y}"/>'
        f'<text class="small" text-anchor="middle" y="{y + 14}" '
        f'x="{LEFT + scale * math.log10(at / FLOOR):.1f}">{label}</text>'
        for at, label in DECADES
    ]
    legend, at = [], float(LEFT)
    for name, title in SYSTEMS.items():
        legend.append(
            f'<rect x="{at}" y="14" width="11" height="11" fill="{COLOURS[name]}"/>'
            f'<text x="{at + 16}" y="24">{title}</text>'
        )
        at += 40 + 7.6 * len(title)
    note = f'<text class="small" x="10" y="{y + 36}">{escape(facts)}</text>'
    body = "\n".join([*axis, *parts, *legend, note])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 46:.0f}" '
        f'role="img" aria-label="Times of aiogpu and its peers; shorter is better">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def environment() -> Path:
    """Make the environment if there is none; return its interpreter."""
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        click.echo(f"making {ENVIRONMENT}, once", err=True)
        venv.create(ENVIRONMENT, with_pip=True)
    install = str(python), "-m", "pip", "install", "-q", "-e", ".[bench]", "torch"
    subprocess.run(install, cwd=ROOT, check=True)
    return python


def measure(python: Path, quick: bool) -> tuple[dict[str, dict[str, float]], str]:
    """Run the field; return the figures, and when and where they were measured."""
    output = ENVIRONMENT / "field.json"
    command = [str(python), "-m", "benchmarks.field", *WORKLOADS, "--json", str(output)]
    command += [part for name in SYSTEMS for part in ("--system", name)]
    subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    cores = len(os.sched_getaffinity(0))
    facts = (
        f"Logarithmic; shorter is better. {cores} cores, logical GPUs, Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}, {datetime.now(UTC):%d %B %Y}."
    )
    return medians(json.loads(output.read_text())), facts


@click.command()
@click.option("--kept", is_flag=True, help="Measure nothing: draw the kept figures.")
@click.option("--quick", is_flag=True, help="Measure very little; change no file.")
def main(kept: bool, quick: bool) -> None:
    """Measure aiogpu beside its peers, print a table, and draw the README's chart."""
    if kept:
        results = json.loads(FIGURES.read_text())
        figures, facts = results["seconds"], results["facts"]
    else:
        figures, facts = measure(environment(), quick)
    click.echo(f"{table(figures)}\n{facts}")
    if quick:
        return
    FIGURES.write_text(
        json.dumps({"facts": facts, "seconds": figures}, indent=1) + "\n"
    )
    CHART.write_text(chart(figures, facts))
    click.echo(
        f"written: {FIGURES.relative_to(ROOT)}, {CHART.relative_to(ROOT)}", err=True
    )


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.compare")
