"""`aiogpu demo`: a fan-out of tasks on fractional GPUs, with a live display.

Its tasks use only public names of aiogpu. Runs the example `julia_set`: each task
computes one band of a picture; at the end the picture is computed again without tasks
and compared.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module, metadata
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

import aiogpu
from aiogpu.cli.views.tables import console as terminal_console

if TYPE_CHECKING:
    from julia_set import Band, Picture, Scene

    Task = aiogpu.types.RemoteFunction[[Scene, int, int], Band]


class TaskTime(NamedTuple):
    """The time of a task in its worker.

    Attributes:
        task: the task's number.
        gpus: the devices that the task held.
        pid: the task's process.
        begin: time of the start on the clock `time.monotonic`.
        end: time of the end on the same clock.
    """

    task: int
    gpus: tuple[int | str, ...]
    pid: int
    begin: float
    end: float


def lanes(spans: Iterable[TaskTime], gpu: int | str) -> list[list[TaskTime]]:
    """Spread the spans of a device over the fewest lanes without overlap.

    The number of lanes is the most tasks that ran on the device at the same time.
    """
    rows: list[list[TaskTime]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if gpu not in span.gpus:
            continue
        for lane in rows:
            if lane[-1].end <= span.begin:
                lane.append(span)
                break
        else:
            rows.append([span])
    return rows


def device_label(gpu: int | str) -> str:
    """Return a short name: an index with its kind, or the beginning of a UUID."""
    return gpu[:12] if isinstance(gpu, str) else f"GPU {gpu}"


Gpu = int | str
COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
SHADES: Final = tuple(
    f"rgb({min(255, 20 * n)},{min(255, 9 * n + n * n // 3)},{40 + 10 * n})"
    for n in range(16)
)
PREVIEW: Final = (48, 24)
"""Columns and rows of pixels of the preview; a line of text shows two rows."""


def timeline(
    spans: Sequence[TaskTime], gpus: Mapping[Gpu, str], width: int, *, is_ascii: bool
) -> Text:
    """Draw a row for each lane of each device; a bar begins with its task's number."""
    idle, fill = (".", "=") if is_ascii else ("·", "█")
    margin = max(map(len, gpus.values()), default=0) + 2
    columns = max(10, width - margin - 1)
    begin = min((span.begin for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    scale = columns / max(end - begin, 1e-3)
    text = Text(no_wrap=True)
    for gpu, label in gpus.items():
        for row, lane in enumerate(lanes(spans, gpu) or [[]]):
            text.append(("" if row else label).ljust(margin), "bold")
            at = 0
            for span in lane:
                first = max(at, int((span.begin - begin) * scale))
                last = max(first + 1, int((span.end - begin) * scale))
                text.append(idle * (first - at), "dim")
                text.append_text(_bar(span, min(last, columns) - first, fill))
                at = last
            text.append(idle * (columns - at) + "\n", "dim")
    seconds = f"{end - begin:.2f} s"
    text.append(" " * margin + "0 s" + seconds.rjust(columns - 3), "dim")
    return text


def _bar(span: TaskTime, width: int, fill: str) -> Text:
    """Draw a bar, with its task's number if there is room."""
    number = str(span.task)
    label = number if len(number) <= width else ""
    color = COLORS[span.task % len(COLORS)]
    return Text.assemble((label, f"bold {color}"), (fill * (width - len(label)), color))


def thumbnail(levels: Sequence[Sequence[int]]) -> Text:
    """Draw two rows of pixels per line, in the upper and lower half of characters."""
    text = Text(no_wrap=True)
    for upper, lower in zip(levels[::2], levels[1::2], strict=True):
        # Joining runs of one colour makes a frame ten times smaller.
        for (above, below), run in groupby(zip(upper, lower, strict=True)):
            style = f"{SHADES[above]} on {SHADES[below]}"
            text.append("▀" * len(list(run)), style)
        text.append("\n")
    return text


class Display:
    """Shows a fan-out. Enter it before the first task.

    Attributes:
        pixels: columns and rows of the preview for `add`; None for no preview.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or terminal_console(soft_wrap=True)
        self._is_ascii = self._console.options.ascii_only
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        has_pixels = (
            self._console.color_system in ("256", "truecolor") and not self._is_ascii
        )
        self.pixels = PREVIEW if self._is_live and has_pixels else None
        self._live = Live(console=self._console, auto_refresh=False)
        self._gpus: dict[Gpu, str] = {}
        self._begin = 0.0

    def __enter__(self) -> Display:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def print(self, line: str) -> None:
        """Print a line; in a terminal it appears above the drawing."""
        self._console.print(line, markup=False)

    def begin(self, gpus: Sequence[Gpu], now: float) -> None:
        """Set the devices, in order, and the start of the clock."""
        self._begin = now
        self._gpus = {gpu: device_label(gpu) for gpu in gpus}

    def add(
        self,
        finished: Sequence[TaskTime],
        running: Sequence[TaskTime],
        levels: Sequence[Sequence[int]],
    ) -> None:
        """Show that the last of `finished` has ended."""
        if not self._is_live:
            self.print(self._line(finished[-1]))
            return
        picture = [thumbnail(levels)] if levels else []
        chart = self._timeline([*finished, *running])
        self._live.update(Group(*picture, chart), refresh=True)

    def finish(self, finished: Sequence[TaskTime]) -> None:
        """Draw the chart, unless the display was live."""
        if not self._is_live:
            self._console.print(self._timeline(finished))

    def _timeline(self, spans: Sequence[TaskTime]) -> Text:
        width = self._console.width
        return timeline(spans, self._gpus, width, is_ascii=self._is_ascii)

    def _line(self, span: TaskTime) -> str:
        begin = self._begin
        gpus = ", ".join(self._gpus[gpu] for gpu in span.gpus)
        return (
            f"task {span.task:3}  {gpus}  pid {span.pid}  "
            f"from {span.begin - begin:6.3f} s to {span.end - begin:6.3f} s"
        )


LOGICAL: Final = 2
"""GPUs of the demo's node on a machine without GPUs."""
AT_ONCE: Final = 64
"""Most tasks that run at the same time, however small their shares."""
TASK_NAME: Final = "band-"
"""The name of a task without its number."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class FanOut(NamedTuple):
    """The result of a fan-out, apart from the picture."""

    spans: list[TaskTime]
    gpus: tuple[int | str, ...]
    seconds: float


@click.command()
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    metavar="NUMBER",
    help=f"GPUs to use; default those detected, or {LOGICAL} logical ones.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=32,
    show_default=True,
    help="Number of bands of the picture.",
)
@click.option(
    "--share",
    type=float,
    default=0.25,
    show_default=True,
    help="GPUs of each task: a fraction of one GPU, or whole GPUs.",
)
@click.option(
    "--size",
    type=click.IntRange(16, 2048),
    metavar="NUMBER",
    default=1024,
    show_default=True,
    help="Width and height of the picture in pixels.",
)
@click.option(
    "--seed", type=int, default=7, show_default=True, help="Shape of the picture."
)
def demo(gpus: int | None, tasks: int, share: float, size: int, seed: int) -> None:
    """Compute a picture by tasks on fractional GPUs, show them, check the result.

    Each task computes one band. The tasks only reserve their GPUs: numpy computes on
    the CPU, also on machines with GPUs. At most 64 tasks run at the same time.
    """
    if tasks > size:
        raise click.UsageError(
            f"--tasks {tasks} is more than the {size} rows of the picture, and each "
            f"band needs one. Give fewer tasks or a larger --size."
        )
    find_example()
    from julia_set import Picture, Scene, band

    try:
        task = band.options(num_gpus=share)
    except aiogpu.OptionError as error:
        raise click.BadParameter(str(error), param_hint="--share") from None
    if share == 0:
        raise click.BadParameter("it must be above 0.", param_hint="--share")
    picture, screen = Picture(Scene.of(size, seed)), Display()
    with screen:
        outcome = aiogpu.run(fan_out(task, tasks, gpus, picture, screen))
    screen.finish(outcome.spans)
    report(outcome, picture, screen)


def find_example() -> None:
    """Make `julia_set` importable in this process and in workers, and import it."""
    files = [Path(str(file.locate())) for file in metadata.files("aiogpu") or ()]
    installed = [file for file in files if file.name == "julia_set.py"]
    checkout = Path(aiogpu.__file__).parents[1] / "examples" / "julia_set.py"
    sys.path += [str(file.parent) for file in (*installed, checkout)]
    try:
        import_module("julia_set")
    except ImportError as error:
        raise click.ClickException(
            f"the demo needs numpy, which cannot be imported ({error}). Install it by: "
            f"pip install 'aiogpu[demo]'"
        ) from None


@asynccontextmanager
async def open_node(gpus: int | None) -> AsyncIterator[None]:
    """Open a node with the given, the detected, or logical GPUs."""
    init = partial(aiogpu.init, num_cpus=AT_ONCE, preload=("julia_set",))
    if gpus is None:
        async with init():
            if (await aiogpu.cluster_resources()).get("GPU"):
                yield
                return
        if not os.environ.get(VISIBLE, "-").strip():
            # An empty list hides all GPUs, so logical GPUs would be an error. The demo
            # does not touch GPUs, so the list is not needed.
            del os.environ[VISIBLE]
    async with init(num_gpus=gpus or LOGICAL):
        yield


async def fan_out(
    task: Task, count: int, gpus: int | None, picture: Picture, screen: Display
) -> FanOut:
    """Run a task for each band; update the display as tasks end."""
    async with open_node(gpus):
        node = await aiogpu.status()
        ids = tuple(device.id for device in node.devices)
        begin = time.monotonic()
        screen.begin(ids, begin)
        handles = [
            task.options(name=f"{TASK_NAME}{number}").remote(
                picture.scene, number, count
            )
            for number in range(count)
        ]
        screen.print(headline(picture.scene, node))
        spans: list[TaskTime] = []
        running: Mapping[int, TaskTime] = {}
        for soonest in asyncio.as_completed(handles):
            part = await soonest
            picture.add(part)
            spans.append(
                TaskTime(part.number, part.gpus, part.pid, part.begin, part.end)
            )
            running = running_spans(await aiogpu.status(), running)
            levels = picture.preview(*screen.pixels) if screen.pixels else []
            screen.add(spans, list(running.values()), levels)
        return FanOut(spans, ids, time.monotonic() - begin)


def headline(scene: Scene, node: aiogpu.types.NodeStatus) -> str:
    """Return the first line: the picture and the devices."""
    devices = ", ".join(
        f"{device_label(device.id)} ({device.name or 'logical'})"
        for device in node.devices
    )
    return f"A Julia set of {scene.size} x {scene.size} points on {devices}."


def running_spans(
    node: aiogpu.types.NodeStatus, before: Mapping[int, TaskTime]
) -> dict[int, TaskTime]:
    """Return the running tasks by process; a span begins when it is first seen."""
    now = time.monotonic()
    running: dict[int, TaskTime] = {}
    for device in node.devices:
        for holder in device.holders:
            if holder.pid and holder.task is not None:
                known = running.get(holder.pid)
                gpus = (*known.gpus, device.id) if known else (device.id,)
                seen = before[holder.pid].begin if holder.pid in before else now
                number = int(holder.task.removeprefix(TASK_NAME))
                running[holder.pid] = TaskTime(number, gpus, holder.pid, seen, now)
    return running


def report(outcome: FanOut, picture: Picture, screen: Display) -> None:
    """Print the totals; exit with 1 if the picture is wrong."""
    begin = time.monotonic()
    is_right = picture.equals_serial()
    serial = time.monotonic() - begin
    spans = outcome.spans
    peaks = ", ".join(
        f"{len(lanes(spans, gpu))} on {device_label(gpu)}" for gpu in outcome.gpus
    )
    screen.print(f"tasks    {len(spans)}, each in a fresh process")
    screen.print(f"seconds  {outcome.seconds:.2f} ({serial:.2f} without tasks)")
    screen.print(f"at once  {peaks}")
    if not is_right:
        raise click.ClickException("the result DIFFERS from the serial one.")
    screen.print("result   equals the serial one, bit by bit")
