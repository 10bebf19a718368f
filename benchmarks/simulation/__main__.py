"""`python -m benchmarks.simulation [--tasks N] [--gpus N] [--seed S] [--json FILE]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.simulation.boxes import GPUS, Boxes, RayBoxes
from benchmarks.simulation.core import Core
from benchmarks.simulation.first_fit import FirstFit
from benchmarks.simulation.play import play
from benchmarks.simulation.tables import facts_of, facts_of_trace, speed_of, text
from benchmarks.simulation.trace import draw

FULL: Final = 1_000_000, 10_000
QUICK: Final = 2_000, 64


@click.command()
@click.option("--tasks", type=click.IntRange(1), default=FULL[0], show_default=True)
@click.option("--gpus", type=click.IntRange(GPUS), default=FULL[1], show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures to FILE.",
)
@click.option("--quick", is_flag=True, help="A small one: shows that all of it runs.")
def main(tasks: int, gpus: int, seed: int, file: Path | None, quick: bool) -> None:
    """Let a drawn trace happen under the node's rule, and under others."""
    if gpus % GPUS:
        raise click.BadParameter(f"--gpus={gpus} is no multiple of {GPUS}, a box.")
    tasks, gpus = QUICK if quick else (tasks, gpus)
    facts = simulate(tasks, gpus, seed)
    click.echo(text(facts))
    if file is not None:
        file.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def simulate(tasks: int, gpus: int, seed: int) -> dict[str, Any]:
    """All rules, one after the other, on the same trace."""
    trace = draw(tasks, gpus, seed)
    core = Core(trace)
    told = []
    for rule in (core, FirstFit(trace), Boxes(trace), RayBoxes(trace)):
        click.echo(f"{rule.name} ...", err=True)
        told.append(facts_of(trace, play(trace, rule)))
    return {
        "trace": facts_of_trace(trace, seed),
        "speed": speed_of(core, tasks),
        "rules": told,
    }


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.simulation")
