"""Signals in a worker: stopping user code, and the handlers that user code sets.

A signal carries no task id, and it may arrive after the end of its task. So the driver
writes the task's id to a memory page that it shares with the worker; the signal only
makes the worker read the page. The handler raises once, inside the named task's user
code: never in a frame of the worker's own code, never while a message is being sent.

The handlers of user code follow the same rule (`UserSignals`).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import faulthandler
import fcntl
import os
import signal
import sys
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from os.path import dirname
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, Final

from aiogpu.memory.control_page import ControlPage
from aiogpu.worker.private_hooks import IMPORT, hook_signals

_SIGINT: Final = int(signal.SIGINT)
STACK_SIGNAL: Final = int(signal.SIGURG)
"""Asks where the code of this process is. A process without a handler ignores it."""
STACK_FILE: Final = "aiogpu-stack"
"""The name of the anonymous file with the answer, which is read through `/proc`."""
STACK_END: Final = "end of the stack"
"""The last line of the answer."""
NATIVE_SIGNAL: Final = int(signal.SIGWINCH)
"""Asks for the calls of the main thread while the thread runs native code, which does
not let `STACK_SIGNAL` be handled. A process without a handler ignores it."""
NATIVE_FILE: Final = "aiogpu-native"
"""The name of the anonymous file with the answer to `NATIVE_SIGNAL`. The zygote makes
it, and all its forks append to it: who asks locks it, and asks one process only."""
PACKAGE: Final = dirname(dirname(__file__))
"""The directory of this library's code."""
_FINALIZES: Final = weakref.finalize.__call__.__code__
_WEAK: Final = {weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}


class Interrupts:
    """Interrupts of one worker: which task runs, and whether it can be interrupted now.

    Attributes:
        entered: the task whose user code runs, 0 for none. A function that sets it is
            passed to `spare`, so that no interrupt lands between two of its steps.
        soften: called before an interrupt is raised in a frame; returns True if it ends
            the task in another way, so that nothing is raised. None for no call.
        user: the handlers, timers and mask that user code sets.
    """

    def __init__(self, page: ControlPage, slot: int = 0) -> None:
        self.entered = 0
        self._page = page
        self._slot = slot
        self.soften: Callable[[FrameType], bool] | None = None
        self._shield = Shield(self.catch_up)
        # Called right after `entered` is set, so these frames are spared too.
        self._own = {self.is_cancelled.__code__, page.cancelled.__code__}
        self._handler = self._on_signal
        self._main = get_ident()
        self.user = UserSignals(self._shield, self._is_open_to_handlers)

    @property
    def is_shielded(self) -> bool:
        """True if an interrupt would be deferred."""
        return self._shield.depth > 0

    def spare(self, *own: CodeType) -> None:
        """Never interrupt frames that run this code."""
        self._own.update(own)

    def use_slot(self, slot: int) -> None:
        """Read the shared page at this slot from now on."""
        self._slot = slot

    def install(self) -> None:
        """Handle the signal from now on; it has no effect while no task runs."""
        _signal.signal(_SIGINT, self._handler)
        _signal.signal(STACK_SIGNAL, show_stack)
        _answer_native()
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, [_SIGINT])

    def is_cancelled(self, task: int) -> bool:
        """Return whether this task is to stop."""
        return self._page.cancelled(self._slot) == task

    def is_stopping(self, task: int) -> bool:
        """Return whether this task, its program or its node is to stop."""
        return self._page.is_stopping(self._slot, task)

    def begin(self, number: int) -> str:
        """Note that the request with this number begins; see `ControlPage.begin`."""
        return self._page.begin(self._slot, number)

    def note_begun(self, call: int) -> None:
        """Note that a call of an actor begins."""
        self._page.note_begun(self._slot, call)

    @property
    def drops(self) -> int:
        """The number of calls sent to this process that were dropped."""
        return self._page.dropped(self._slot)

    def has_acknowledged(self, task: int) -> bool:
        """Return whether this task has acknowledged its cancel."""
        return self._page.acknowledged(self._slot) == task

    def acknowledge(self, task: int) -> None:
        """Acknowledge the task's cancel: the driver sends no further signal."""
        self._page.acknowledge(self._slot, task)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._shield.depth:
            self._shield.is_pending = True
        else:
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        task = self.entered
        # The driver may repeat the signal just before it sees the acknowledgement: a
        # second interrupt must not cut the task's cleanup short.
        if task == 0 or not self.is_cancelled(task) or self.has_acknowledged(task):
            return
        if frame is None or self._is_open_to_it(frame):
            self._raise(task)

    def _is_open_to_it(self, frame: FrameType) -> bool:
        if frame.f_code in self._own or is_importing(frame) or _is_finalizing(frame):
            return False
        return self.soften is None or not self.soften(frame)

    def _is_open_to_handlers(self, frame: FrameType | None) -> bool:
        """Return whether a handler of user code may raise an exception in a frame."""
        if self.entered == 0 or self._shield.depth or frame is None:
            return False
        return frame.f_code not in self._own and not _is_finalizing(frame)

    def _raise(self, task: int) -> None:
        self.acknowledge(task)
        raise KeyboardInterrupt(f"task {task} was cancelled")

    def shielded(self) -> AbstractContextManager[None]:
        """Context manager: defer interrupts to the end of the outermost block.

        Main thread only.
        """
        return self._shield

    def shielded_if_open(self) -> AbstractContextManager[None]:
        """Return `shielded()` if this thread runs interruptible code."""
        if self.entered and get_ident() == self._main:
            return self._shield
        return nullcontext()

    def catch_up(self, frame: FrameType | None = None) -> None:
        """Raise a deferred interrupt; long blocks call it to be interruptible.

        Args:
            frame: where it would be raised; None for the caller's.
        """
        if self._shield.is_pending and get_ident() == self._main:
            frame = frame or _getframe(1)
            self.user.catch_up(frame)
            self._shield.is_pending = False
            self._interrupt(frame)


