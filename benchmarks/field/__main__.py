"""`python -m benchmarks.field [WORKLOAD ...] [--system NAME] [--json FILE] ...`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Final

import click

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
    help="Ask this one, and others so named; by default all that are installed.",
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

    The floor and all systems take turns, block by block; a full run takes about eleven
    minutes, and nothing else should run on the machine. Peers are installed by
    `pip install 'aiogpu[bench]'`. What a system cannot do, or does not do in time, is
    said in its row.
    """
    for name in names:
        if why := missing(name):
            raise click.ClickException(f"{name}: {why}; pip install 'aiogpu[bench]'")
    # SIGTERM ends the systems in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    present = names or [name for name in NEEDS if not missing(name)]
    began, load = monotonic(), report.load_average()
    whole = Run([FLOOR, *present], QUICK if quick else FULL)
    asked = [name for name in WORKLOADS if not workloads or name in workloads]
    whole.run(asked, lambda line: click.echo(line, err=True))
    tables = lines(whole.entries)
    summary = f"{overview(tables)}\n\n{conclusion(tables)}"
    click.echo(summary)
    facts = _facts(whole, load, (monotonic() - began) / 60, quick)
    found = {"facts": facts, "entries": [asdict(entry) for entry in whole.entries]}
    text = f"{facts}\n\n{summary}\n\n{details(tables)}"
    report.keep_run(report.RESULTS / "field.md", text, found, file, keep)


def _facts(whole: Run, load: str, minutes: float, is_quick: bool) -> str:
    """Say what a reader must know of a run."""
    idle = ", ".join(f"{name} {part:.1%}" for name, part in whole.idle.items())
    absent = ", ".join(why for name in NEEDS if (why := missing(name)))
    text = (
        f"{report.machine(whole.libraries)} after and {load} before; {minutes:.0f} "
        f"minutes. Of one core the systems use while they have nothing to do: {idle}."
    )
    if is_quick:
        text = f"**A quick run: it shows that all of it runs, no more.** {text}"
    return f"{text} Not there: {absent}." if absent else text


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.field")
