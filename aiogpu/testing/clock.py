"""A clock that stands still until it is moved."""

from __future__ import annotations

from math import isfinite


class HandClock:
    """A clock for code that takes one, moved by the test alone.

    Calling it returns the time, like `time.monotonic`. It wakes nobody: event loops do
    not know of it.
    """

    __slots__ = ("_now",)

    def __init__(self, now: float = 0.0) -> None:
        """Begin at a time.

        Args:
            now: seconds.
        """
        self._now = float(now)

    def __repr__(self) -> str:
        return f"<HandClock at {self._now:g}s>"

    def __call__(self) -> float:
        """The time in seconds."""
        return self._now

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: how much; 0 or more.

        Raises:
            ValueError: that is not possible.
        """
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"a clock cannot be advanced by {seconds!r} s; name 0 or more seconds."
            )
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until a moment, exactly; one that has passed changes nothing.

        Args:
            moment: the time in seconds.
        """
        self._now = max(self._now, moment)
