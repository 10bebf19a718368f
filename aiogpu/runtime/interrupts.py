"""Keeps Ctrl-C out of the code of nodes and of their event loops.

Python runs the handler of a signal between any two bytecodes of the main thread. A
`KeyboardInterrupt` that lands in a node's code, or in a transport that has just read
from a socket, loses a message or leaves a step half done.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

RETRY: Final = 0.01
"""Seconds after which a deferred interrupt is tried again: the loop may be held by code
of the program that only calls the node."""


INSISTS: Final = 100
"""Tries after which an interrupt lands in code of the program that node code calls."""


_LOOPS: Final = ("asyncio", "uvloop")

Handler = Callable[[int, FrameType | None], object]


def interrupted_code(frame: FrameType | None) -> tuple[bool, bool]:
    """Return whether a program's code is innermost, and whether node code called it."""
    is_programs = False
    while frame is not None:
        module: str = frame.f_globals.get("__name__") or ""
        package = module.partition(".")[0]
        if package in _LOOPS or module == "aiogpu.api.run":
            return is_programs, False
        if package == "aiogpu":
            return is_programs, True
        is_programs = is_programs or package not in sys.stdlib_module_names
        frame = frame.f_back
    return is_programs, False


def calling_code(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a program that called node code from a task."""
    is_called = False
    while frame is not None:
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if package in _LOOPS:
            return None
        if package == "aiogpu":
            is_called = True
        elif package not in sys.stdlib_module_names:
            return frame if is_called else None
        frame = frame.f_back
    return None


class DeferredInterrupts:
    """Wraps the handler of SIGINT while a node's loop is the main thread's.

    If the program's own code is interrupted, the handler runs at once; if the node or
    its loop is, it runs as the loop's next callback, or before the next bytecode of the
    program's function that called the node. Nothing is done for each call.

    `asyncio.Runner` sets its handler only if it finds Python's. So a runner whose loop
    is interrupted is found by its frame, whether it has set a handler or not.
    """

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[object, asyncio.AbstractEventLoop]
        self._loops = WeakKeyDictionary()
        self._wrapped: Handler | None = None
        self._is_due = False
        self._is_retried = False
        self._tries = 0
        self._traced: FrameType | None = None

    def add(self, engine: object, loop: asyncio.AbstractEventLoop) -> None:
        """Cover an engine whose node is open on this loop, in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._loops[engine] = loop
            self._install()

    def discard(self, engine: object) -> None:
        """Cover this engine no longer."""
        self._loops.pop(engine, None)
        if not self._loops:
            self._uninstall()

    def begin_cell(self) -> None:
        """Wrap the handler that IPython has set for a cell."""
        if self._loops:
            self._install()

    def end_cell(self) -> None:
        """Restore the handler, and forget an interrupt that came in the last moment.

        Raised later, it would end the loop of a Jupyter kernel, and so the kernel.
        """
        self._settle()
        self._uninstall()

    def _install(self) -> None:
        """Wrap Python's handler or that of `asyncio.Runner`.

        Other handlers stay: code that has set one may look for it later.
        """
        handler = signal.getsignal(signal.SIGINT)
        is_default = handler is signal.default_int_handler
        if is_default or _task_of_runner(handler) is not None:
            assert callable(handler), handler
            self._wrapped = handler
            signal.signal(signal.SIGINT, self._on_signal)

    def _uninstall(self) -> None:
        """Restore the handler, unless the program has set another one since."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) == self._on_signal:
            task = _task_of_runner(self._wrapped)
            # A runner removes its own handler at the end of `run`, and no other one.
            # It then runs the loop once more, to end the other tasks.
            is_running = task is not None and task is _running(sys._getframe())[1]
            handler = self._wrapped if is_running else signal.default_int_handler
            signal.signal(signal.SIGINT, handler)
            self._wrapped = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_retried, self._is_retried = self._is_retried, False
        if is_retried and not self._is_due:
            return  # delivered while the timer raised the signal
        loop = asyncio._get_running_loop()
        if loop is not None and loop in self._loops.values():
            is_programs, is_called = interrupted_code(frame)
            # uvloop has no frames, so those of its caller would be innermost.
            is_at_work = asyncio.current_task(loop) is not None
            is_patient = self._tries < INSISTS
            if not is_programs or not is_at_work or (is_called and is_patient):
                self._defer(loop)
                if is_at_work:
                    self._stop_at(calling_code(frame))
                return
        self._settle()
        _handler_of(frame)(number, frame)

    def _defer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tries = self._tries + 1 if self._is_due else 0
        if not self._is_due:
            self._is_due = True
            loop.call_soon_threadsafe(self._deliver)
        retry = threading.Timer(RETRY, self._retry, [threading.get_ident()])
        retry.daemon = True
        retry.start()

    def _retry(self, main_thread: int) -> None:
        if self._is_due and signal.getsignal(signal.SIGINT) == self._on_signal:
            self._is_retried = True
            signal.pthread_kill(main_thread, signal.SIGINT)

    def _stop_at(self, frame: FrameType | None) -> None:
        """Run the handler at the frame's next bytecode, unless a debugger traces.

        A program that submits in a loop is in its own code for some per cent of the
        time, so tries by time would not find it there.
        """
        if frame is not None and sys.gettrace() is None:
            self._traced = frame
            frame.f_trace_opcodes = True
            frame.f_trace = self._on_bytecode
            sys.settrace(_trace_no_call)

    def _on_bytecode(self, frame: FrameType, _event: str, _argument: object) -> None:
        if self._is_due:
            self._settle()
            _handler_of(frame)(signal.SIGINT, frame)

    def _settle(self) -> None:
        """Note that the interrupt is due no longer."""
        self._is_due = False
        frame, self._traced = self._traced, None
        if frame is not None:
            frame.f_trace, frame.f_trace_opcodes = None, False
            if sys.gettrace() is _trace_no_call:
                sys.settrace(None)

    def _deliver(self) -> None:
        if self._is_due:
            self._settle()
            frame = sys._getframe()
            _handler_of(frame)(signal.SIGINT, frame)


def _trace_no_call(_frame: FrameType, _event: str, _argument: object) -> None:
    """Trace no function that is called from now on."""


interrupts: Final = DeferredInterrupts()
"""This process's: it has one handler of SIGINT, and one main thread."""


def _task_of_runner(handler: object) -> asyncio.Task[object] | None:
    """Return the task of the `asyncio.Runner` that has set a handler of SIGINT."""
    function = getattr(handler, "func", None)
    runner = getattr(function, "__self__", None)
    if not isinstance(runner, asyncio.Runner):
        return None
    task = getattr(handler, "keywords", {}).get("main_task")
    return task if isinstance(task, asyncio.Task) else None


def _running(frame: FrameType | None) -> tuple[Any, Any]:
    """Return the innermost `asyncio.Runner` that runs, and its task, or two None."""
    while frame is not None:
        if frame.f_code is asyncio.Runner.run.__code__:
            return frame.f_locals.get("self"), frame.f_locals.get("task")
        frame = frame.f_back
    return None, None


def _handler_of(frame: FrameType | None) -> Handler:
    """Return the handler of the innermost `asyncio.Runner`, else Python's."""
    runner, task = _running(frame)
    if task is None:
        return signal.default_int_handler
    return partial(runner._on_sigint, main_task=task)
