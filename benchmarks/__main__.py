"""`python -m benchmarks [WORKLOAD ...] [--json FILE] [--page FILE] [--quick]`.

And `python -m benchmarks field`: aiogpu beside its peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import uvloop

from benchmarks.environments import ENVIRONMENTS
from benchmarks.field.command import field
from benchmarks.method import FULL, QUICK, Scale
from benchmarks.port import Environment, UnsupportedError
from benchmarks.report import (
    fill,
    heading,
    load_average,
    machine_facts,
    report,
    table,
    write_report,
)
from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS

OTHERS: Final = (
    "Others, each with its own --help: `python -m benchmarks field`, and "
    "`python -m benchmarks.` followed by soak, simulation or counts."
)


class Commands(click.Group):
    """Whatever does not begin with the name of a command is for `workloads`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put that name there."""
        if not args or args[0] not in self.commands:
            args = ["workloads", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Commands)
def main() -> None:
    """What aiogpu costs, beside what the machine allows."""


@main.command("workloads", epilog=OTHERS)
@click.argument("workloads", nargs=-1, type=click.Choice(list(WORKLOADS)))
@click.option(
    "--environment",
    "system",
    type=click.Choice(list(ENVIRONMENTS)),
    default="aiogpu",
    show_default=True,
    help="The system to measure.",
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write machine facts and all samples to FILE.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the table between the marks of this Markdown page.",
)
@click.option("--quick", is_flag=True, help="Few calls: shows that all of it runs.")
def measure(
    workloads: Sequence[str],
    system: str,
    file: Path | None,
    page: Path | None,
    quick: bool,
) -> None:
    """Measure WORKLOADS, all of them unless named. A slow result is no failure."""
    environment = ENVIRONMENTS[system]()
    machine = machine_facts(environment)
    click.echo(heading(machine))
    scale = QUICK if quick else FULL
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure_all(environment, workloads or list(WORKLOADS), scale))
    click.echo(table(rows))
    click.echo(f"load average at the end {load_average()}")
    if file is not None:
        write_report(file, report(environment, machine, rows, quick))
    if page is not None:
        fill(page, machine, rows)


async def measure_all(
    environment: Environment, names: Sequence[str], scale: Scale
) -> list[Row]:
    """All rows, in order; one that cannot be had says so."""
    rows: list[Row] = []
    for name in names:
        click.echo(f"{name} ...", err=True)
        try:
            rows += await WORKLOADS[name](environment, scale)
        except UnsupportedError as reason:
            rows.append(Row(name, "", f"not measured: {reason}"))
    return rows


main.add_command(field)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
