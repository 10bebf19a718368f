"""The process's state while a task runs: variables, facts, output, Ctrl-C.

A Ctrl-C at the keyboard is told from a `KeyboardInterrupt` that a task raises: the one
is meant for the program and must end it; the other is the task's failure.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, Final

from aiogpu.client.current import Context, current


class TaskEnvironment:
    """One task's variables and facts, set while it runs.

    A task that another one waits for runs inside the other, so what was there before
    must be restored in reverse order. The same may be applied several times.

    Args:
        environ: variables to set.
        facts: attributes of `client.current.current` to set.
    """

    def __init__(self, environ: Mapping[str, str], facts: Mapping[str, object]) -> None:
        self._environ: Final = dict(environ)
        self._facts: Final = dict(facts)
        self._before: list[tuple[dict[str, str | None], dict[str, object]]] = []

    def apply(self) -> None:
        """Remember what there is, and set this task's."""
        environ = {name: os.environ.get(name) for name in self._environ}
        facts = {name: getattr(current, name) for name in Context.__slots__}
        self._before.append((environ, facts))
        os.environ.update(self._environ)
        _set_facts(self._facts)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply it for the block."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Set what there was before. Nothing else is touched."""
        environ, facts = self._before.pop()
        for name, value in environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _set_facts(facts)


def _set_facts(facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        setattr(current, name, value)


class Nowhere(io.BytesIO):
    """Takes all that is written and keeps nothing."""

    def write(self, data: Any, /) -> int:
        """Drop it; gives its size, as if it were written."""
        return len(data)


_nowhere: Final = io.TextIOWrapper(Nowhere())  # never closed


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing appear that is printed in the block."""
    with redirect_stdout(_nowhere), redirect_stderr(_nowhere):
        yield


Handler = Callable[[int, FrameType | None], Any]


class CtrlC:
    """Looks on while the program's own handler does what it does anyway."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal as the program would, and take note of it."""
        self._has_come = True
        assert self._handler is not None, self
        self._handler(number, frame)

    def is_real(self, error: BaseException) -> bool:
        """Return whether this error has ended the last block, and the user meant it."""
        return self._has_come and isinstance(error, KeyboardInterrupt)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look on during the block. Signals come to the main thread alone."""
        self._has_come = False
        is_watching = self._begin()
        try:
            yield
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
