"""`aiogpu top`: the running node, live, on the whole screen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Final

import click

import aiogpu
from aiogpu.cli import joining
from aiogpu.cli.board import board
from aiogpu.cli.keyboard import Keyboard
from aiogpu.cli.quantities import Seconds
from aiogpu.cli.screen import Picture, is_terminal
from aiogpu.cli.status import plain_report
from aiogpu.cli.view import View
from aiogpu.core.model.text import span

LATE: Final = 3.0
"""Seconds without an answer after which that is said."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@click.command()
@joining.address_option
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
        click.echo(plain_report(joining.ask(address, lambda node: node.status())))
        return 0
    return joining.ask(address, lambda node: Top(node, interval).run(), patience=None)


class Top:
    """The screen while it is shown, and how it comes to its end."""

    def __init__(self, node: joining.Node, interval: float) -> None:
        self._node = node
        self._interval = interval
        self._view = View()
        self._seen: aiogpu.NodeStatus | None = None
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
