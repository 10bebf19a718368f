"""Ray's interrupts, in a worker of Ray's: one for each task, where it can do no harm.

Ray raises an interrupt again and again until the task has ended, so that whatever
would clean up after the first is cut short by the next. Here the first one ends the
task's code, as on other engines, and the rest are not heard.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final


class Interrupts:
    """See above; one for each process.

    Attributes:
        has_come: whether the running task was interrupted.
        cancel: stops the coroutine that runs; None while plain code does.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.cancel: Callable[[], object] | None = None
        self._is_heard = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The block runs a task's code, which an interrupt ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if signal.getsignal(signal.SIGINT) != self._on_interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
        self.has_come, self._is_heard = False, True
        try:
            yield
        finally:
            self._is_heard = False

    def _on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._is_heard or self.has_come:
            return
        self.has_come = True
        if self.cancel is not None:
            self.cancel()
        else:
            raise KeyboardInterrupt


interrupts: Final = Interrupts()
"""Those of this process."""