class Shield:
    """Context manager that defers interrupts; may be nested.

    Attributes:
        depth: number of entered blocks.
        is_pending: an interrupt or a handler was deferred.
    """

    def __init__(self, catch_up: Callable[[FrameType], None]) -> None:
        self.depth = 0
        self.is_pending = False
        self._catch_up = catch_up

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_error: object) -> None:
        self.depth -= 1
        if self.is_pending and not self.depth:
            self._catch_up(_getframe(1))


Handler = Callable[[int, FrameType | None], object]
"""A signal handler, as `signal.signal` takes it."""


class UserSignals:
    """The signal handlers, the timers and the signal mask that user code sets.

    A handler is called at any bytecode of the main thread. If it raised an exception in
    the worker's own code, a message would be lost or sent in part, and the process
    would end; if it printed while a message is sent, it would wait for itself. So a
    handler is called at once in user code only. Elsewhere it is deferred: to the end
    of a shielded block of the running call, where it may raise; or until the worker
    waits for its next message, where its exceptions are printed and dropped.

    Attributes:
        deferred: handlers to call, with a frame.
        is_active: this process is a worker; in other processes, among them forks of a
            worker, handlers are called at once.
        is_changed: user code has set something since the last `restore`.
        is_open: returns whether a handler may be called, and may raise, in a frame.
        wake: called after a handler was deferred; None for no call.
    """

    def __init__(
        self, shield: Shield, is_open: Callable[[FrameType | None], bool]
    ) -> None:
        self.deferred: list[Callable[[FrameType | None], object]] = []
        self.is_active = False
        self.is_changed = False
        self.is_open = is_open
        self.wake: Callable[[], object] | None = None
        self._shield = shield
        self._waiting: set[CodeType] = set()
        self._before: dict[int, Any] = {}
        self._mask: Iterable[int] | None = None
        self._has_timer = False
        self._main = get_ident()

    def install(self) -> None:
        """Take over the functions of `signal`, in the zygote for all workers."""
        hook_signals(
            signal=self._set_handler,
            getsignal=self._get_handler,
            pthread_sigmask=self._set_mask,
            setitimer=self._set_timer,
            alarm=self._set_alarm,
        )

    def wait_in(self, *codes: CodeType) -> None:
        """Call handlers at once where this code runs between two calls."""
        self._waiting.update(codes)

    def restore(self) -> None:
        """Restore timers, mask and handlers for the next task."""
        if self._has_timer:
            for timer in (
                signal.ITIMER_REAL,
                signal.ITIMER_VIRTUAL,
                signal.ITIMER_PROF,
            ):
                _signal.setitimer(timer, 0)
        if self._mask is not None:
            # Before the handlers: a blocked signal may be pending.
            _signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            # None: it was not installed by Python code.
            if handler is not None:
                _signal.signal(number, handler)
        self._before.clear()
        self._mask, self._has_timer, self.is_changed = None, False, False

    def _set_handler(self, number: int, handler: Any) -> Any:
        guards = self.is_active and callable(handler)
        before = _signal.signal(
            number, GuardedHandler(self, handler) if guards else handler
        )
        if self.is_active:
            self._before.setdefault(number, before)
            self.is_changed = True
        return _unguarded(before)

    def _get_handler(self, number: int) -> Any:
        return _unguarded(_signal.getsignal(number))

    def _set_mask(self, how: int, mask: Iterable[int]) -> Any:
        before = _signal.pthread_sigmask(how, mask)
        if get_ident() == self._main:
            self._mask = before if self._mask is None else self._mask
            self.is_changed = True
        return before

    def _set_timer(self, which: int, seconds: float, interval: float = 0.0) -> Any:
        self._has_timer = self.is_changed = True
        return _signal.setitimer(which, seconds, interval)

    def _set_alarm(self, seconds: int) -> Any:
        self._has_timer = self.is_changed = True
        return _signal.alarm(seconds)

    def handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call a handler now or later."""
        if not self.is_active or self.is_open(frame):
            handler(number, frame)
            return
        self.deferred.append(partial(handler, number))
        self._shield.is_pending = True
        if self.wake is not None:
            self.wake()
            return
        waits = frame is not None and frame.f_code in self._waiting
        if waits and not self._shield.depth:
            self.run_deferred()

    def catch_up(self, frame: FrameType) -> None:
        """Call the deferred handlers in a frame of the running call; they may raise."""
        while self.is_open(frame) and (handler := self._pop()) is not None:
            handler(frame)

    def _pop(self) -> Callable[[FrameType | None], object] | None:
        # Another signal may empty the list at any bytecode.
        with suppress(IndexError):
            return self.deferred.pop(0)
        return None

    def run_deferred(self) -> None:
        """Call the deferred handlers between two calls."""
        while (handler := self._pop()) is not None:
            try:
                handler(None)
            except BaseException as error:  # noqa: BLE001 - no call can have it
                trace = error.__traceback__
                # Without this frame.
                report_dropped(error.with_traceback(trace and trace.tb_next))


class GuardedHandler:
    """A handler that user code has set, as Python calls it."""

    __slots__ = ("_signals", "handler")

    def __init__(self, signals: UserSignals, handler: Handler) -> None:
        self.handler = handler
        self._signals = signals

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call the handler now or later."""
        self._signals.handle(self.handler, number, frame)


