"""What Ray has taken up of what it was sent: only that may be cancelled.

Ray 2.60 ends this process where a task is cancelled that was sent a moment ago and
whose arguments are still to come, as soon as these come (seen with Ray alone). It does
in turn what it was sent and what it is asked, so one answer says that it has taken up
all that was sent before.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from aiogpu.engines import ray

LIMIT: Final = 0.5
"""Seconds to wait for the answer, which takes less than a thousandth of that."""


class Uptake:
    """See above; for the calls of one event loop."""

    def __init__(self) -> None:
        self._sent = self._taken = 0
        self._marker: Any = None

    def __repr__(self) -> str:
        return f"<Uptake {self._taken} of {self._sent}>"

    def note(self) -> int:
        """A call is sent that waits for arguments; gives its place in the order."""
        self._sent += 1
        return self._sent

    def ensure(self, place: int) -> None:
        """Return when Ray has taken up the call of that place, 0 for any other call."""
        if place <= self._taken:
            return
        sent, answered = self._sent, threading.Event()
        if self._marker is None:
            self._marker = ray.keep(b"")
        ray.when_done(self._marker, lambda _: answered.set())
        answered.wait(LIMIT)
        self._taken = sent
