"""Stopping user code that runs in a worker's main thread.

A signal carries no task id, and it may arrive when its task is over. So the cancel
names its task in a word of a page that driver and worker share; the signal only
says "look". The handler raises once, inside the named task's user code and nowhere
else: never in a frame of the worker's own, never while a frame is being sent.
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
"""Where all code of this library is."""
_FINALIZES: Final = weakref.finalize.__call__.__code__
_WEAK: Final = {weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}


class Interrupts:
    """One worker's side: where it is, and whether it may be interrupted now.

    Attributes:
        entered: the task whose user code runs, 0 outside of it. Whoever sets it
            lists his code object in `own`, so that no interrupt lands between
            two steps of his.
        soften: called before an interrupt is raised in a frame; True if it ends the
            task in another way, so that nothing is raised. None for no such call.
    """

    def __init__(self, page: ControlPage, slot: int = 0) -> None:
        self.entered = 0
        self._page = page
        self._slot = slot
        self.soften: Callable[[FrameType], bool] | None = None
        self._shield = Shield(self.catch_up)
        # Whoever has set `entered` may ask at once, in these frames.
        self._own = {self.is_asked.__code__, page.asked.__code__}
        self._handler = self._on_signal
        self._is_installed = False
        self._main = get_ident()

    @property
    def is_shielded(self) -> bool:
        """True if an interrupt would be put off."""
        return self._shield.depth > 0

    def spare(self, *own: CodeType) -> None:
        """Never interrupt frames that run this code."""
        self._own.update(own)

    def attend(self, slot: int) -> None:
        """Look at the words of this slot."""
        self._slot = slot

    def install(self) -> None:
        """Handle the signal from now on; it means nothing where no task runs."""
        self._is_installed = True
        signal.signal(signal.SIGINT, self._handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def restore(self) -> None:
        """Handle the signal again, if a task's code has seen to it otherwise.

        Where it was not installed, in a rehearsal, another's handler stays.
        """
        # `signal.getsignal` would make an enumeration of it, a hundred times dearer.
        if _signal.getsignal(_SIGINT) is not self._handler and self._is_installed:
            signal.signal(signal.SIGINT, self._handler)

    def is_asked(self, task: int) -> bool:
        """Return whether this task is to stop."""
        return self._page.asked(self._slot) == task

    def is_stopping(self, task: int) -> bool:
        """Return whether this task, its program or its node is to stop."""
        return self._page.is_stopping(self._slot, task)

    def begin(self, number: int) -> str:
        """Say that what was sent under that number begins; see `ControlPage.begin`."""
        return self._page.begin(self._slot, number)

    def note_begun(self, call: int) -> None:
        """Say that a call of an actor begins."""
        self._page.note_begun(self._slot, call)

    @property
    def drops(self) -> int:
        """Return how many calls sent to this process were dropped."""
        return self._page.dropped(self._slot)

    def has_heard(self, task: int) -> bool:
        """Return whether this task has acknowledged its cancel."""
        return self._page.heard(self._slot) == task

    def hear(self, task: int) -> None:
        """Tell the driver that the task knows; it sends no further signal."""
        self._page.hear(self._slot, task)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._shield.depth:
            self._shield.is_pending = True
        else:
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        task = self.entered
        # The driver may have sent it again just before it saw that the first was heard:
        # whatever ends a task's code is not to be cut short.
        if task == 0 or not self.is_asked(task) or self.has_heard(task):
            return
        if frame is None or self._is_open_to_it(frame):
            self._raise(task)

    def _is_open_to_it(self, frame: FrameType) -> bool:
        if frame.f_code in self._own or imports(frame) or _lets_go(frame):
            return False
        return self.soften is None or not self.soften(frame)

    def _raise(self, task: int) -> None:
        self.hear(task)
        raise KeyboardInterrupt(f"task {task} was cancelled")

    def shielded(self) -> AbstractContextManager[None]:
        """Put off an interrupt until the end of the outermost such block.

        Main thread only.
        """
        return self._shield

    def if_open(self) -> AbstractContextManager[None]:
        """`shielded`, where this thread runs what may be interrupted."""
        if self.entered and get_ident() == self._main:
            return self._shield
        return nullcontext()

    def catch_up(self, frame: FrameType | None = None) -> None:
        """Raise what a shield has put off; under it too, where that goes on for long.

        Args:
            frame: where it would be raised; None for the caller's.
        """
        if self._shield.is_pending and get_ident() == self._main:
            self._shield.is_pending = False
            self._interrupt(frame or _getframe(1))


class Shield:
    """Puts off interrupts while a block of it runs; they may be nested.

    Attributes:
        depth: how many blocks are entered.
        is_pending: whether an interrupt was put off.
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


def imports(frame: FrameType | None) -> bool:
    """Return whether an import is under way. The driver will ask again.

    One that is broken off leaves parts behind, and the module cannot be imported in
    this process any more; but the worker goes on.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return True
        frame = frame.f_back
    return False


def _lets_go(frame: FrameType) -> bool:
    """Return whether this library releases an object. The driver will ask again.

    An exception in a finalizer is printed and dropped. Then the cancel is lost, and so
    is the report of the release, for which the driver would wait.
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