def _unguarded(handler: Any) -> Any:
    return handler.handler if type(handler) is GuardedHandler else handler


def _answer_native() -> None:
    """Handle `NATIVE_SIGNAL` in C.

    Only the thread that gets the signal is shown: the frames of other threads may
    change while they are read.
    """
    if not _native_answers:
        answers = os.memfd_create(NATIVE_FILE)
        fcntl.fcntl(answers, fcntl.F_SETFL, os.O_APPEND)
        _native_answers.append(answers)
    faulthandler.register(NATIVE_SIGNAL, _native_answers[0], all_threads=False)


_native_answers: list[int] = []
"""The descriptor of the file for all answers from C."""


_answers: list[int] = []


def show_stack(_number: int, frame: FrameType | None) -> None:
    """Write the stacks of all threads and coroutines into an anonymous file.

    It may run between any two bytecodes, so it imports nothing, sends no message and
    raises nothing; the command that asks adds the lines of source.
    """
    try:
        lines = ["thread MainThread", *_calls_of(frame)]
        # `threading.enumerate` would wait for a lock that this thread may hold.
        threads = dict(getattr(sys.modules.get("threading"), "_active", {}))
        main = get_ident()
        for thread, top in sys._current_frames().items():
            if thread != main:
                name = getattr(threads.get(thread), "name", thread)
                lines += [f"thread {name}", *_calls_of(top)]
        lines += _coroutines()
        text = "\n".join([*lines, STACK_END, ""])
        new = os.memfd_create(STACK_FILE)
        os.write(new, text.encode("utf-8", "backslashreplace"))
        while _answers:
            os.close(_answers.pop())
        _answers.append(new)
    except (OSError, RuntimeError) as error:
        # Too many open files, or a table that another thread is changing.
        report_dropped(error)


