r"""`aiogpu top`: a live view of the running node on the whole screen.

Keys are read without Enter, and the terminal is restored at the end. Ctrl-C, Ctrl-Z and
Ctrl-\ remain signals.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.console import Group
from rich.text import Text

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.connect import Seconds
from aiogpu.cli.stop import KINDS, stop_one
from aiogpu.cli.terminal import echo, is_terminal
from aiogpu.cli.views import tables
from aiogpu.cli.views.status import plain_report
from aiogpu.cli.views.tables import GAP, Table, live, text
from aiogpu.core.model.text import printable, span
from aiogpu.observe.status import (
    DeviceStatus,
    Holder,
    NodeStatus,
    TaskStatus,
    heat_and_power,
    held_tasks,
    shown_clients,
    summary,
)
from aiogpu.wire.messages import CANCEL, KILL

KEY: Final = re.compile(
    rb"\x1b(?:O(.)|\[([^@-~]{0,13}[@-~]|[^@-~]{14})|(?=[^O\[]))|([^\x1b])", re.DOTALL
)
"""A key as terminals send it. A longer sequence is cut after 16 bytes."""
SEQUENCES: Final = {
    b"A": "up",
    b"B": "down",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "page up",
    b"6~": "page down",
}
"""Keys by the end of their escape sequence; source: xterm's "ctlseqs"."""


class KeyDecoder:
    """Decodes the bytes of a terminal, in pieces of any size, into keys."""

    def __init__(self) -> None:
        self._rest = b""

    def keys(self, sent: bytes) -> Iterator[str]:
        """Yield the keys that are complete."""
        self._rest += sent
        while match := KEY.match(self._rest):
            self._rest = self._rest[match.end() :]
            sequence = match[1] or match[2] or b""
            key = SEQUENCES.get(sequence) or (match[3] or b"").decode("ascii", "ignore")
            if key:
                yield key


class Keyboard:
    """Reads the keys of a terminal while it is open, and calls `on_key` for each."""

    def __init__(
        self, fd: int, loop: asyncio.AbstractEventLoop, on_key: Callable[[str], None]
    ) -> None:
        self._on_key = on_key
        self._fd = fd
        self._loop = loop
        self._before: list[Any] | None = None
        self._decoder = KeyDecoder()

    def open(self) -> None:
        """Read keys one by one, without echo."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSADRAIN)
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Restore the terminal."""
        before, self._before = self._before, None
        if before is not None:
            self._loop.remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def _read(self) -> None:
        try:
            sent = os.read(self._fd, 1024)
        except BlockingIOError:
            return
        except OSError:
            sent = b""  # the terminal has gone
        if not sent:
            self._loop.remove_reader(self._fd)
            self._on_key("q")
        for key in self._decoder.keys(sent):
            self._on_key(key)


@dataclass(slots=True)
class Prompt:
    """A prompt for the number of a task to cancel, or of an actor to kill.

    Attributes:
        what: `CANCEL` or `KILL`.
        number: the digits so far.
        is_complete: True if the number is complete; then "y" confirms.
        is_confirmed: True if "y" was pressed.
    """

    what: str
    number: str = ""
    is_complete: bool = False
    is_confirmed: bool = False

    def press(self, key: str) -> bool:
        """Handle a key; return False if the prompt is over."""
        if self.is_complete:
            self.is_confirmed = key == "y"
            return self.is_confirmed
        if key.isdecimal() and key.isascii():
            self.number = (self.number + key)[:LONGEST_NUMBER]
        elif key in ("\x7f", "\b"):
            self.number = self.number[:-1]
        else:
            self.is_complete = key in ("\r", "\n") and bool(self.number)
            return self.is_complete
        return True

    def line(self, status: NodeStatus) -> str:
        """Return the text of the prompt, for the last line of the screen."""
        kind = KINDS[self.what]
        if not self.is_complete:
            return f"{self.what} {kind} number: {self.number}_  Enter; q aborts"
        names = (task.name for task in status.tasks if str(task.id) == self.number)
        name = next(names, "")
        target = f"{name} ({kind} {self.number})" if name else f"{kind} {self.number}"
        return f"{self.what} {target}?  y confirms, any other key aborts"


