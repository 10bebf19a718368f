"""`python -m benchmarks.field [WORKLOAD ...] [--system NAME] [--json FILE] ...`."""

from __future__ import annotations

import compileall
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Final

import click

import aiogpu
import benchmarks
from benchmarks import report
from benchmarks.field.process import FLOOR
from benchmarks.field.results import conclusion, details, lines, overview
from benchmarks.field.run import FULL, QUICK, Run
from benchmarks.field.systems import NEEDS, missing
from benchmarks.field.workloads import WORKLOADS

TERMINATED: Final = 143


@click.command()
@click.argument(
    "workloads", nargs=-1, type=click.Choice(list(WORKLOADS)), metavar="[WORKLOAD]..."
)
@click.option(
    "--system",
    "names",
    multiple=True,
    type=click.Choice(list(NEEDS)),
    help="Measure this system; may be repeated. Default: all that are installed.",
)
@report.options
def main(
    workloads: Sequence[str],
    names: Sequence[str],
    file: Path | None,
    keep: bool,
    quick: bool,
) -> None:
    """Measure aiogpu beside its peers in each WORKLOAD, all of them by default.

    The floor and all systems take turns, block by block. A full run takes about eleven
    minutes; nothing else should run on the machine. `pip install 'aiogpu[bench]'`
    installs the peers. The row of a system that has no figure says why.
    """
    for name in names:
        if why := missing(name):
            raise click.ClickException(f"{name}: {why}; pip install 'aiogpu[bench]'")
    # Installed packages have their bytecode. Where `PYTHONDONTWRITEBYTECODE` is set,
    # each process would compile a source tree anew.
    for package in (aiogpu, benchmarks):
        compileall.compile_dir(Path(str(package.__file__)).parent, quiet=2)
    # SIGTERM ends the systems in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    present = names or [name for name in NEEDS if not missing(name)]
    start, load = monotonic(), report.load_average()
    run = Run([FLOOR, *present], QUICK if quick else FULL)
    selected = [name for name in WORKLOADS if not workloads or name in workloads]
    run.run(selected, lambda line: click.echo(line, err=True))
    tables = lines(run.entries)
    summary = f"{overview(tables)}\n\n{conclusion(tables)}"
    click.echo(summary)
    facts = _facts(run, load, (monotonic() - start) / 60, quick)
    results = {"facts": facts, "entries": [asdict(entry) for entry in run.entries]}
    text = f"{facts}\n\n{summary}\n\n{details(tables)}"
    report.keep_run(report.RESULTS / "field.md", text, results, file, keep)


def _facts(run: Run, load: str, minutes: float, is_quick: bool) -> str:
    """Describe the run: machine, versions, load, time and missing systems."""
    idle = ", ".join(f"{name} {part:.1%}" for name, part in run.idle.items())
    absent = ", ".join(why for name in NEEDS if (why := missing(name)))
    text = (
        f"{report.machine(run.libraries)} after and {load} before; {minutes:.0f} "
        f"minutes. Share of one core that each system uses when idle: {idle}."
    )
    if is_quick:
        text = f"**A quick run, which only shows that everything runs.** {text}"
    return f"{text} Not measured: {absent}." if absent else text


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.field")
