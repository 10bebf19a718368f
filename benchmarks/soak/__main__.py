"""`python -m benchmarks.soak [--minutes N] [--seed S] [--json FILE]`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from benchmarks.soak.monitor import Record
from benchmarks.soak.scenarios import SCENARIOS

PROGRESS_EVERY: Final = 10.0
INTERRUPTED: Final = 130
TERMINATED: Final = 143
ANSWERS: Final = "programs and services do as they are told"


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=2.0)
@click.option("--seed", default=11, help="Draws the operations and the faults.")
@click.option("--embedded", is_flag=True, help="Only with a node in a program.")
@click.option("--service", is_flag=True, help="Only with a node as a service.")
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write figures and claims to FILE.",
)
def main(
    minutes: float, seed: int, embedded: bool, service: bool, file: Path | None
) -> None:
    """Run a mixed load under kills, and check what must hold meanwhile.

    Half of the time the node is embedded in a program, half of the time it is a
    service whose programs come and go. Workers, keepers, zygotes, programs and whole
    nodes are killed or paused. Prints what was counted, and each claim with the number
    of its checks; exit status 1 says that a claim has failed. By default it takes two
    minutes, with seed 11.
    """
    flags = {"embedded": embedded, "service": service}
    named = [name for name, is_named in flags.items() if is_named] or list(flags)
    record = Record()
    click.echo(f"seed {seed}, {minutes:g} minutes: {' and '.join(named)}")
    status = 0
    try:
        asyncio.run(soak(record, seed, 60 * minutes, named))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except asyncio.CancelledError:
        status = TERMINATED
    click.echo(f"\n{record.table()}\n")
    verdict = "all claims held" if record.holds else "NOT all claims held"
    click.echo(f"{verdict}; seed {seed}, {record.seconds:.0f} s")
    if file is not None:
        content = {"seed": seed, "minutes": minutes, **record.as_json()}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.exit(status if record.holds else 1)


async def soak(record: Record, seed: int, seconds: float, named: list[str]) -> None:
    """Run the scenarios in turn; SIGTERM has them end what they have started."""
    # Not by way of SIGINT, which a shell's job in the background ignores.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    for name in named:
        scenario, progress = (
            SCENARIOS[name](name, record, f"{seed}"),
            printer(record, name),
        )
        try:
            await scenario.run(seconds / len(named), progress)
        except* RuntimeError as errors:
            found = [f"{name}: {error!r}" for error in _leaves(errors)]
            record.check(ANSWERS, found)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def printer(record: Record, name: str) -> Callable[[str], None]:
    """Return what prints the progress, but not each time."""
    last = -PROGRESS_EVERY

    def progress(text: str) -> None:
        nonlocal last
        if record.seconds >= last + PROGRESS_EVERY:
            last = record.seconds
            print(f"{last:6.0f} s  {name}: {text}", flush=True)

    return progress


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.soak")
