"""Cancels of Ray's, done where they cannot meet the end of what they cancel.

Ray's core ends a process in which a task is cancelled in the moment between its reply
and its completion (seen in 2.60, a failed check "it != submissible_tasks_.end()"): the
core takes in replies in a thread of its own, and lets go of its lock in between. Who
cancels many short tasks meets that moment soon; in that very thread nobody does. Ray
calls back there when an object has come, so cancels wait for one that is on its way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial
from typing import Final

from aiogpu.engines import ray

ATTEMPTS: Final = 100
"""Objects that are made until one has not come before it is asked for."""
LOST_AFTER: Final = 1.0
"""Seconds after which Ray calls back no more: this process has left the cluster."""

_log: Final = logging.getLogger(__name__)


class Cancelling:
    """See above; one for each process."""

    def __init__(self) -> None:
        self._waiting: deque[partial[None]] = deque()
        self._posted_at: float | None = None

    def __repr__(self) -> str:
        return f"<Cancelling {len(self._waiting)}>"

    def cancel(self, ref: ray.Ref, *, at_once: bool = False) -> None:
        """Have it cancelled soon; see `ray.cancel`."""
        cancel = partial(ray.cancel, ref, at_once=at_once)
        if ray.is_far():
            cancel()
            return
        self._waiting.append(cancel)
        posted, now = self._posted_at, time.monotonic()
        if posted is not None and now < posted + LOST_AFTER:
            return
        self._posted_at = now
        here = threading.get_ident()
        for _ in range(ATTEMPTS):
            if self._post(here):
                return
        self._do_all()

    def _post(self, here: int) -> bool:
        """Have all of it done in Ray's thread; False if that was this one."""
        was_here = []

        def come(_: object) -> None:
            if threading.get_ident() == here:
                was_here.append(True)
            else:
                self._do_all()

        ray.when_done(ray.keep(None), come)
        return not was_here

    def _do_all(self) -> None:
        self._posted_at = None
        while self._waiting:
            try:
                self._waiting.popleft()()
            except Exception:  # noqa: BLE001 - one that fails must not lose the others
                _log.exception("! a cancel was not heard")


cancelling: Final = Cancelling()
"""Those of this process."""
