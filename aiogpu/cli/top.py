r"""`aiogpu top`: the running node, live, on the whole screen.

Keys are read as they are pressed, and the terminal is restored at the end. Ctrl-C,
Ctrl-Z and Ctrl-\ remain signals.
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
from aiogpu.cli import connect, tables
from aiogpu.cli.connect import Seconds
from aiogpu.cli.status import plain_report
from aiogpu.cli.stop import WANTED, stop_one
from aiogpu.cli.tables import GAP, Table, is_terminal, live, text
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
"""A key as terminals send it; for an endless sequence, its first 16 bytes."""
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
"""The ends of escape sequences of keys; source: xterm's "ctlseqs"."""


class KeyDecoder:
    """Decodes what a terminal sends, in pieces of any size, into keys."""

    def __init__(self) -> None:
        self._rest = b""

    def keys(self, sent: bytes) -> Iterator[str]:
        """The keys that are complete now."""
        self._rest += sent
        while found := KEY.match(self._rest):
            self._rest = self._rest[found.end() :]
            sequence = found[1] or found[2] or b""
            key = SEQUENCES.get(sequence) or (found[3] or b"").decode("ascii", "ignore")
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
        """Give the terminal back as it was."""
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
    """A question for the number of what is to be cancelled or killed.

    Attributes:
        what: `CANCEL` or `KILL`.
        number: the digits so far.
        is_asked: whether the number is complete, and a "y" is awaited.
        is_confirmed: whether that was given.
    """

    what: str
    number: str = ""
    is_asked: bool = False
    is_confirmed: bool = False

    def press(self, key: str) -> bool:
        """Handle a key; returns False if the question is over."""
        if self.is_asked:
            self.is_confirmed = key == "y"
            return self.is_confirmed
        if key.isdecimal() and key.isascii():
            self.number = (self.number + key)[:LONGEST_NUMBER]
        elif key in ("\x7f", "\b"):
            self.number = self.number[:-1]
        else:
            self.is_asked = key in ("\r", "\n") and bool(self.number)
            return self.is_asked
        return True

    def line(self, status: NodeStatus) -> str:
        """What is asked, for the last line of the screen."""
        kind = WANTED[self.what]
        if not self.is_asked:
            return f"{self.what} {kind} number: {self.number}_  Enter; q leaves it"
        names = (one.name for one in status.tasks if str(one.id) == self.number)
        name = next(names, "")
        who = f"{name} ({kind} {self.number})" if name else f"{kind} {self.number}"
        return f"{self.what} {who}?  y does it, any other key leaves it"


LONGEST_NUMBER: Final = 18
"""Digits of a number."""
ORDERS: Final = ("number", "name", "memory", "time")
"""Orders of the tasks on workers."""


@dataclass(slots=True)
class View:
    """Which part of the status is shown; keys change it.

    Attributes:
        is_paused: whether updates are suspended.
        has_ended: whether the user has quit.
        offset: how many lines are scrolled off above the screen.
        order: one of `ORDERS`.
        bottom: the offset that shows the last line; noted when it is drawn.
        page: how many lines are shown at once.
        prompt: asks what is to be cancelled or killed; None while nothing is asked.
        told: what was done last, in the last line until the next key.
    """

    is_paused: bool = False
    has_ended: bool = False
    offset: int = 0
    order: str = ORDERS[0]
    bottom: int = 0
    page: int = 1
    prompt: Prompt | None = None
    told: str = ""

    def fit(self, count: int, room: int) -> None:
        """Limit the offset to `count` lines on a screen with room for `room`."""
        self.page = max(room, 1)
        self.bottom = max(0, count - room)
        self.offset = min(self.offset, self.bottom)

    def press(self, key: str) -> None:
        """Handle a key; unknown keys do nothing."""
        self.told = ""
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
"""Columns below which there is one bar."""
WIDE: Final = 110
"""Columns from which on bars are long and followed by the name of the device."""


def device_lines(
    devices: Sequence[DeviceStatus],
    width: int,
    history: Callable[[DeviceStatus, int], str] | None = None,
) -> Iterator[Text]:
    """A line of bars for each device, and one for its holders.

    Args:
        devices: the devices.
        width: columns of the screen.
        history: gives how busy one was in the last minute, in so many characters.
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
            for told, style in _bars(device, width):
                line.append(told, style)
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
    if width >= NARROW_BARS and (told := heat_and_power(device)):
        yield (f"  {told}", "")
    if width >= WIDE and (device.name or device.type):
        yield (f"  {printable(device.name or device.type or '')}", "dim")


def share_bar(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    """Yield a bar with each holder's share in its own colour, then the free share."""
    at, held = 0, 0.0
    for number, holder in enumerate(device.holders):
        held += holder.share
        end = min(width, max(at + (holder.share > 0), round(held * width)))
        yield (FULL * (end - at), COLORS[number % len(COLORS)])
        at = end
    yield (EMPTY * (width - at), "dim")


def part_bar(part: float, width: int, style: str) -> Iterator[tuple[str, str]]:
    """A bar of which a part is full."""
    full = round(min(max(part, 0.0), 1.0) * width)
    yield (FULL * full, style)
    yield (EMPTY * (width - full), "dim")


KEYS: Final = "q quit  p pause  s sort  j/k scroll  c cancel  x kill"
KEYS_IN_BRIEF: Final = "q p s j/k c x"
LONGEST_HISTORY: Final = 20
"""Characters of the last minute of a device."""
LEAST_HISTORY: Final = 5
"""Characters of it below which there is none."""
MINUTE: Final = 60.0
"""Seconds of a device's history."""
LEVELS: Final = "▁▂▃▄▅▆▇█"
"""Characters of a history: an eighth of 100 % more each."""


