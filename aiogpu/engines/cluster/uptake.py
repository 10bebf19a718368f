"""When Ray has taken up what it was sent: only that may be cancelled.

Ray 2.60 ends this process where a task is cancelled that was sent a moment ago and
whose arguments are still to come, as soon as these come (seen with Ray alone). It does
in turn what it was sent and what it is asked, so one answer says that it has taken up
all that was sent before. The answer comes in Ray's own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from aiogpu.engines import ray

ATTEMPTS: Final = 100
"""Questions that are asked until one is not answered before it is asked to the end."""


class Uptake:
    """See above."""

    def __init__(self) -> None:
        self._marker: Any = None

    def __repr__(self) -> str:
        return f"<Uptake {self._marker}>"

    def _asked_for(self) -> Any:
        if self._marker is None:
            self._marker = ray.keep(b"")
        return self._marker

    def then(self, do: Callable[[], object]) -> None:
        """Have it done in Ray's thread, after what was sent before was taken up."""
        for _ in range(ATTEMPTS):
            if self._is_asked(do):
                return
        do()

    def _is_asked(self, do: Callable[[], object]) -> bool:
        """False if it was answered at once, in this thread, and is to be done yet."""
        here, asking = threading.get_ident(), [True]
        was_here = False

        def come(_: object) -> None:
            nonlocal was_here
            if asking and threading.get_ident() == here:
                was_here = True
            else:
                do()

        ray.when_done(self._asked_for(), come)
        asking.clear()
        return not was_here
