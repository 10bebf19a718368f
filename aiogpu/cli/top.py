r"""`aiogpu top`: the running node, live, on the whole screen.

Keys are read as they are pressed, on a terminal that is given back as it was. Ctrl-C,
Ctrl-Z and Ctrl-\ stay what they are: signals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import click

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.connect import Seconds
from aiogpu.cli.status import plain_report
from aiogpu.cli.tables import (
    Programs,
    actor_table,
    client_table,
    device_name,
    failure_table,
    held_by,
    memory,
    pid,
    placement_table,
    shape_table,
    shown_clients,
    state,
)
from aiogpu.cli.terminal import (
    GAP,
    Column,
    Line,
    Picture,
    Table,
    cut,
    drawers,
    is_terminal,
    within,
)
from aiogpu.core.model.text import printable, span, terms
from aiogpu.observe.status import (
    DeviceStatus,
    Holder,
    TaskStatus,
    amount,
    held_tasks,
    state_of,
    summary,
)

SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
}
"""What terminals send for keys that are no character; source: xterm's "ctlseqs"."""
LONGEST_SEQUENCE: Final = 16
"""Bytes of a sequence that is none of these, after which it is given up."""


class Decoder:
    """Makes keys of what a terminal sends, in whatever pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def keys(self, sent: bytes) -> Iterator[str]:
        """The keys that are complete now."""
        rest = self._rest + sent
        while rest:
            if rest[0] != 0x1B:
                if rest[0] < 0x80:
                    yield chr(rest[0])
                rest = rest[1:]
                continue
            length = _length(rest)
            if not length:
                break
            known = SEQUENCES.get(rest[:length])
            if known:
                yield known
            rest = rest[length:]
        self._rest = rest


def _length(sent: bytes) -> int:
    """Return how long the sequence is with which this begins; 0 if more is to come."""
    if len(sent) == 1:
        return 0
    if sent[1:2] == b"O":
        return 3 if len(sent) >= 3 else 0
    if sent[1:2] != b"[":
        return 1  # Escape alone, and another key
    for at, byte in enumerate(sent[2:LONGEST_SEQUENCE], 3):
        if 0x40 <= byte <= 0x7E:
            return at
    return LONGEST_SEQUENCE if len(sent) >= LONGEST_SEQUENCE else 0


class Keyboard:
    """The keys of a terminal, while it is open.

    Attributes:
        on_key: told of each key.
    """

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self.on_key: Callable[[str], None]
        self._fd = fd
        self._loop = loop
        self._before: list[Any] | None = None
        self._decoder = Decoder()

    def open(self) -> None:
        """Have keys come one by one, and none of them shown."""
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
            self.on_key("q")
        for key in self._decoder.keys(sent):
            self.on_key(key)


ORDERS: Final = ("number", "name", "memory", "time")
"""By what the tasks on workers are sorted."""


@dataclass(slots=True)
class View:
    """See above; changed by keys.

    Attributes:
        is_paused: whether the picture stays as it is.
        has_ended: whether the person wants no more of it.
        offset: how many lines of the picture are above the screen.
        order: one of `ORDERS`.
        bottom: the offset that shows the last line; noted when it is drawn.
        page: lines of the picture that are shown at once.
    """

    is_paused: bool = False
    has_ended: bool = False
    offset: int = 0
    order: str = ORDERS[0]
    bottom: int = 0
    page: int = 1

    def fit(self, count: int, room: int) -> None:
        """A picture of so many lines is drawn where there is room for so many."""
        self.page = max(room, 1)
        self.bottom = max(0, count - room)
        self.offset = min(self.offset, self.bottom)

    def press(self, key: str) -> None:
        """Do what a key is for; those that are for nothing do nothing."""
        match key:
            case "q":
                self.has_ended = True
            case "p":
                self.is_paused = not self.is_paused
            case "s":
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            case "j" | "down":
                self._scroll(1)
            case "k" | "up":
                self._scroll(-1)
            case " " | "page down":
                self._scroll(self.page)
            case "b" | "page up":
                self._scroll(-self.page)
            case "g" | "home":
                self.offset = 0
            case "G" | "end":
                self.offset = self.bottom

    def _scroll(self, lines: int) -> None:
        self.offset = max(0, min(self.offset + lines, self.bottom))


COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue")
"""Of holders, one after the other."""
FULL, EMPTY = "█", "░"
NARROW_BARS: Final = 60
"""Columns below which there is one bar."""
WIDE: Final = 110
"""Columns from which on bars are long, and the device's name stands beside them."""


