"""`python -m benchmarks.soak [NAME ...] [--minutes N] [--seed S]`."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any, Final

import click

from benchmarks.soak.monitor import Record
from benchmarks.soak.scenarios import SCENARIOS

INTERRUPTED: Final = 130
TERMINATED: Final = 143
ANSWERS: Final = "programs and services obey"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCENARIOS)))
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=2.0)
@click.option("--seed", default=11, help="Seed of the operations and the faults.")
def main(names: tuple[str, ...], minutes: float, seed: int) -> None:
    """Run a mixed load under kills, and check all claims meanwhile.

    For half of the time the node is embedded in a program, for the other half it is a
    service whose programs come and go; NAMES select one. Workers, keepers, zygotes,
    programs and whole nodes are killed or paused. Prints the counts, and each claim
    with the number of its checks; exit status 1 means that a claim has failed. By
    default the run takes two minutes, with seed 11.
    """
    named, record, status = names or tuple(SCENARIOS), Record(), 0
    click.echo(f"seed {seed}, {minutes:g} minutes: {' and '.join(named)}")
    try:
        asyncio.run(soak(record, seed, 60 * minutes, named))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except asyncio.CancelledError:
        status = TERMINATED
    click.echo(f"\n{record.table()}\n")
    verdict = "all claims held" if record.holds else "NOT all claims held"
    click.echo(f"{verdict}; seed {seed}, {record.seconds:.0f} s")
    sys.exit(status if record.holds else 1)


async def soak(
    record: Record, seed: int, seconds: float, named: tuple[str, ...]
) -> None:
    """Run the scenarios in turn; SIGTERM ends them with all that they have started."""
    # Not through SIGINT, which a shell's background job ignores.
    this: Any = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    for name in named:
        try:
            scenario = SCENARIOS[name](name, record, f"{seed}")
            await scenario.run(seconds / len(named))
        except* RuntimeError as errors:
            wrong = [f"{name}: {error!r}" for error in errors.exceptions]
            record.check(ANSWERS, wrong)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.soak")
