"""Cancels of Ray's, done where they do no harm, and where no event loop waits for them.

Ray's core ends a process in which a task is cancelled in the moment between its reply
and its completion (seen in 2.60, a failed check "it != submissible_tasks_.end()"): the
core takes in replies in a thread of its own, and lets go of its lock in between. Who
cancels many short tasks meets that moment soon; in that very thread nobody does. So
cancels are done there, when it says that it has taken up what is cancelled (`uptake`).
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Final

from aiogpu.engines import ray
from aiogpu.engines.cluster.uptake import Uptake

LOST_AFTER: Final = 1.0
"""Seconds after which what was posted is taken for lost, and others are posted."""

_log: Final = logging.getLogger(__name__)


class Cancelling:
    """See above; one for each event loop, and for whichever threads."""

    def __init__(self) -> None:
        self._uptake = Uptake()
        self._lock = threading.Lock()
        self._asked: list[partial[None]] = []
        self._lost_at = 0.0

    def __repr__(self) -> str:
        return f"<Cancelling {len(self._asked)}>"

    def cancel(self, ref: ray.Ref, *, at_once: bool = False) -> None:
        """Have it cancelled soon; see `ray.cancel`."""
        one = partial(ray.cancel, ref, at_once=at_once)
        with self._lock:
            self._asked.append(one)
        self._post(time.monotonic())

    def _post(self, now: float) -> None:
        """Have done together what was asked for, unless something is on its way."""
        with self._lock:
            if now < self._lost_at or not self._asked:
                return
            asked, self._asked = self._asked, []
            self._lost_at = now + LOST_AFTER
        self._uptake.then(partial(self._do, asked))

    def _do(self, asked: list[partial[None]]) -> None:
        for one in asked:
            if not ray.is_connected():
                return  # to ask would have Ray start a cluster
            try:
                one()
            except Exception:  # noqa: BLE001 - one that fails must not lose the others
                _log.exception("! a cancel was not heard")
        with self._lock:
            self._lost_at = 0.0
        # What was sent since, Ray need not have taken up.
        self._post(time.monotonic())