class BusyHistory:
    """How busy each device was in the last minute."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def note(self, status: NodeStatus, now: float) -> None:
        """Take in a status that was seen at a time, in seconds."""
        for device in status.devices:
            if device.utilisation is not None:
                seen = self._seen.setdefault(tables.device_name(device), deque())
                seen.append((now, device.utilisation))
                while seen[0][0] <= now - MINUTE:
                    seen.popleft()

    def line(self, device: DeviceStatus, width: int, now: float) -> str:
        """The minute in `width` characters, the mean of each; blank where unseen."""
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
        view: what of it is shown; is told how many lines there are.
        width: columns of the screen.
        height: lines of the screen.
        note: what else is to be said, on top.
        history: see `device_lines`.
    """
    body = list(render_body(status, view.order, width, history))
    heights = [len(one.rows) + 1 if isinstance(one, Table) else 1 for one in body]
    room = max(1, height - 2)
    view.fit(sum(heights), room)
    # Only what is seen is drawn: a node may have thousands of tasks.
    shown: list[Text | Table] = []
    first, last = view.offset, view.offset + room
    for one, lines in zip(body, heights, strict=True):
        if first < lines and last > 0 and isinstance(one, Table):
            shown.append(one.part(max(first, 0), last))
        elif first < lines and last > 0:
            shown.append(one)
        first, last = first - lines, last - lines
    shown += [Text()] * last
    said = " PAUSED " * view.is_paused + (f" {note}" if note else "")
    top = text(f"aiogpu  {summary(status)}", "bold")
    top.truncate(max(0, width - len(said)), overflow="ellipsis", pad=True)
    top = Text.assemble(top, (said, "bold reverse yellow"))
    total = sum(heights)
    seen = min(view.offset + view.page, total)
    place = f"  {view.offset + 1}-{seen} of {total}" if view.bottom else ""
    place = f"  by {view.order}{place}"
    known = KEYS if len(KEYS + place) <= width else KEYS_IN_BRIEF
    keys = text(known + place, "reverse")
    if view.prompt is not None:
        keys = text(view.prompt.line(status), "bold reverse yellow")
    elif view.told:
        keys = text(view.told, "bold reverse")
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
        ("failed lately", tables.failure_table(status.failures, status)),
    ):
        if table.rows:
            yield Text()
            yield text(title, "bold underline")
            yield table
        if status.reservation is not None and title.startswith("waiting"):
            told = f"kept for {status.reservation.name}: {status.reservation}"
            yield text(told, "cyan")
    if not tasks and not status.waiting_count:
        yield Text()
        yield text("Nothing runs, and nothing waits.", "dim")


def sorted_tasks(
    tasks: list[TaskStatus],
    holders: Mapping[tuple[int, str | None], Holder],
    order: str,
) -> list[TaskStatus]:
    """Sort tasks by the order of the view; the largest, or oldest, first."""

    def key(task: TaskStatus) -> tuple[str | float, int]:
        holder = holders.get((task.pid, task.name))
        if order == "name":
            return task.name, task.id
        if order == "number" or holder is None:
            return 1.0, task.id
        much = holder.used if order == "memory" else holder.seconds
        return -(much or 0.0), task.id

    return sorted(tasks, key=key)


LATE: Final = 3.0
"""Seconds without an answer after which the screen says so."""
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
    """Watch the running node: devices, their holders, what waits, what has failed.

    Without a terminal, the status is printed once as plain lines.

    \b
    Keys:
      q                 quit
      p                 pause, and go on
      s                 sort tasks by number, name, memory or time
      c                 cancel a task: its number, Enter, then y
      x                 kill an actor, likewise
      j k, arrows       scroll by a line; space and b by a page, g and G to the ends

    \b
    Examples:
      aiogpu top
      aiogpu top --interval 5

    \b
    Exit codes:
      0    you have quit
      1    no node runs, or it has ended
      2    bad input
      130  Ctrl-C
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not is_terminal() or os.environ.get("TERM", "dumb") == "dumb":
        click.echo(plain_report(connect.ask(address, lambda node: node.status())))
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
        """Show it until the user quits or a signal comes; returns the exit code.

        Raises:
            AiogpuError: the node cannot be asked any more.
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
        drawn = render_screen(
            *(self._seen, self._view, size.width, size.height, note),
            lambda device, room: self._history.line(device, room, self._seen_at),
        )
        self._screen.update(drawn, refresh=True)

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
                self._view.told = "the node has not answered the last one yet"
                return
            stop = self._stop_one(prompt.what, int(prompt.number))
            self._stopping = self._loop.create_task(stop)
        self._changed.set()

    async def _stop_one(self, what: str, number: int) -> None:
        """Cancel a task or kill an actor, and say what was done."""
        try:
            self._view.told = await stop_one(self._node, what, number)
        except (click.ClickException, aiogpu.AiogpuError, TimeoutError) as error:
            told = error.message if isinstance(error, click.ClickException) else error
            self._view.told = str(told) or "the node has not answered"
        self._changed.set()

    def _enter(self) -> None:
        if self._keyboard is not None:
            self._keyboard.open()
        self._screen.start()

    def _leave(self) -> None:
        """Give the terminal back."""
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
        """Ctrl-Z: give the terminal back to the shell until `fg`."""
        self._leave()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it goes on after `fg`.
        self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._enter()
        self._changed.set()
