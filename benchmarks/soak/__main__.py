"""`python -m benchmarks.soak [NAME ...] [--minutes N] [--seed S]`."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Final

import click

from benchmarks.soak.monitor import Record
from benchmarks.soak.scenarios import SCENARIOS

INTERRUPTED: Final = 130
TERMINATED: Final = 143
ANSWERS: Final = "programs and services do as they are told"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCENARIOS)))
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=2.0)
@click.option("--seed", default=11, help="Draws the operations and the faults.")
def main(names: tuple[str, ...], minutes: float, seed: int) -> None:
    """Run a mixed load under kills, and check what must hold meanwhile.

    Half of the time the node is embedded in a program, half of the time it is a
    service whose programs come and go; NAMES choose. Workers, keepers, zygotes,
    programs and whole nodes are killed or paused. Prints what was counted, and each
    claim with the number of its checks; exit status 1 says that a claim has failed. By
    default it takes two minutes, with seed 11.
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
    """Run the scenarios in turn; SIGTERM has them end what they have started."""
    # Not by way of SIGINT, which a shell's job in the background ignores.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    for name in named:
        try:
            scenario = SCENARIOS[name](name, record, f"{seed}")
            await scenario.run(seconds / len(named))
        except* RuntimeError as errors:
            found = [f"{name}: {error!r}" for error in _leaves(errors)]
            record.check(ANSWERS, found)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.soak")
