"""`aiogpu demo`: a fan-out of tasks on fractional GPUs, watched and checked.

Uses aiogpu as any program would, by its public names alone. The picture is a Julia
set; each task computes one band of it, and at the end it is computed once more
without tasks and compared.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import click

import aiogpu

from .timeline import Span, peak

if TYPE_CHECKING:
    from .chart import Screen
    from .julia import Picture, Scene

LOGICAL: Final = 2
"""GPUs of a node on a machine that has none."""
AT_ONCE: Final = 64
"""Tasks that run at the same time at most, however small their shares."""


class Plan(NamedTuple):
    """What was asked for on the command line."""

    gpus: int | None
    tasks: int
    share: float
    scene: Scene


@click.command()
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    help=f"GPUs to share out; those detected unless given, {LOGICAL} without any.",
)
@click.option(
    "--tasks", type=click.IntRange(1, 1000), default=32, help="Bands of the picture."
)
@click.option("--share", type=float, default=0.25, help="Of a GPU, for each task.")
@click.option(
    "--size", type=click.IntRange(16, 2048), default=640, help="Of the picture."
)
@click.option("--seed", type=int, default=7, help="Of the picture's shape.")
def demo(gpus: int | None, tasks: int, share: float, size: int, seed: int) -> None:
    """Compute a picture on fractional GPUs, watch it, and check it.

    One task for each band of the picture. The GPUs are shared out but not computed
    on: numpy runs on the CPU, with a GPU and without. No more than 64 tasks run at
    the same time, however small their shares.
    """
    if tasks > size:
        raise click.UsageError(
            f"--tasks {tasks} is more than the {size} rows of the picture, and a band "
            f"has one at least. Ask for fewer tasks or for a larger --size."
        )
    require_numpy()
    from .chart import Screen
    from .julia import Picture, Scene, band

    try:
        checked = band.options(num_gpus=share)
    except OptionError as error:
        raise click.BadParameter(str(error), param_hint="--share") from None
    if not share:
        raise click.BadParameter("a share must be above 0.", param_hint="--share")
    picture, screen = Picture(Scene.of(size, seed)), Screen()
    with screen:
        outcome = aiogpu.run(fan_out(checked, tasks, gpus, picture, screen))
    screen.finish(outcome.spans)
    tell(outcome, picture, screen)


def require_numpy() -> None:
    """Check that numpy is there before a node is started for it."""
    try:
        import_module("numpy")
    except ImportError as error:
        raise click.ClickException(
            f"the demo computes with numpy, which cannot be imported ({error}). "
            f"Install it by: pip install 'aiogpu[demo]'"
        ) from None


async def fan_out(
    band: Task, tasks: int, gpus: int | None, picture: Picture, screen: Screen
) -> Outcome:
    """Run a task for each band; show each end as it comes."""
    async with open_node(gpus):
        start = await aiogpu.status()
        screen.name_devices([device.id for device in start.devices])
        screen.print(headline(band, tasks, start))
        begin = time.monotonic()
        handles = [
            # The name is how the running ones are told apart in the status.
            band.options(name=str(number)).remote(picture.scene, number, tasks)
            for number in range(tasks)
        ]
        spans: list[Span] = []
        running: dict[int, Span] = {}
        for soonest in asyncio.as_completed(handles):
            part = await soonest
            picture.add(part)
            spans.append(part.span)
            running = running_spans(await aiogpu.status(), running)
            levels = picture.preview(*screen.pixels) if screen.pixels else []
            screen.add(spans, list(running.values()), levels)
        return Outcome(spans, time.monotonic() - begin)


@asynccontextmanager
async def open_node(gpus: int | None) -> AsyncIterator[None]:
    """Open a node with that many GPUs, those detected, or some logical ones."""
    options = partial(aiogpu.init, num_cpus=AT_ONCE, preload=("aiogpu.cli.julia",))
    if gpus is None:
        async with options():
            if (await aiogpu.cluster_resources()).get("GPU"):
                yield
                return
        gpus = LOGICAL
        if not os.environ.get(VISIBLE, "-").strip():
            # An empty list hides all GPUs and forbids logical ones as well; there
            # is nothing to hide from a computation that touches none.
            del os.environ[VISIBLE]
    async with options(num_gpus=gpus):
        yield