def device_lines(devices: Sequence[DeviceStatus], width: int) -> Iterator[Line]:
    """A line of bars for each device, and one for who holds it."""
    names = [device_name(device) for device in devices]
    margin = min(max(map(len, names), default=0), max(8, width // 4))
    for name, device in zip(names, devices, strict=True):
        head = cut(name, margin).ljust(margin + GAP)
        if device.aside is not None:
            told = f"set aside: {printable(device.aside)}"
            yield [(head, "bold"), (cut(told, width - margin - GAP), "bold red")]
        else:
            yield within([(head, "bold"), *_bars(device, width)], width)
        told = printable("  ".join(held_by(device)))
        if told:
            yield [(" " * (margin + GAP), ""), (cut(told, width - margin - GAP), "dim")]


def _bars(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    long = 24 if width >= WIDE else 12 if width >= NARROW_BARS else 8
    yield from share_bar(device, long)
    yield (f" {1 - device.free:>4.2g} held", "")
    if device.used is not None and device.memory:
        if width >= NARROW_BARS:
            part = device.used / device.memory
            yield ("  ", "")
            yield from part_bar(part, long // 2, "red" if part > 0.9 else "blue")
        yield (f" {memory(device)}", "")
    if device.utilisation is not None:
        if width >= WIDE:
            yield ("  ", "")
            yield from part_bar(device.utilisation / 100, long // 2, "green")
        yield (f" {device.utilisation:>3} % busy", "")
    if width >= WIDE and (device.name or device.type):
        yield (f"  {printable(device.name or device.type or '')}", "dim")


def share_bar(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    """One holder after the other, each in its colour; then what is free."""
    at, held = 0, 0.0
    for number, holder in enumerate(device.holders):
        held += holder.share
        end = min(width, max(at + (holder.share > 0), round(held * width)))
        yield (FULL * (end - at), COLORS[number % len(COLORS)])
        at = end
    yield (EMPTY * (width - at), "dim")


def part_bar(part: float, width: int, style: str) -> Iterator[tuple[str, str]]:
    """Return how much of something is used."""
    full = round(min(max(part, 0.0), 1.0) * width)
    yield (FULL * full, style)
    yield (EMPTY * (width - full), "dim")


KEYS: Final = "q quit  p pause  s sort  j/k scroll"


def board(
    status: aiogpu.types.NodeStatus,
    view: View,
    width: int,
    height: int,
    note: str = "",
) -> list[Line]:
    """The screen: a line on top, as much of the picture as there is room for, keys.

    Args:
        status: the picture.
        view: what of it is shown; is told how much there is.
        width: columns of the screen.
        height: lines of the screen.
        note: what else is to be said, on top.
    """
    body = list(picture(status, view.order, width))
    room = max(1, height - 2)
    view.fit(len(body), room)
    shown = [
        within(line() if callable(line) else line, width)
        for line in body[view.offset : view.offset + room]
    ]
    shown += [[] for _ in range(room - len(shown))]
    return [_top(status, view, width, note), *shown, _keys(view, len(body), width)]


def _top(status: aiogpu.types.NodeStatus, view: View, width: int, note: str) -> Line:
    said = " PAUSED " if view.is_paused else ""
    said = f"{said} {note}" if note else said
    left = cut(f"aiogpu  {printable(summary(status))}", max(0, width - len(said) - 1))
    blanks = " " * max(0, width - len(left) - len(said))
    return [(left, "bold"), (blanks, ""), (cut(said, width), "bold reverse yellow")]


def _keys(view: View, count: int, width: int) -> Line:
    told = f"{KEYS}  by {view.order}"
    last = min(view.offset + view.page, count)
    place = "" if not view.bottom else f"  {view.offset + 1}-{last} of {count}"
    return [(cut(told + place, width).ljust(width), "reverse")]


def picture(
    status: aiogpu.types.NodeStatus, order: str, width: int
) -> Iterator[Line | Callable[[], Line]]:
    """All that there is to see, from top to bottom; some of it drawn when called."""
    yield from device_lines(status.devices, width)
    tasks = held_tasks(status)
    clients, held = shown_clients(status), status.placements
    parts = (
        (f"waiting: {status.waiting_count}", shape_table(status.shapes)),
        (f"running and leased: {len(tasks)}", held_table(status, tasks, order)),
        (f"placements: {len(held)}", placement_table(held, status)),
        (f"programs: {len(clients)}", client_table(clients)),
        (f"actors: {len(status.actors)}", actor_table(status.actors, status)),
        ("failed lately", failure_table(status.failures, status)),
    )
    for title, table in parts:
        if table.rows:
            yield []
            yield [(title, "bold underline")]
            yield from drawers(table, width)
        if status.reservation is not None and title.startswith("waiting"):
            told = f"kept for {status.reservation.name}: {status.reservation}"
            yield [(cut(printable(told), width), "cyan")]
    if not tasks and not status.waiting_count:
        yield []
        yield [("Nothing runs, and nothing waits.", "dim")]


def held_table(
    status: aiogpu.types.NodeStatus, tasks: list[TaskStatus], order: str
) -> Table:
    """The tasks on workers with what they hold, in one of the `ORDERS`."""
    holders = {
        (holder.pid, holder.task): holder
        for device in status.devices
        for holder in device.holders
    }
    programs = Programs(status)
    columns = (
        Column("TASK", is_number=True),
        Column("NAME", least=10),
        Column("STATE"),
        Column("PID", is_number=True, rank=2),
        Column("PROGRAM", least=8, rank=3),
        Column("HOLDS", least=12, rank=4),
        Column("FOR", is_number=True, rank=1),
        Column("MEMORY", is_number=True, rank=5),
        Column("WHY", least=10, rank=6),
    )
    rows = [
        (
            *(str(one.id), one.name, state(state_of(one))),
            *(pid(one.pid), programs[one.client]),
            terms(one.request.items()),
            *_use(holders.get((one.pid, one.name))),
            one.reason or "",
        )
        for one in in_order(tasks, holders, order)
    ]
    return Table(columns, rows)


def _use(holder: Holder | None) -> tuple[str, str]:
    """For how long it holds its devices, and how much memory of them it uses."""
    if holder is None:
        return "", ""
    seconds = "" if holder.seconds is None else span(holder.seconds)
    return seconds, "" if holder.used is None else amount(holder.used, "0")


def in_order(
    tasks: list[TaskStatus],
    holders: Mapping[tuple[int, str | None], Holder],
    order: str,
) -> list[TaskStatus]:
    """The tasks as the view wants them; what is large, or old, comes first."""

    def size(task: TaskStatus) -> tuple[float, int]:
        holder = holders.get((task.pid, task.name))
        if holder is None:
            return 1.0, task.id
        much = holder.used if order == "memory" else holder.seconds
        return -(much or 0.0), task.id

    if order == "name":
        return sorted(tasks, key=lambda task: (task.name, task.id))
    if order in ("memory", "time"):
        return sorted(tasks, key=size)
    return sorted(tasks, key=lambda task: task.id)


LATE: Final = 3.0
"""Seconds without an answer after which that is said."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@click.command()
@connect.address_option
@click.option(
    "--interval",
    type=Seconds(min=0.1, max=3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two pictures.",
)
def top(address: str, interval: float) -> int:
    """Watch the running node: devices, who holds them, what waits, what has failed.

    Where it is no terminal, one picture is printed as plain lines.

    \b
    Keys:
      q                 quit
      p                 pause, and go on
      s                 sort tasks by number, name, memory or time
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
    """The screen while it is shown, and how it comes to its end."""

    def __init__(self, node: connect.Node, interval: float) -> None:
        self._node = node
        self._interval = interval
        self._view = View()
        self._seen: aiogpu.types.NodeStatus | None = None
        self._seen_at = time.monotonic()
        self._changed = asyncio.Event()
        self._code = 0
        self._picture = Picture(is_live=True, is_whole_screen=True)
        self._keyboard: Keyboard | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> int:
        """Show it until the person quits or a signal comes; gives the exit code.

        Raises:
            AiogpuError: the node cannot be asked any more.
        """
        self._seen = await self._node.status()
        if sys.stdin.isatty():
            self._keyboard = Keyboard(sys.stdin.fileno(), self._loop)
            self._keyboard.on_key = self._press
        asking = self._loop.create_task(self._ask())
        asking.add_done_callback(lambda _: self._changed.set())
        try:
            self._hear_signals()
            self._enter()
            await self._show(asking)
        finally:
            self._leave()
            asking.cancel()
            await asyncio.wait([asking])
        return self._code

    async def _show(self, asking: asyncio.Task[None]) -> None:
        while not self._view.has_ended:
            if asking.done():
                asking.result()
            self._draw()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE + self._interval):
                    await self._changed.wait()

    def _draw(self) -> None:
        assert self._seen is not None
        picture, age = self._picture, time.monotonic() - self._seen_at
        is_late = age > LATE + self._interval and not self._view.is_paused
        note = f"no answer for {span(age)}" if is_late else ""
        size = picture.width, picture.height
        picture.draw(board(self._seen, self._view, *size, note))

    async def _ask(self) -> None:
        """Ask again and again."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._view.is_paused:
                self._seen = await self._node.status()
                self._seen_at = time.monotonic()
                self._changed.set()

    def _press(self, key: str) -> None:
        self._view.press(key)
        self._changed.set()

    def _enter(self) -> None:
        if self._keyboard is not None:
            self._keyboard.open()
        self._picture.__enter__()

    def _leave(self) -> None:
        """Give the terminal back."""
        try:
            self._picture.__exit__(None, None, None)
        finally:
            if self._keyboard is not None:
                self._keyboard.close()

    def _hear_signals(self) -> None:
        add = self._loop.add_signal_handler
        for number in ENDING:
            add(number, self._end, number)
        add(signal.SIGWINCH, self._changed.set)
        add(signal.SIGTSTP, self._stop)

    def _end(self, number: signal.Signals) -> None:
        self._code = 128 + number
        self._view.has_ended = True
        self._changed.set()

    def _stop(self) -> None:
        """Ctrl-Z: the shell gets its terminal as it was, until it lets us go on."""
        self._leave()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it goes on after `fg`.
        self._loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._enter()
        self._changed.set()
