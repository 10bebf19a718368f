"""Tells a Ctrl-C at the keyboard from a `KeyboardInterrupt` that a task raises.

The one is meant for the program and must end it; the other is the task's failure.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class CtrlC:
    """Looks on while the program's own handler does what it does anyway."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._has_come = False
        self._real: KeyboardInterrupt | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal as the program would, and take note of it."""
        self._has_come = True
        assert self._handler is not None, self
        self._handler(number, frame)

    def is_real(self, error: BaseException) -> bool:
        """Return whether the last block ended by this error, and the user meant it."""
        return error is self._real

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look on during the block. Signals come to the main thread alone."""
        self._has_come = False
        self._real = None
        is_watching = self._begin()
        try:
            yield
        except KeyboardInterrupt as error:
            if self._has_come:
                self._real = error
            raise
        finally:
            if is_watching:
                self._end()

    def _begin(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or self == handler:
            # The latter where a debugger has put it back after the block.
            return False
        self._handler = handler
        signal.signal(signal.SIGINT, self)
        return True

    def _end(self) -> None:
        handler, now = self._handler, signal.getsignal(signal.SIGINT)
        if now is self:  # a debugger may have put its own there meanwhile
            signal.signal(signal.SIGINT, handler)
