"""The last failures of a node: who has failed, by what, and when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiogpu.core.failure_status import FailureStatus

KEPT: Final = 100
"""Failures that a node remembers."""
LONGEST: Final = 200
"""Characters of a message that are kept."""


class Failures:
    """The last `KEPT` of them."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int, str, str, str, int]] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<Failures {len(self._noted)}>"

    def note(  # noqa: PLR0917 - all that is kept of one
        self, now: float, task: int, name: str, error: str, message: str, client: int
    ) -> None:
        """Remember one; the one noted first is forgotten for it."""
        first = message.strip().partition("\n")[0][:LONGEST].rstrip()
        self._noted.append((now, task, name, error, first, client))

    def at(self, now: float) -> tuple[FailureStatus, ...]:
        """Those that are remembered, the latest first."""
        from aiogpu.core.failure_status import FailureStatus  # who looks, waits

        return tuple(
            FailureStatus(task, name, error, message, max(now - since, 0.0), client)
            for since, task, name, error, message, client in reversed(self._noted)
        )
