"""`python -m benchmarks field`: run, write down, draw."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.environments import ENVIRONMENTS, missing
from benchmarks.field.contest import FULL, QUICK, Contest, Entry, Extent, Findings
from benchmarks.field.figures import lines
from benchmarks.field.page import details, floors, judgement, overview
from benchmarks.field.question import FLOOR, Question
from benchmarks.field.questions import QUESTIONS
from benchmarks.report import heading, load_average, machine_with, put, write_report

SCHEMA: Final = 1
FILE: Final = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("questions", nargs=-1, type=click.Choice(list(QUESTIONS)))
@click.option(
    "--environment",
    "names",
    multiple=True,
    type=click.Choice(list(ENVIRONMENTS)),
    help="Ask this one, and others so named; without it all that are installed.",
)
@click.option("--json", "file", type=FILE, help="Write all that was found to FILE.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: take what an earlier run has written there.",
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw SVG charts into this folder (needs matplotlib).",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the tables between the marks of this Markdown page.",
)
@click.option("--quick", is_flag=True, help="Few calls: shows that all of it runs.")
def field(
    questions: Sequence[str],
    names: Sequence[str],
    *,
    quick: bool,
    **places: Path | None,
) -> None:
    """Measure aiogpu beside its peers: QUESTIONS, all of them unless named.

    The floor and all systems take turns, block by block. What one of them cannot do,
    or does not do in time, is said in its row.
    """
    if earlier := places["earlier"]:
        found = json.loads(earlier.read_text(encoding="utf-8"))
    else:
        found = run(questions or list(QUESTIONS), names, quick=quick)
    entries = [Entry(**entry) for entry in found["entries"]]
    tables = lines(QUESTIONS, entries)
    click.echo(f"{overview(tables)}\n\n{judgement(tables)}")
    if file := places["file"]:
        write_report(file, found)
    if page := places["page"]:
        put(page, page_text(found, entries))
    if plots := places["plots"]:
        from benchmarks.field.plots import draw

        for drawn in draw(plots, QUESTIONS, tables):
            click.echo(f"drawn: {drawn}", err=True)


def run(
    questions: Sequence[str], names: Sequence[str], *, quick: bool
) -> dict[str, Any]:
    """Ask, and give all that is worth keeping."""
    for name in names:
        if why := missing(name):
            raise click.ClickException(f"{name}: {why}; pip install 'aiogpu[bench]'")
    present = names or [name for name in ENVIRONMENTS if not missing(name)]
    absent = {name: missing(name) for name in ENVIRONMENTS if missing(name)}
    before = machine_with({})
    began = datetime.now(UTC)
    findings = asyncio.run(
        held(
            [QUESTIONS[name] for name in QUESTIONS if name in questions],
            [FLOOR, *present],
            QUICK if quick else FULL,
        )
    )
    ended = datetime.now(UTC)
    return {
        "schema": SCHEMA,
        "ended": ended.isoformat(timespec="seconds"),
        "minutes": (ended - began).total_seconds() / 60,
        "is_quick": quick,
        "machine": {**before, "libraries": findings.libraries},
        "load_average_after": load_average(),
        "absent": absent,
        "idle": findings.idle,
        "entries": [asdict(entry) for entry in findings.entries],
    }


async def held(
    questions: Sequence[Question], names: Sequence[str], extent: Extent
) -> Findings:
    """Hold the contest; SIGTERM ends it in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    contest = Contest(questions, names, extent)
    try:
        return await contest.run(lambda line: click.echo(line, err=True))
    except asyncio.CancelledError:
        raise click.Abort from None


def page_text(found: dict[str, Any], entries: Sequence[Entry]) -> str:
    """All that stands between the marks of the page."""
    tables = lines(QUESTIONS, entries)
    asked = {entry.question: QUESTIONS[entry.question] for entry in entries}
    idle = ", ".join(f"{name} {part:.1%}" for name, part in found["idle"].items())
    facts = (
        f"{heading(found['machine'])} before and {found['load_average_after']} after; "
        f"{found['minutes']:.0f} minutes. Of one core the systems take while they have "
        f"nothing to do: {idle}."
    )
    if found["is_quick"]:
        facts = f"**A quick run: it shows that all of it runs, no more.** {facts}"
    if found["absent"]:
        facts += f" Not there: {', '.join(found['absent'].values())}."
    parts = [
        facts,
        overview(tables),
        judgement(tables),
        details(asked, tables),
        "### Floors",
        floors(asked),
    ]
    return "\n\n".join(parts)
