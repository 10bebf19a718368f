"""Running a program: `asyncio.run` on uvloop. The only door to uvloop.

In a terminal's IPython the event loop stands still between cells: IPython runs a cell's
coroutine by `run_until_complete`. Ctrl-C breaks that call off and leaves the
coroutine's asyncio task waiting, and with it the aiogpu task and its GPU. So the task
of an interrupted cell is cancelled here. A Jupyter kernel does that itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from inspect import CORO_SUSPENDED, getcoroutinestate
from types import FrameType, FunctionType
from typing import Any, Final, TypeVar

from aiogpu.errors import NoLoopError

CELL: Final = "run_cell_async"
"""The coroutine function of IPython that runs a cell."""


WITHIN: Final = 1.0
"""Seconds that the interrupted cell has for its `finally`, before the prompt."""


_watched: Final[list[object]] = []
"""The shell that is watched; there is one in a process, if any."""


def watch(loops: Iterable[asyncio.AbstractEventLoop]) -> None:
    """Cancel what an interrupted cell leaves behind, if this is an IPython shell.

    Args:
        loops: those that have a node, looked at after each cell.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or shell in _watched:
        return
    _watched.append(shell)

    def after(result: Any) -> None:
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            for loop in list(loops):
                _cancel_cells(loop)

    shell.events.register("post_run_cell", after)


def _cancel_cells(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_running() or loop.is_closed():
        return  # a kernel's loop, which has seen the interrupt itself
    cells = {
        task
        for task in asyncio.all_tasks(loop)
        if getattr(task.get_coro(), "__name__", "") == CELL
    }
    for task in cells:
        task.cancel()
    if cells:
        loop.run_until_complete(asyncio.wait(cells, timeout=WITHIN))


T = TypeVar("T")


MOMENT: Final = 0.1
"""Seconds after which the second Ctrl-C was lost, if the loop still runs."""


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on uvloop.

    Ctrl-C once cancels `main`, and what it holds by `async with` is closed in order;
    twice ends it at once. SIGTERM does the same, since Slurm and Kubernetes end
    programs that way: tasks see `get_runtime_context().is_stopping`, get their
    `stop_grace`, their cancel and `cancel_grace`, and the program exits with status
    143, which is 128 + SIGTERM. A program that handles SIGTERM itself, or ignores it,
    is left alone.

    Args:
        main: the program's coroutine.
        debug: asyncio's debug mode; None for the interpreter's setting.

    Raises:
        ValueError: `main` is a function, not the coroutine that calling it gives.
        NoLoopError: an event loop runs here already, as in a notebook.
        SystemExit: SIGTERM has cancelled `main`.
    """
    if asyncio._get_running_loop() is not None:
        if asyncio.iscoroutine(main):
            main.close()
        raise NoLoopError(
            "aiogpu.run() cannot be called from a running event loop, as in a notebook "
            "or under a server: write `await main()`."
        )
    given: object = main
    if isinstance(given, FunctionType):
        raise ValueError(
            f"aiogpu.run() takes a coroutine and was given {given!r}: write "
            f"`aiogpu.run({given.__name__}())`."
        )
    try:
        runner = _with_deferred_interrupt(partial(new_runner, debug))
    except BaseException:
        if asyncio.iscoroutine(main):
            main.close()
        raise
    interrupts = _Interrupts()
    program = interrupts.counted(main) if asyncio.iscoroutine(main) else main
    try:
        return runner.run(program)
    except RuntimeError:
        if interrupts.has_stopped:
            raise KeyboardInterrupt from None
        raise
    except asyncio.CancelledError:
        if interrupts.is_terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        interrupts.are_over = True
        if program is not main and getcoroutinestate(program) != CORO_SUSPENDED:
            program.close()  # it may never have begun, nor what it awaits
            main.close()
        runner.close()


def new_runner(debug: bool | None = None) -> asyncio.Runner:
    """A runner of an event loop of uvloop, which it makes when it is first used."""
    import uvloop

    _open_standard_descriptors()
    # In `with` it would make its loop at once, and fail to close it inside another.
    return asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop)


def _with_deferred_interrupt(make: Callable[[], T]) -> T:
    """Call `make` with Ctrl-C deferred until it has returned.

    During an import, Ctrl-C may be raised as another error or be lost.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is not signal.default_int_handler:
        return make()
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        made = make()
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
    return made


class _Interrupts:
    """Counts Ctrl-C, and handles SIGTERM.

    uvloop loses a second Ctrl-C that arrives in one of its own callbacks.

    Attributes:
        are_over: the loop has ended.
        has_stopped: the loop was stopped because a second Ctrl-C was lost.
        is_terminated: SIGTERM has come.
    """

    def __init__(self) -> None:
        self.are_over = False
        self.has_stopped = False
        self.is_terminated = False
        self._before = signal.getsignal(signal.SIGINT)
        self._count = 0

    async def counted(self, main: Coroutine[Any, Any, T]) -> T:
        """Await the program; this handler calls that of the runner."""
        previous = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            loop, program = asyncio.get_running_loop(), asyncio.current_task()
            assert program is not None, "the runner has made it"
            loop.add_signal_handler(signal.SIGTERM, self._terminate, loop, program)
        if (
            not is_main
            or not callable(previous)
            or previous is signal.default_int_handler
        ):
            return await main  # the runner does not handle it either
        loop = asyncio.get_running_loop()

        def press(number: int, frame: FrameType | None) -> None:
            self._count += 1
            if self._count > 1:
                loop.call_soon_threadsafe(loop.call_later, MOMENT, self._stop, loop)
            previous(number, frame)

        signal.signal(signal.SIGINT, press)
        try:
            return await main
        finally:
            if signal.getsignal(signal.SIGINT) is press:
                # The runner leaves a handler that is not its own in place.
                left = self._before if self.are_over else previous
                signal.signal(signal.SIGINT, left)

    def _terminate(
        self, loop: asyncio.AbstractEventLoop, program: asyncio.Task[Any]
    ) -> None:
        """Cancel the program; the second time end it at once, as without a handler."""
        if not self.is_terminated:
            self.is_terminated = True
            from aiogpu.api.results.handle import session_of

            session = session_of(loop)
            if session is not None:
                session.announce_stop()
            program.cancel("SIGTERM")
            return
        loop.remove_signal_handler(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

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
