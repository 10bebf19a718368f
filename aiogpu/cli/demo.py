"""`aiogpu demo`: a fan-out of tasks on fractional GPUs, watched and checked.

Uses aiogpu as any program would, by its public names alone. The picture is a Julia
set; each task computes one band of it, and at the end all of it is computed once
more, without tasks, and compared.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import click

import aiogpu

from .timeline import Span, device_label, peak

if TYPE_CHECKING:
    from .chart import Screen
    from .julia import Band, Picture, Scene

    Task = aiogpu.RemoteFunction[[Scene, int, int], Band]

LOGICAL: Final = 2
"""GPUs of the demo's node on a machine that has none."""
AT_ONCE: Final = 64
"""Tasks that run at the same time at most, however small their shares."""
NAME: Final = "band-"
"""A task's name without its number, by which `status` tells them apart."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class Outcome(NamedTuple):
    """What a fan-out gave, beside the picture."""

    spans: list[Span]
    gpus: tuple[int | str, ...]
    seconds: float


@click.command()
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    help=f"GPUs to share out; if not given, those detected, or {LOGICAL} logical ones.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 1000),
    default=32,
    show_default=True,
    help="How many bands the picture is cut into.",
)
@click.option(
    "--share",
    type=float,
    default=0.25,
    show_default=True,
    help="What each task holds: a part of one GPU, or whole ones.",
)
@click.option(
    "--size",
    type=click.IntRange(16, 2048),
    default=1024,
    show_default=True,
    help="Width and height of the picture in pixels.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Its shape.")
def demo(gpus: int | None, tasks: int, share: float, size: int, seed: int) -> None:
    """Compute a picture by tasks on fractional GPUs, watch them, check the result.

    Each task computes one band. The GPUs are shared out but not computed on: numpy
    runs on the CPU, with a GPU and without. At most 64 tasks run at the same time.
    """
    if tasks > size:
        raise click.UsageError(
            f"--tasks {tasks} is more than the {size} rows of the picture, and each "
            f"band has one at least. Ask for fewer tasks or for a larger --size."
        )
    require_numpy()
    from .chart import Screen
    from .julia import Picture, Scene, band

    try:
        task = band.options(num_gpus=share)
    except aiogpu.OptionError as error:
        raise click.BadParameter(str(error), param_hint="--share") from None
    if share == 0:
        raise click.BadParameter("a share is above 0.", param_hint="--share")
    picture, screen = Picture(Scene.of(size, seed)), Screen()
    with screen:
        outcome = aiogpu.run(fan_out(task, tasks, gpus, picture, screen))
    screen.finish(outcome.spans)
    tell(outcome, picture, screen)


def require_numpy() -> None:
    """Check that numpy is there before a node is started for it."""
    try:
        import_module("numpy")
    except ImportError as error:
        raise click.ClickException(
            f"the demo computes with numpy, which cannot be imported here ({error}). "
            f"Install it by: pip install 'aiogpu[demo]'"
        ) from None


@asynccontextmanager
async def open_node(gpus: int | None) -> AsyncIterator[None]:
    """Open a node with that many GPUs, with those detected, or with logical ones."""
    init = partial(aiogpu.init, num_cpus=AT_ONCE, preload=("aiogpu.cli.julia",))
    if gpus is None:
        async with init():
            if (await aiogpu.cluster_resources()).get("GPU"):
                yield
                return
        if not os.environ.get(VISIBLE, "-").strip():
            # An empty list hides all GPUs, and logical ones would be an error; but
            # there is nothing to hide from a computation that touches none.
            del os.environ[VISIBLE]
    async with init(num_gpus=gpus or LOGICAL):
        yield


async def fan_out(
    task: Task, count: int, gpus: int | None, picture: Picture, screen: Screen
) -> Outcome:
    """Run a task for each band; show each end as it comes."""
    async with open_node(gpus):
        node = await aiogpu.status()
        ids = tuple(device.id for device in node.devices)
        begin = time.monotonic()
        screen.begin(ids, begin)
        handles = [
            task.options(name=f"{NAME}{number}").remote(picture.scene, number, count)
            for number in range(count)
        ]
        screen.print(headline(picture.scene, node))
        spans: list[Span] = []
        running: Mapping[int, Span] = {}
        for soonest in asyncio.as_completed(handles):
            part = await soonest
            picture.add(part)
            spans.append(part.span)
            running = running_spans(await aiogpu.status(), running)
            levels = picture.preview(*screen.pixels) if screen.pixels else []
            screen.add(spans, list(running.values()), levels)
        return Outcome(spans, ids, time.monotonic() - begin)


def headline(scene: Scene, node: aiogpu.NodeStatus) -> str:
    """Say what runs on what."""
    devices = ", ".join(
        f"{device_label(device.id)} ({device.name or 'logical'})"
        for device in node.devices
    )
    return f"A Julia set of {scene.size} x {scene.size} points on {devices}."


def running_spans(
    node: aiogpu.NodeStatus, before: Mapping[int, Span]
) -> dict[int, Span]:
    """Who runs now, by process; a span lasts from when it was first seen."""
    now = time.monotonic()
    running: dict[int, Span] = {}
    for device in node.devices:
        for holder in device.holders:
            if holder.pid and holder.task is not None:
                known = running.get(holder.pid)
                gpus = (*known.gpus, device.id) if known else (device.id,)
                seen = before[holder.pid].begin if holder.pid in before else now
                number = int(holder.task.removeprefix(NAME))
                running[holder.pid] = Span(number, gpus, holder.pid, seen, now)
    return running


def tell(outcome: Outcome, picture: Picture, screen: Screen) -> None:
    """Print the totals; exit with 1 if the picture is wrong."""
    begin = time.monotonic()
    is_right = picture.equals_serial()
    serial = time.monotonic() - begin
    peaks = ", ".join(
        f"{peak(outcome.spans, gpu)} on {device_label(gpu)}" for gpu in outcome.gpus
    )
    screen.print(f"tasks    {len(outcome.spans)}, each in a fresh process")
    screen.print(f"seconds  {outcome.seconds:.2f} ({serial:.2f} without tasks)")
    screen.print(f"at once  {peaks}")
    if not is_right:
        raise click.ClickException("the result DIFFERS from the serial one.")
    screen.print("result   equals the serial one, bit by bit")