def _calls_of(frame: FrameType | None) -> list[str]:
    """Return a line for each call of user code, the outermost first."""
    calls, inner, has_ours = list[str](), list[str](), False
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            has_ours, inner = True, [*calls]  # what follows has started the worker
        else:
            calls.append(_line_of(frame))
        frame = frame.f_back
    return (inner if has_ours else calls)[::-1]


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"


def _coroutines() -> list[str]:
    """Return lines about the tasks of the running loop that await something."""
    asyncio: Any = sys.modules.get("asyncio")
    if not hasattr(asyncio, "all_tasks"):
        return []  # it was not imported, or not to its end
    loop = asyncio._get_running_loop()
    if loop is None:
        return []
    lines = []
    for task in asyncio.all_tasks(loop):
        coroutine, calls = task.get_coro(), list[str]()
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", getattr(coroutine, "gi_frame", None))
            if frame is None:
                break
            if not frame.f_code.co_filename.startswith(PACKAGE):
                calls.append(_line_of(frame))
            coroutine = getattr(coroutine, "cr_await", None)
        if calls:
            lines += [f"coroutine {task.get_name()}", *calls]
    return lines


def report_dropped(error: BaseException) -> None:
    """Print an exception that was raised between two calls, and go on.

    To the descriptor: user code may have replaced `sys.stderr`.
    """
    # Imported late: most workers do not need it.
    from traceback import format_exception

    text = "aiogpu: an exception between two calls of this worker was dropped:\n"
    text += "".join(format_exception(error))
    with suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


def is_importing(frame: FrameType | None) -> bool:
    """Return whether an import runs, which must not be interrupted.

    An interrupted import leaves parts behind, and the module cannot be imported in this
    process again, although the worker goes on. The driver sends the signal again.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return True
        frame = frame.f_back
    return False


def _is_finalizing(frame: FrameType) -> bool:
    """Return whether this library's code runs in a finalizer.

    An exception in a finalizer is printed and dropped. The cancel would be lost, and so
    would the report of the release, for which the driver waits. The driver sends the
    signal again.
    """
    if frame.f_code.co_filename in _WEAK:
        return frame.f_code is not _FINALIZES
    is_ours = False
    above: FrameType | None = frame
    while above is not None:
        if above.f_code is _FINALIZES:
            return is_ours
        is_ours = above.f_code.co_filename.startswith(PACKAGE)
        if above.f_code.co_name == "__del__":
            return is_ours
        above = above.f_back
    return False