LONGEST_NUMBER: Final = 18
"""Most digits of a number."""
ORDERS: Final = ("number", "name", "memory", "time")
"""Orders of the tasks on workers."""


@dataclass(slots=True)
class View:
    """The visible part of the status; keys change it.

    Attributes:
        is_paused: True if updates are suspended.
        has_ended: True if the user has quit.
        offset: number of lines scrolled off above the screen.
        order: one of `ORDERS`.
        bottom: the offset that shows the last line; set by drawing.
        page: number of lines shown at once.
        prompt: the prompt in the last line; None without one.
        message: the result of the last command, in the last line until the next key.
    """

    is_paused: bool = False
    has_ended: bool = False
    offset: int = 0
    order: str = ORDERS[0]
    bottom: int = 0
    page: int = 1
    prompt: Prompt | None = None
    message: str = ""

    def fit(self, count: int, room: int) -> None:
        """Limit the offset to `count` lines on a screen with room for `room`."""
        self.page = max(room, 1)
        self.bottom = max(0, count - room)
        self.offset = min(self.offset, self.bottom)

    def press(self, key: str) -> None:
        """Handle a key; unknown keys do nothing."""
        self.message = ""
        if self.prompt is not None:
            if not self.prompt.press(key):
                self.prompt = None
            return
        match key:
            case "c":
                self.prompt = Prompt(CANCEL)
            case "x":
                self.prompt = Prompt(KILL)
            case "q":
                self.has_ended = True
            case "p":
                self.is_paused = not self.is_paused
            case "s":
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            case "j" | "down":
                self.offset += 1
            case "k" | "up":
                self.offset -= 1
            case " " | "page down":
                self.offset += self.page
            case "b" | "page up":
                self.offset -= self.page
            case "g" | "home":
                self.offset = 0
            case "G" | "end":
                self.offset = self.bottom
        self.offset = max(0, min(self.offset, self.bottom))


COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue")
"""Colours of successive holders."""
FULL, EMPTY = "█", "░"
NARROW_BARS: Final = 60
"""Columns below which each device has only one bar."""
WIDE: Final = 110
"""Columns from which bars are long and followed by the name of the device."""


