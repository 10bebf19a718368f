"""Whether a device may be given to new tasks: one rule, pure.

Asks nobody and waits for nothing; it is told what a driver said, and when.
"""

from __future__ import annotations

from typing import Final

from aiogpu.accelerators.base import Health, Sample

CALM: Final = 10.0
"""Seconds without a bad word after which a device is well again: an error is often
followed by the next, and a driver says what has to be done a moment after it."""
TOLD: Final = 4
"""Errors that a reason names; a sick device may make thousands."""


class DeviceHealth:
    """What is known of one device's health.

    A device becomes sick when its driver calls it lost, reports an error that makes
    it unfit, or says that something has to be done before it can be relied on.

    It is well again when all of this has been so for `CALM` seconds:

    1. It is not lost, and it answers when it is asked what is on it.
    2. There was no further error.
    3. The driver says that nothing has to be done. A driver that cannot tell (it is
       too old) is not believed to be content: a device that had errors under it is
       sick until it was lost, which is what a reset looks like from here, and answers
       again, or until the node ends. One that was only lost is well once it answers.

    Attributes:
        reason: why it is sick, for people; None while it is well.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._errors: list[str] = []
        self._action = ""
        self._is_lost = False
        self._bad_at = 0.0

    def __repr__(self) -> str:
        return f"<DeviceHealth {self.reason or 'well'}>"

    def note(self, sample: Sample, health: Health, now: float) -> bool:
        """Take in what was learnt; whether `reason` has changed.

        Args:
            sample: what is on the device.
            health: what its driver says since it was asked last.
            now: in seconds, by a clock that never goes back.
        """
        before = self.reason
        is_lost = sample.is_lost or health.is_lost
        if self._is_lost and not is_lost and health.action is None:
            # It has been reset: what was wrong before is over.
            self._errors.clear()
            self._action = ""
        self._is_lost = is_lost
        self._errors += [
            e for e in dict.fromkeys(health.errors) if e not in self._errors
        ]
        if health.action is not None:
            self._action = health.action
        if is_lost or health.errors or health.action:
            self.reason = self._wording()
            self._bad_at = now
        elif not self._is_content(sample, health):
            self._bad_at = now
        elif now >= self._bad_at + CALM:
            self.reason = None
            self._errors.clear()
        return self.reason != before

    def _is_content(self, sample: Sample, health: Health) -> bool:
        """Whether nothing is wrong any more, as far as one look can tell."""
        if sample.problem is not None:
            return False
        return health.action is not None or not (self._errors or self._action)

    def _wording(self) -> str:
        parts = ["the driver calls it lost"] if self._is_lost else []
        parts += self._errors[:TOLD]
        if len(self._errors) > TOLD:
            parts.append("other errors")
        if self._action:
            parts.append(f"the driver asks for this: {self._action}")
        return "; ".join(parts)
