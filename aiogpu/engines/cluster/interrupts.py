"""Interrupts in a worker of Ray's: one for each task, where it can do no harm.

Ray raises an interrupt at any moment of a task, and may raise several of them, so that
whatever would clean up after the first is cut short by the next. Here the first one
ends the task's code, as on other engines, and the rest are not heard. Code of ours that
must not be broken off is not, and no import either: an interrupt waits until it has
ended.

Ray interrupts by `interrupt_main`, which sends no signal: a call that blocks in the
kernel, `time.sleep` say, would not end by it. So a thread hears of it, by Python's
wakeup descriptor, and sends a true signal.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from _thread import get_ident, interrupt_main, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from aiogpu.worker.interrupts import imports

AGAIN: Final = 0.02
"""Seconds between two looks at whether an import has ended."""
LOOK: Final = signal.SIGRTMAX
"""Whose handler looks, in the main thread; nobody really sends it."""
WAKE: Final = signal.SIGURG
"""Sent to the main thread to end what blocks it; a process that forgets about it
ignores it. Ray's workers have SIGINT blocked."""
UNHEARD: Final = 0.25
"""Seconds in which a loop that turns has heard of a cancel."""
WAKES: Final = 50
"""Signals for one interrupt: the main thread may block a moment after the first."""


class Interrupts:
    """See above; one for each process.

    Attributes:
        has_come: whether the running task was interrupted.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._is_heard = False
        self._is_pending = False
        self._depth = 0
        self._wake: Callable[[], object] | None = None
        self._told: socket.socket | None = None
        self._is_forced = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The block runs a task's code, which an interrupt ends."""
        if not _is_main():
            yield
            return
        if signal.getsignal(signal.SIGINT) != self._on_interrupt:
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(WAKE, self._on_wake)
        self._listen()
        self.has_come = self._is_pending = False
        self._is_heard = True
        try:
            yield
        finally:
            self._is_heard = False
            self.forget()

    def _listen(self) -> None:
        """Have a thread of this process told of each signal that Python notes."""
        if self._told is None:
            heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            start_new_thread(self._relay, (heard, get_ident()))
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)

    def _relay(self, heard: socket.socket, main: int) -> None:
        while numbers := heard.recv(64):
            if signal.SIGINT not in numbers and LOOK not in numbers:
                continue
            for _ in range(WAKES):
                signal.pthread_kill(main, WAKE)
                is_taken = not self._is_heard or self.has_come or self._is_pending
                if is_taken or signal.SIGINT not in numbers:
                    break
                time.sleep(AGAIN)
            self._insist(main)

    def _insist(self, main: int) -> None:
        """End a coroutine that blocks its loop, which so cannot hear of a cancel."""
        until = time.monotonic() + UNHEARD
        while self._is_pending and self._wake is not None:
            if time.monotonic() > until:
                self._is_forced = True
                signal.pthread_kill(main, WAKE)
                return
            time.sleep(AGAIN)

    def _on_wake(self, _signal: int, frame: FrameType | None) -> None:
        # Without force, it only ends what blocks.
        is_forced, self._is_forced = self._is_forced, False
        if is_forced and not imports(frame) and self.take():
            raise KeyboardInterrupt

    def forget(self) -> None:
        """The code has ended that what was put off would have ended."""
        if _is_main():
            self._is_pending = False

    @contextmanager
    def put_off(self, wake: Callable[[], object] | None = None) -> Iterator[None]:
        """An interrupt that comes in the block is raised at its end.

        Or at the end of the outermost of such blocks, unless it is taken before. Of
        other threads than the main one nothing is put off: nobody interrupts them.

        Args:
            wake: called, by the signal's handler, when one was put off; None leaves
                that to the block around this one.
        """
        if not _is_main():
            yield
            return
        before = self._wake
        self._depth += 1
        self._wake = wake or before
        try:
            yield
        finally:
            self._wake = before
            self._depth -= 1
            if not self._depth and self.take():
                raise KeyboardInterrupt

    def is_due(self) -> bool:
        """Return whether one is raised as soon as the block ends that runs."""
        return self._is_pending and self._depth == 1 and _is_main()

    def take(self) -> bool:
        """Whether one was put off: whoever asks sees to the end of the task's code."""
        if not self._is_pending or not _is_main():
            return False
        self._is_pending = False
        self.has_come = True
        return True

    def interrupt(self, frame: FrameType | None) -> None:
        """End the code of the main thread, which asks: now, or when it may be ended.

        Args:
            frame: what it executes.
        """
        if self._depth:
            self._is_pending = True
            if self._wake is not None:
                self._wake()
        elif imports(frame):
            is_watched, self._is_pending = self._is_pending, True
            if not is_watched:
                signal.signal(LOOK, self._look)
                # `threading` takes a lock for it, which the import may hold.
                start_new_thread(self._watch, ())
        else:
            self._is_pending = False
            self.has_come = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while self._is_pending:
            time.sleep(AGAIN)
            interrupt_main(LOOK)

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_pending and not self._depth:
            self.interrupt(frame)

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_heard and not self.has_come:
            self.interrupt(frame)


def _is_main() -> bool:
    # `threading.current_thread` would make an object for each of Ray's own threads.
    return get_ident() == threading.main_thread().ident


interrupts: Final = Interrupts()
"""Those of this process."""
