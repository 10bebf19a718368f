"""`python -m benchmarks.field [WORKLOAD ...] [--system NAME] [--json FILE] ...`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Final

import click

from benchmarks.field.process import FLOOR
from benchmarks.field.results import conclusion, details, lines, overview
from benchmarks.field.run import FULL, QUICK, Entry, Run
from benchmarks.field.systems import NEEDS, missing
from benchmarks.field.workloads import WORKLOADS
from benchmarks.report import fill_page, heading, machine_facts, write_json

FILE: Final = click.Path(dir_okay=False, path_type=Path)
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
@click.option("--json", "file", type=FILE, help="Write all that was found to FILE.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: take what an earlier run has written there.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the tables between the marks of this Markdown page.",
)
@click.option("--quick", is_flag=True, help="Few calls: shows that all of it runs.")
def main(
    workloads: Sequence[str],
    names: Sequence[str],
    file: Path | None,
    earlier: Path | None,
    page: Path | None,
    quick: bool,
) -> None:
    """Measure aiogpu beside its peers in each WORKLOAD, all of them by default.

    The floor and all systems take turns, block by block; a full run takes about eleven
    minutes, and nothing else should run on the machine. Peers are installed by
    `pip install 'aiogpu[bench]'`. What a system cannot do, or does not do in time, is
    said in its row.
    """
    if earlier is not None:
        found = json.loads(earlier.read_text(encoding="utf-8"))
    else:
        found = run(workloads or list(WORKLOADS), names, quick=quick)
    entries = [Entry(**entry) for entry in found["entries"]]
    tables = lines(WORKLOADS, entries)
    summary = f"{overview(tables)}\n\n{conclusion(tables)}"
    click.echo(summary)
    if file is not None:
        write_json(file, found["machine"], found)
    if page is not None:
        text = f"{facts(found)}\n\n{summary}\n\n{details(WORKLOADS, tables)}"
        fill_page(page, text)


def run(
    workloads: Sequence[str], names: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """Run it; return all that is worth keeping."""
    for name in names:
        if why := missing(name):
            raise click.ClickException(f"{name}: {why}; pip install 'aiogpu[bench]'")
    present = names or [name for name in NEEDS if not missing(name)]
    # SIGTERM ends the systems in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    machine, began = machine_facts({}), monotonic()
    asked = [each for name, each in WORKLOADS.items() if name in workloads]
    whole = Run(asked, [FLOOR, *present], QUICK if quick else FULL)
    whole.run(lambda line: click.echo(line, err=True))
    return {
        "machine": {**machine, "libraries": whole.libraries},
        "minutes": (monotonic() - began) / 60,
        "is_quick": quick,
        "absent": {name: missing(name) for name in NEEDS if missing(name)},
        "idle": whole.idle,
        "entries": [asdict(entry) for entry in whole.entries],
    }


def facts(found: dict[str, Any]) -> str:
    """Say what a reader must know of a run."""
    idle = ", ".join(f"{name} {part:.1%}" for name, part in found["idle"].items())
    text = (
        f"{heading(found['machine'])} before; {found['minutes']:.0f} minutes. Of one "
        f"core the systems use while they have nothing to do: {idle}."
    )
    if found["is_quick"]:
        text = f"**A quick run: it shows that all of it runs, no more.** {text}"
    if found["absent"]:
        text += f" Not there: {', '.join(found['absent'].values())}."
    return text


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.field")
