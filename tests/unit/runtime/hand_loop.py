"""A loop whose clock a test moves, with timers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiogpu.runtime.devices.probe_thread import DeviceThread, Key, Look


class Timer:
    """One call to come."""

    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self.when, self.call = when, call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """Timers in order of their time; nothing else happens."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> None:
        """Nobody waits here."""

    def call_at(self, when: float, call: Callable[..., object], *args: object) -> Timer:
        timer = Timer(when, lambda: call(*args))
        self._timers.append(timer)
        return timer

    def call_later(self, pause: float, *call: Any) -> Timer:
        return self.call_at(self.now + pause, *call)

    @property
    def due(self) -> float | None:
        """When the next call comes, None if none does."""
        self._timers = [each for each in self._timers if not each.is_cancelled]
        return min((each.when for each in self._timers), default=None)

    def step(self) -> float:
        """Go to the next call, and make it; gives how long that was."""
        due = self.due
        assert due is not None
        assert due >= self.now
        before, self.now = self.now, due
        timer = next(each for each in self._timers if each.when == due)
        self._timers.remove(timer)
        timer.call()
        return due - before


class PromptThread(DeviceThread):
    """Looks at devices at once, in the test's own thread."""

    is_alive = True

    def look(
        self,
        keys: Sequence[Key],
        then: Callable[[Look], None],
        *,
        is_checked: bool = False,
    ) -> None:
        then(self._look(keys, is_checked))
