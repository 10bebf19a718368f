"""`python -m benchmarks.micro [NAME ...] [--json FILE] [--page FILE] [--quick]`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import uvloop

from benchmarks.micro.actors import creation, many_actors
from benchmarks.micro.backlog import backlog
from benchmarks.micro.calls import (
    batching,
    latency,
    mapping,
    streams,
    throughput,
)
from benchmarks.micro.isolation import cancel, isolated, spaced
from benchmarks.micro.ray import ray
from benchmarks.micro.rows import (
    HEAD,
    Row,
    Scale,
    UnavailableError,
    cells,
    missing_row,
    table,
)
from benchmarks.micro.scheduler import scheduler
from benchmarks.micro.service import service
from benchmarks.micro.start import start
from benchmarks.micro.values import values
from benchmarks.report import (
    fill_page,
    heading,
    load_average,
    machine_facts,
    markdown,
    versions,
    write_json,
)

Benchmark = Callable[[Scale], Awaitable[list[Row]]]

BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "latency": latency,
    "throughput": throughput,
    "start": start,
    "isolated": isolated,
    "spaced": spaced,
    "cancel": cancel,
    "streams": streams,
    "actors": creation,
    "many_actors": many_actors,
    "batching": batching,
    "values": values,
    "map": mapping,
    "backlog": backlog,
    "scheduler": scheduler,
    "service": service,
    "ray": ray,
}
"""In the order in which they run."""
LIBRARIES: Final = ("aiogpu", "uvloop", "msgpack", "cloudpickle", "nvidia-ml-py")


def listing() -> str:
    """Describe each benchmark by the first line of its docstring."""
    lines = (
        f"  {name:12}{(run.__doc__ or '').splitlines()[0]}"
        for name, run in BENCHMARKS.items()
    )
    return "\b\nNames:\n" + "\n".join(lines)


@click.command(epilog=listing())
@click.argument(
    "names", nargs=-1, type=click.Choice(list(BENCHMARKS)), metavar="[NAME]..."
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write machine facts and all samples to FILE, e.g. in benchmarks/results/.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the table between the marks of this Markdown page.",
)
@click.option("--quick", is_flag=True, help="Few calls: shows that all of it runs.")
def main(
    names: Sequence[str], file: Path | None, page: Path | None, quick: bool
) -> None:
    """Measure what operations of aiogpu cost, each beside its floor.

    Runs the benchmarks NAME, all of them by default (about eight minutes), and prints
    a row for each figure: its p50 and p99, the floor's, the ratio of both (the median
    over blocks that run in turn), its goal and whether that is met. A slow result is
    no failure. Nothing else should run on the machine.
    """
    facts = machine_facts(versions(LIBRARIES))
    click.echo(heading(facts))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(names or list(BENCHMARKS), Scale(quick)))
    click.echo(table(rows))
    click.echo(f"load average at the end {load_average()}")
    if file is not None:
        found = {"rows": [asdict(row) for row in rows], "is_quick": quick}
        write_json(file, facts, found)
    if page is not None:
        grid = markdown([HEAD, *map(cells, rows)])
        text = f"{heading(facts)} before and {load_average()} after."
        fill_page(page, f"{text}\n\n{grid}")


async def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """Return all rows, in order; one that cannot be measured here says so."""
    rows: list[Row] = []
    for name in names:
        click.echo(f"{name} ...", err=True)
        try:
            rows += await BENCHMARKS[name](scale)
        except UnavailableError as reason:
            rows.append(missing_row(name, reason))
    return rows


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.micro")
