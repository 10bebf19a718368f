"""Running a program: `asyncio.run` on uvloop. No other module imports uvloop.

In IPython on a terminal the event loop stops between cells: IPython runs a cell's
coroutine by `run_until_complete`. Ctrl-C interrupts that call and leaves the
coroutine's asyncio task waiting, and with it the aiogpu task and its GPU. So this
module cancels the task of an interrupted cell. A Jupyter kernel does that itself.
IPython has a handler of Ctrl-C for each cell, which must not raise inside the node.
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
"""The name of IPython's coroutine function that runs a cell."""


CLEANUP_TIME: Final = 1.0
"""Seconds that an interrupted cell has for its `finally`, before the prompt."""


_watched: Final[list[object]] = []
"""The IPython shell of this process, once it is watched."""


def watch(loops: Iterable[asyncio.AbstractEventLoop]) -> None:
    """Cancel the tasks of interrupted cells, if this is an IPython shell.

    Args:
        loops: the loops that have a node, read after each cell.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or shell in _watched:
        return
    _watched.append(shell)
    # Late: a program outside of IPython imports this module before any engine.
    from aiogpu.runtime.interrupts import interrupts

    def before(_info: Any) -> None:
        interrupts.begin_cell()

    def after(result: Any) -> None:
        try:
            if isinstance(result.error_in_exec, KeyboardInterrupt):
                for loop in list(loops):
                    _cancel_cells(loop)
        finally:
            interrupts.end_cell()

    shell.events.register("pre_run_cell", before)
    shell.events.register("post_run_cell", after)


def _cancel_cells(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_running() or loop.is_closed():
        return  # the loop of a Jupyter kernel, which handles the interrupt itself
    cells = {
        task
        for task in asyncio.all_tasks(loop)
        if getattr(task.get_coro(), "__name__", "") == CELL
    }
    for task in cells:
        task.cancel()
    if cells:
        loop.run_until_complete(asyncio.wait(cells, timeout=CLEANUP_TIME))


T = TypeVar("T")


LOST_AFTER: Final = 0.1
"""Seconds after a second Ctrl-C. If the loop still runs then, uvloop lost it."""


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a program: `asyncio.run` on uvloop.

    The first Ctrl-C cancels `main`, and its `async with` blocks close in order; the
    second ends the program at once. SIGTERM, by which Slurm and Kubernetes end
    programs, also cancels `main`: tasks see `get_runtime_context().is_stopping`, have
    their `stop_grace`, are cancelled and have their `cancel_grace`; then the program
    exits with status 143 (128 + SIGTERM). If the program handles or ignores SIGTERM,
    `run` does not touch the signal.

    Args:
        main: the program's coroutine, `main()`.
        debug: asyncio's debug mode; None for the interpreter's setting.

    Raises:
        ValueError: `main` is not a coroutine.
        NoLoopError: an event loop is already running in this thread, as in a notebook.
        SystemExit: SIGTERM cancelled `main`.
    """
    if asyncio._get_running_loop() is not None:
        if asyncio.iscoroutine(main):
            main.close()
        raise NoLoopError(
            "aiogpu.run() cannot be called from a running event loop, as in a notebook "
            "or a server: write `await main()`."
        )
    argument: object = main
    if not asyncio.iscoroutine(argument):
        advice = "write `aiogpu.run(main())` with an `async def main()`."
        if isinstance(argument, FunctionType):
            advice = f"write `aiogpu.run({argument.__name__}())`."
        raise ValueError(f"aiogpu.run() takes a coroutine, not {argument!r}: {advice}")
    try:
        runner = _with_deferred_interrupt(partial(new_runner, debug))
    except BaseException:
        main.close()
        raise
    termination = _Termination()
    program = termination.handled(main)
    try:
        return runner.run(program)
    except RuntimeError:
        if runner.has_stopped:
            raise KeyboardInterrupt from None
        raise
    except asyncio.CancelledError:
        if termination.has_come:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if getcoroutinestate(program) != CORO_SUSPENDED:
            program.close()  # neither coroutine may have started
            main.close()
        runner.close()


def new_runner(debug: bool | None = None) -> _Runner:
    """Return a runner that makes an event loop of uvloop when it is first used."""
    import uvloop

    _open_standard_descriptors()
    # `with` would make the loop at once, and fail to close it inside another loop.
    return _Runner(debug=debug, loop_factory=uvloop.new_event_loop)


class _Runner(asyncio.Runner):  # type: ignore[misc] # final in typeshed alone
    """A runner whose loop ends at the second Ctrl-C.

    uvloop loses a second Ctrl-C that arrives in one of its own callbacks.

    Attributes:
        has_stopped: the loop was stopped because a second Ctrl-C was lost.
    """

    has_stopped = False
    _count = 0
    _is_over = False

    def close(self) -> None:
        """Close the loop; see `asyncio.Runner`."""
        self._is_over = True
        super().close()

    def _on_sigint(
        self, signum: int, frame: FrameType | None, main_task: asyncio.Task[Any]
    ) -> None:
        self._count += 1
        if self._count > 1:
            loop = self.get_loop()
            loop.call_soon_threadsafe(loop.call_later, LOST_AFTER, self._stop, loop)
        super()._on_sigint(signum, frame, main_task)  # type: ignore[misc]

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_over:
            self.has_stopped = True
            loop.stop()


def _with_deferred_interrupt(make: Callable[[], T]) -> T:
    """Call `make`, and defer Ctrl-C until it has returned.

    During an import, Ctrl-C may be raised as another error or be lost.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is not signal.default_int_handler:
        return make()
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        result = make()
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
    return result


class _Termination:
    """Handles SIGTERM.

    Attributes:
        has_come: the program was cancelled.
    """

    has_come = False

    async def handled(self, main: Coroutine[Any, Any, T]) -> T:
        """Await the program; handle the signal unless the program does."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            loop, program = asyncio.get_running_loop(), asyncio.current_task()
            assert program is not None, "the runner has made it"
            loop.add_signal_handler(signal.SIGTERM, self._terminate, loop, program)
        return await main

    def _terminate(
        self, loop: asyncio.AbstractEventLoop, program: asyncio.Task[Any]
    ) -> None:
        """Cancel the program; at the second SIGTERM end it, as without a handler."""
        if not self.has_come:
            self.has_come = True
            from aiogpu.api.results.handle import sessions

            session = sessions.get(loop)
            if session is not None:
                session.announce_stop()
            program.cancel("SIGTERM")
            return
        loop.remove_signal_handler(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def _open_standard_descriptors() -> None:
    """Open descriptors 0 to 2 if the program was started without them.

    libuv would get them for its own use, and aborts the process when it closes one.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
