"""A clock that the test moves."""

from __future__ import annotations

from math import isfinite


class HandClock:
    """A clock for code that takes a clock as argument, moved by the test alone.

    Calling it returns the time, like `time.monotonic`. Event loops do not use it, so
    moving it wakes nothing.
    """

    __slots__ = ("_now",)

    def __init__(self, now: float = 0.0) -> None:
        """Set the initial time.

        Args:
            now: seconds.
        """
        self._now = float(now)

    def __repr__(self) -> str:
        return f"<HandClock at {self._now:g}s>"

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Args:
            seconds: the duration, 0 or more.

        Raises:
            ValueError: `seconds` is negative or not finite.
        """
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"a clock cannot be advanced by {seconds!r} s; give 0 or more seconds."
            )
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Move the clock forward to a moment; a past moment changes nothing.

        Args:
            moment: the time in seconds.
        """
        self._now = max(self._now, moment)