def device_lines(
    devices: Sequence[DeviceStatus],
    width: int,
    history: Callable[[DeviceStatus, int], str] | None = None,
) -> Iterator[Text]:
    """Yield a line of bars for each device, and a line with its holders.

    Args:
        devices: the devices.
        width: columns of the screen.
        history: draws how busy a device was in the last minute, in a given width.
    """
    names = [tables.device_name(device) for device in devices]
    margin = min(max(map(len, names), default=0), max(8, width // 4))
    for name, device in zip(names, devices, strict=True):
        head = text(name, "bold")
        head.truncate(margin, overflow="ellipsis")
        head.align("left", margin + GAP)
        line = text("")
        line.append_text(head)
        if device.aside is None:
            for part, style in _bars(device, width):
                line.append(part, style)
            room = min(LONGEST_HISTORY, width - line.cell_len - GAP)
            if history is not None and room >= LEAST_HISTORY:
                line.append(f"  {history(device, room)}".rstrip(), "green")
        else:
            line.append(printable(f"set aside: {device.aside}"), "bold red")
        yield line
        if holders := "  ".join(tables.held_by(device)):
            yield text(" " * (margin + GAP) + holders, "dim")


def _bars(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    long = 24 if width >= WIDE else 12 if width >= NARROW_BARS else 8
    yield from share_bar(device, long)
    yield (f" {1 - device.free:>4.2g} held", "")
    if device.used is not None and device.memory:
        if width >= NARROW_BARS:
            part = device.used / device.memory
            yield ("  ", "")
            yield from part_bar(part, long // 2, "red" if part > 0.9 else "blue")
        yield (f" {tables.memory(device)}", "")
    if device.utilisation is not None:
        if width >= WIDE:
            yield ("  ", "")
            yield from part_bar(device.utilisation / 100, long // 2, "green")
        yield (f" {device.utilisation:>3} % busy", "")
    if width >= NARROW_BARS and (heat := heat_and_power(device)):
        yield (f"  {heat}", "")
    if width >= WIDE and (device.name or device.type):
        yield (f"  {printable(device.name or device.type or '')}", "dim")


def share_bar(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    """Yield a bar with each holder's share in its own colour, then the free share."""
    at, share = 0, 0.0
    for number, holder in enumerate(device.holders):
        share += holder.share
        end = min(width, max(at + (holder.share > 0), round(share * width)))
        yield (FULL * (end - at), COLORS[number % len(COLORS)])
        at = end
    yield (EMPTY * (width - at), "dim")


def part_bar(part: float, width: int, style: str) -> Iterator[tuple[str, str]]:
    """Yield a bar that is full up to a fraction, `part`."""
    full = round(min(max(part, 0.0), 1.0) * width)
    yield (FULL * full, style)
    yield (EMPTY * (width - full), "dim")


KEYS: Final = "q quit  p pause  s sort  j/k scroll  c cancel  x kill"
KEYS_IN_BRIEF: Final = "q p s j/k c x"
LONGEST_HISTORY: Final = 20
"""Most characters of a device's history."""
LEAST_HISTORY: Final = 5
"""Fewest characters of a device's history; with less room it is left out."""
MINUTE: Final = 60.0
"""Seconds of a device's history."""
LEVELS: Final = "▁▂▃▄▅▆▇█"
"""Characters of a history, in steps of an eighth of 100 %."""


class BusyHistory:
    """The utilisation of each device in the last minute."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def note(self, status: NodeStatus, now: float) -> None:
        """Add the utilisations of a status at a time in seconds."""
        for device in status.devices:
            if device.utilisation is not None:
                samples = self._seen.setdefault(tables.device_name(device), deque())
                samples.append((now, device.utilisation))
                while samples[0][0] <= now - MINUTE:
                    samples.popleft()

    def line(self, device: DeviceStatus, width: int, now: float) -> str:
        """Draw the minute in `width` characters, each a mean; blank if unknown."""
        parts: list[list[int]] = [[] for _ in range(width)]
        for when, busy in self._seen.get(tables.device_name(device), ()):
            at = width - 1 - int((now - when) / MINUTE * width)
            if at >= 0:
                parts[at].append(busy)
        return "".join(
            LEVELS[min(sum(part) * len(LEVELS) // (100 * len(part)), len(LEVELS) - 1)]
            if part
            else " "
            for part in parts
        )


def render_screen(
    status: NodeStatus,
    view: View,
    width: int,
    height: int,
    note: str = "",
    history: Callable[[DeviceStatus, int], str] | None = None,
) -> Group:
    """Render the screen: a heading, the lines that fit, and the keys.

    Args:
        status: the status to show.
        view: the visible part; gets the number of lines.
        width: columns of the screen.
        height: lines of the screen.
        note: an additional text for the heading.
        history: see `device_lines`.
    """
    body = list(render_body(status, view.order, width, history))
    heights = [len(part.rows) + 1 if isinstance(part, Table) else 1 for part in body]
    room = max(1, height - 2)
    view.fit(sum(heights), room)
    # Draw only visible lines: a node may have thousands of tasks.
    shown: list[Text | Table] = []
    first, last = view.offset, view.offset + room
    for part, lines in zip(body, heights, strict=True):
        if first < lines and last > 0 and isinstance(part, Table):
            shown.append(part.part(max(first, 0), last))
        elif first < lines and last > 0:
            shown.append(part)
        first, last = first - lines, last - lines
    shown += [Text()] * last
    marks = " PAUSED " * view.is_paused + (f" {note}" if note else "")
    top = text(f"aiogpu  {summary(status)}", "bold")
    top.truncate(max(0, width - len(marks)), overflow="ellipsis", pad=True)
    top = Text.assemble(top, (marks, "bold reverse yellow"))
    total = sum(heights)
    end = min(view.offset + view.page, total)
    place = f"  {view.offset + 1}-{end} of {total}" if view.bottom else ""
    place = f"  by {view.order}{place}"
    help_text = KEYS if len(KEYS + place) <= width else KEYS_IN_BRIEF
    keys = text(help_text + place, "reverse")
    if view.prompt is not None:
        keys = text(view.prompt.line(status), "bold reverse yellow")
    elif view.message:
        keys = text(view.message, "bold reverse")
    for line in (top, keys):
        line.truncate(width, overflow="ellipsis", pad=True)
    return Group(top, *shown, keys)


def render_body(
    status: NodeStatus,
    order: str,
    width: int,
    history: Callable[[DeviceStatus, int], str] | None = None,
) -> Iterator[Text | Table]:
    """Yield the devices and all tables, from top to bottom."""
    yield from device_lines(status.devices, width, history)
    holders = {
        (holder.pid, holder.task): holder
        for device in status.devices
        for holder in device.holders
    }
    tasks = sorted_tasks(held_tasks(status), holders, order)
    clients, groups = shown_clients(status), status.placements
    for title, table in (
        (f"waiting: {status.waiting_count}", tables.shape_table(status.shapes, status)),
        (
            f"running and leased: {len(tasks)}",
            tables.task_table(tasks, status, holders),
        ),
        (f"placements: {len(groups)}", tables.placement_table(groups, status)),
        (f"programs: {len(clients)}", tables.client_table(clients, status)),
        (f"actors: {len(status.actors)}", tables.actor_table(status.actors, status)),
        ("failed recently", tables.failure_table(status.failures, status)),
    ):
        if table.rows:
            yield Text()
            yield text(title, "bold underline")
            yield table
        if status.reservation is not None and title.startswith("waiting"):
            kept = f"kept for {status.reservation.name}: {status.reservation}"
            yield text(kept, "cyan")
    if not tasks and not status.waiting_count:
        yield Text()
        yield text("No task runs or waits.", "dim")


def sorted_tasks(
    tasks: list[TaskStatus],
    holders: Mapping[tuple[int, str | None], Holder],
    order: str,
) -> list[TaskStatus]:
    """Sort tasks by the order of the view, the largest or oldest first."""

    def key(task: TaskStatus) -> tuple[str | float, int]:
        holder = holders.get((task.pid, task.name))
        if order == "name":
            return task.name, task.id
        if order == "number" or holder is None:
            return 1.0, task.id
        value = holder.used if order == "memory" else holder.seconds
        return -(value or 0.0), task.id

    return sorted(tasks, key=key)


LATE: Final = 3.0
"""Seconds without an answer before the screen says so."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@click.command()
@connect.address_option
@click.option(
    "--interval",
    type=Seconds(min=0.1, max=3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
def top(address: str, interval: float) -> int:
    """Watch the running node: devices and their holders, waiting and failed tasks.

    Without a terminal, the status is printed once as plain lines.

    \b
    Keys:
      q                 quit
      p                 pause or go on
      s                 sort tasks by number, name, memory or time
      c                 cancel a task: type its number, Enter, then y
      x                 kill an actor: type its number, Enter, then y
      j k, arrows       scroll by a line; space and b by a page, g and G to the ends

    \b
    Examples:
      aiogpu top
      aiogpu top --interval 5

    \b
    Exit codes:
      0    you quit
      1    no node runs, or the node has ended
      2    bad input
      130  Ctrl-C
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not is_terminal() or os.environ.get("TERM", "dumb") == "dumb":
        echo(plain_report(connect.ask(address, lambda node: node.status())))
        return 0
    return connect.ask(address, lambda node: Top(node, interval).run(), patience=None)


class Top:
    """The live screen, its keys and signals."""

    def __init__(self, node: connect.Node, interval: float) -> None:
        self._node = node
        self._interval = interval
        self._view = View()
        self._seen_at = time.monotonic()
        self._changed = asyncio.Event()
        self._code = 0
        self._screen = live(is_whole_screen=True)
        self._loop = asyncio.get_running_loop()
        self._keyboard: Keyboard | None = None
        self._history = BusyHistory()
        self._stopping: asyncio.Task[None] | None = None
        if sys.stdin.isatty():
            self._keyboard = Keyboard(sys.stdin.fileno(), self._loop, self._press)

    async def run(self) -> int:
        """Show the node until the user quits or a signal comes; return the exit code.

        Raises:
            AiogpuError: the node has closed or died.
        """
        self._see(await self._node.status())
        asking = self._loop.create_task(self._ask())
        asking.add_done_callback(lambda _: self._changed.set())
        try:
            for number in ENDING:
                self._loop.add_signal_handler(number, self._end, number)
            self._loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
            self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
            self._enter()
            while not self._view.has_ended:
                if asking.done():
                    asking.result()
                self._draw()
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LATE + self._interval):
                        await self._changed.wait()
        finally:
            self._leave()
            asking.cancel()
            if self._stopping is not None:
                self._stopping.cancel()
            await asyncio.wait([asking, *filter(None, [self._stopping])])
        return self._code

    def _draw(self) -> None:
        age = time.monotonic() - self._seen_at
        is_late = age > LATE + self._interval and not self._view.is_paused
        note = f"no answer for {span(age)}" if is_late else ""
        size = self._screen.console.size
        picture = render_screen(
            status=self._seen,
            view=self._view,
            width=size.width,
            height=size.height,
            note=note,
            history=lambda device, room: self._history.line(
                device, room, self._seen_at
            ),
        )
        self._screen.update(picture, refresh=True)

    async def _ask(self) -> None:
        """Ask for the status at each interval."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._view.is_paused:
                self._see(await self._node.status())
                self._changed.set()

    def _see(self, status: NodeStatus) -> None:
        self._seen, self._seen_at = status, time.monotonic()
        self._history.note(status, self._seen_at)

    def _press(self, key: str) -> None:
        self._view.press(key)
        prompt = self._view.prompt
        if prompt is not None and prompt.is_confirmed:
            self._view.prompt = None
            if self._stopping is not None and not self._stopping.done():
                self._view.message = "the node has not answered the last command yet"
                return
            stop = self._stop_one(prompt.what, int(prompt.number))
            self._stopping = self._loop.create_task(stop)
        self._changed.set()

    async def _stop_one(self, what: str, number: int) -> None:
        """Cancel a task or kill an actor, and show the result."""
        try:
            self._view.message = await stop_one(self._node, what, number)
        except click.ClickException as error:
            self._view.message = error.message
        except (aiogpu.AiogpuError, TimeoutError) as error:
            self._view.message = str(error) or "the node has not answered"
        self._changed.set()

    def _enter(self) -> None:
        if self._keyboard is not None:
            self._keyboard.open()
        self._screen.start()

    def _leave(self) -> None:
        """Restore the terminal."""
        try:
            self._screen.stop()
        finally:
            if self._keyboard is not None:
                self._keyboard.close()

    def _end(self, number: signal.Signals) -> None:
        self._code = 128 + number
        self._view.has_ended = True
        self._changed.set()

    def _stop(self) -> None:
        """Restore the terminal and stop until `fg`; called at Ctrl-Z."""
        self._leave()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # The process goes on here after `fg`.
        self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._enter()
        self._changed.set()
