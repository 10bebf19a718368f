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

from benchmarks.soak import embedded, service
from benchmarks.soak.record import Record

TELL_EVERY: Final = 10.0
HALVES: Final = {"embedded": embedded.soak, "service": service.soak}
INTERRUPTED: Final = 130
TERMINATED: Final = 143
ANSWERS: Final = "programs and services do as they are told"


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=2.0)
@click.option("--seed", type=int, default=11, show_default=True)
@click.option("--embedded", is_flag=True, help="The half with a node in a program.")
@click.option("--service", is_flag=True, help="The half with a node as a service.")
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write figures and claims to FILE.",
)
def main(
    minutes: float, seed: int, embedded: bool, service: bool, file: Path | None
) -> None:
    """Soak aiogpu for so many minutes, both halves unless one is named."""
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
    told = "all claims held" if record.has_held else "NOT all claims held"
    click.echo(f"{told}; seed {seed}, {record.seconds:.0f} s")
    if file is not None:
        content = {"seed": seed, "minutes": minutes, **record.as_json()}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.exit(status if record.has_held else 1)


async def soak(record: Record, seed: int, seconds: float, named: list[str]) -> None:
    """The halves, one after the other; SIGTERM has them end what they have started."""
    # Not by way of SIGINT, which a shell's job in the background ignores.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    for name in named:
        half, tell = HALVES[name], told_now_and_then(record, name)
        try:
            await half(record, f"{seed}", seconds / len(named), tell)
        except* RuntimeError as errors:
            told = [f"{name}: {error!r}" for error in _leaves(errors)]
            record.look(ANSWERS, told)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def told_now_and_then(record: Record, name: str) -> Callable[[str], None]:
    """What prints how far it has come, but not each time."""
    last = -TELL_EVERY

    def tell(how_far: str) -> None:
        nonlocal last
        if record.seconds >= last + TELL_EVERY:
            last = record.seconds
            print(f"{last:6.0f} s  {name}: {how_far}", flush=True)

    return tell


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.soak")
