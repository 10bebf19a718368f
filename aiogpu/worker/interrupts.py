"""Stopping user code that runs in a worker's main thread.

A signal carries no task id, and it may arrive after the end of its task. So the driver
writes the task's id to a memory page that it shares with the worker; the signal only
makes the worker read the page. The handler raises once, inside the named task's user
code: never in a frame of the worker's own code, never while a message is being sent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import weakref
from _thread import get_ident
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from os.path import dirname
from sys import _getframe
from types import CodeType, FrameType
from typing import Final

from aiogpu.memory.control_page import ControlPage
from aiogpu.worker.private_hooks import IMPORT

_SIGINT: Final = int(signal.SIGINT)
_PACKAGE: Final = dirname(dirname(__file__))
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
        self._is_installed = False
        self._main = get_ident()

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
        self._is_installed = True
        signal.signal(signal.SIGINT, self._handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def restore(self) -> None:
        """Install the handler again if a task's code has replaced it.

        A handler that was never installed, as in a warm-up, is not installed here.
        """
        # `signal.getsignal` converts the result to an enum, which takes 100 times as
        # long.
        if _signal.getsignal(_SIGINT) is not self._handler and self._is_installed:
            signal.signal(signal.SIGINT, self._handler)

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
            self._shield.is_pending = False
            self._interrupt(frame or _getframe(1))


class Shield:
    """Context manager that defers interrupts; may be nested.

    Attributes:
        depth: number of entered blocks.
        is_pending: an interrupt was deferred.
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
        is_ours = above.f_code.co_filename.startswith(_PACKAGE)
        if above.f_code.co_name == "__del__":
            return is_ours
        above = above.f_back
    return False
