"""The process's state while a task runs: variables, facts, output, Ctrl-C.

A Ctrl-C at the keyboard is distinguished from a `KeyboardInterrupt` that a task raises:
Ctrl-C must end the program; the task's exception is its failure.
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

    A task may run inside another task that waits for it, so environments are restored
    in reverse order. The same environment may be applied several times.

    Args:
        environ: variables to set.
        facts: attributes of `client.current.current` to set.
    """

    def __init__(self, environ: Mapping[str, str], facts: Mapping[str, object]) -> None:
        self._environ: Final = dict(environ)
        self._facts: Final = dict(facts)
        self._before: list[tuple[dict[str, str | None], dict[str, object]]] = []

    def apply(self) -> None:
        """Save the current environment, and set this task's."""
        environ = {name: os.environ.get(name) for name in self._environ}
        facts = {name: getattr(current, name) for name in Context.__slots__}
        self._before.append((environ, facts))
        os.environ.update(self._environ)
        _set_facts(self._facts)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: apply the environment in the block."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the saved variables and facts."""
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
    """A file that drops all written bytes."""

    def write(self, data: Any, /) -> int:
        """Drop the data; return its size."""
        return len(data)


_nowhere: Final = io.TextIOWrapper(Nowhere())  # never closed


@contextmanager
def silence() -> Iterator[None]:
    """Context manager: drop the output of the block."""
    with redirect_stdout(_nowhere), redirect_stderr(_nowhere):
        yield


Handler = Callable[[int, FrameType | None], Any]


class CtrlC:
    """Records Ctrl-C, and passes it to the program's own handler."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, and call the program's handler."""
        self._has_come = True
        assert self._handler is not None, self
        self._handler(number, frame)

    def is_real(self, error: BaseException) -> bool:
        """Return whether an error of the last block comes from Ctrl-C."""
        return self._has_come and isinstance(error, KeyboardInterrupt)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: record Ctrl-C in the block, in the main thread only."""
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
            # `self == handler` if a debugger has installed it again after the block.
            return False
        self._handler = handler
        signal.signal(signal.SIGINT, self)
        return True

    def _end(self) -> None:
        handler, now = self._handler, signal.getsignal(signal.SIGINT)
        if now is self:  # a debugger may have installed its own handler
            signal.signal(signal.SIGINT, handler)
