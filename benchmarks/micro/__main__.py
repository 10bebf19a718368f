"""`python -m benchmarks.micro [NAME ...] [--json FILE] [--keep] [--quick]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import uvloop

from benchmarks import report
from benchmarks.micro import backlog, calls, isolation, scheduler, start, values
from benchmarks.micro.rows import HEAD, Benchmark, Row, Scale, UnavailableError, table

BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "latency": calls.latency,
    "throughput": calls.throughput,
    "start": start.start,
    "isolated": isolation.isolated,
    "spaced": isolation.spaced,
    "cancel": isolation.cancel,
    "streams": calls.streams,
    "actors": calls.creation,
    "many_actors": calls.many_actors,
    "batching": calls.batching,
    "values": values.values,
    "map": calls.mapping,
    "backlog": backlog.backlog,
    "scheduler": scheduler.scheduler,
    "service": calls.service,
    "ray": calls.ray,
}
"""In the order of a full run."""
LIBRARIES: Final = ("aiogpu", "uvloop", "msgpack", "cloudpickle", "nvidia-ml-py")
LISTING: Final = "\b\nNames:\n" + "\n".join(
    f"  {name:12}{(run.__doc__ or '').splitlines()[0]}"
    for name, run in BENCHMARKS.items()
)


@click.command(epilog=LISTING)
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)), metavar="NAME")
@report.options
def main(names: Sequence[str], file: Path | None, keep: bool, quick: bool) -> None:
    """Measure the cost of aiogpu's operations, each beside its floor.

    Runs the benchmarks NAME, by default all of them (about eight minutes). Prints a row
    for each figure: p50 and p99, those of the floor, their ratio (the median over
    blocks that run in turn), the goal and the verdict. A slow result is no failure.
    Nothing else should run on the machine.
    """
    machine = report.machine(report.versions(LIBRARIES))
    click.echo(machine)
    scale: Scale = lambda full, few: few if quick else full  # noqa: E731
    rows = uvloop.run(measure(names or list(BENCHMARKS), scale))
    machine = f"{machine} before and {report.load_average()} after."
    lines = [HEAD, *(row.cells(quick) for row in rows)]
    click.echo(f"{table(lines)}\n{machine}")
    judged = [{**asdict(row), "verdict": row.verdict(quick)} for row in rows]
    page, text = report.RESULTS / "micro.md", f"{machine}\n\n{report.markdown(lines)}"
    report.keep_run(page, text, {"machine": machine, "rows": judged}, file, keep)


async def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    """Return all rows in order; a row without figures says why it has none."""
    rows: list[Row] = []
    for name in names:
        click.echo(f"{name} ...", err=True)
        try:
            rows += await BENCHMARKS[name](scale)
        except UnavailableError as reason:
            rows.append(Row(name, fault=str(reason)))
    return rows


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.micro")
