"""Running a program: `asyncio.run` on uvloop. The only door to uvloop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from inspect import CORO_SUSPENDED, getcoroutinestate
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

MOMENT: Final = 0.1
"""Seconds after which the second Ctrl-C was lost, if the loop still runs."""


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on uvloop.

    Ctrl-C once cancels `main`, and what it holds by `async with` is closed in order;
    twice ends it at once.

    Args:
        main: the program's coroutine.
        debug: asyncio's debug mode; None for the interpreter's setting.
    """
    try:
        runner = _undisturbed(partial(_runner, debug))
    except BaseException:
        if asyncio.iscoroutine(main):
            main.close()
        raise
    presses = _Presses()
    program = presses.heard(main) if asyncio.iscoroutine(main) else main
    try:
        return runner.run(program)
    except RuntimeError as error:
        if presses.has_stopped:
            raise KeyboardInterrupt from None
        if asyncio._get_running_loop() is not None:
            error.add_note(
                "aiogpu.run() begins an event loop of its own, and one runs here "
                "already, as in a notebook: write `await main()`."
            )
        raise
    finally:
        presses.are_over = True
        if program is not main and getcoroutinestate(program) != CORO_SUSPENDED:
            program.close()  # it may never have begun, nor what it awaits
            main.close()
        runner.close()


def _runner(debug: bool | None) -> asyncio.Runner:
    import uvloop

    _open_standard_descriptors()
    # In `with` it would make its loop at once, and fail to close it inside another.
    return asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop)


def _undisturbed(make: Callable[[], T]) -> T:
    """Make something; a Ctrl-C meanwhile is raised when it is there.

    In the midst of an import it comes out as another error now and then, or not at all.
    """
    theirs = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or theirs is not signal.default_int_handler:
        return make()
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        made = make()
    finally:
        signal.signal(signal.SIGINT, theirs)
    if pressed:
        raise KeyboardInterrupt
    return made


class _Presses:
    """Counts Ctrl-C. uvloop loses the second where it lands in a callback of its own.

    Attributes:
        are_over: the loop has come to its end.
        has_stopped: the loop was stopped since nothing else has ended it.
    """

    def __init__(self) -> None:
        self.are_over = False
        self.has_stopped = False
        self._before = signal.getsignal(signal.SIGINT)
        self._count = 0

    async def heard(self, main: Coroutine[Any, Any, T]) -> T:
        """Await the program, with the runner's own handler behind this one."""
        theirs = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not callable(theirs) or theirs is signal.default_int_handler:
            return await main  # the runner does not handle it either
        loop = asyncio.get_running_loop()

        def press(number: int, frame: FrameType | None) -> None:
            self._count += 1
            if self._count > 1:
                loop.call_soon_threadsafe(loop.call_later, MOMENT, self._stop, loop)
            theirs(number, frame)

        signal.signal(signal.SIGINT, press)
        try:
            return await main
        finally:
            if signal.getsignal(signal.SIGINT) is press:
                # The runner has found this one, and left it, if it ended before.
                left = self._before if self.are_over else theirs
                signal.signal(signal.SIGINT, left)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self.are_over:
            self.has_stopped = True
            loop.stop()


def _open_standard_descriptors() -> None:
    """Fill descriptors 0 to 2 where the program was started without them.

    libuv aborts the process when it is to close one of these as its own.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
