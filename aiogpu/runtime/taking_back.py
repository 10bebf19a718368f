"""Takes work back from workers that are busy, without their help.

The control page says what they have begun and what they may not begin any more; see
`memory.page`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.core.scheduler.workers import Workers
from aiogpu.runtime.call import Call
from aiogpu.runtime.orders import Orders
from aiogpu.wire.codec import LARGE

SETTLES: Final = 1e-3
"""Seconds after which both sides have seen what the other wrote to the page before:
a store leaves its processor within microseconds."""


class TakingBack:
    """Carries out `Revoke`, and answers with `Revoked`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Workers,
        calls: ShardedDict[Call],
        orders: Orders,
        feed: Feed,
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._calls = calls
        self._orders = orders
        self._feed = feed

    def revoke(self, worker: WorkerId, number: int, below: int) -> None:
        """See to it that a worker begins nothing more of what it was sent.

        Args:
            worker: whose work it is.
            number: of the revocation, for the answer.
            below: all that was sent has a lower number.
        """
        if self._is_large_or_late(worker):
            # It cannot have begun what has not reached it; it is no worse for that.
            tell = partial(self._tell, worker, number, is_left_alone=True)
        else:
            self._orders.revoke(worker, below)
            tell = partial(self._tell, worker, number)
        self._loop.call_later(SETTLES, tell)

    def _is_large_or_late(self, worker: WorkerId) -> bool:
        """Whether a worker may still be receiving the one task that it was sent."""
        record = self._workers.get(worker)
        if record is None or record.task is None or record.queue:
            return False
        is_large = len(self._calls[record.task.id].payload) >= LARGE
        return is_large or not self._orders.is_reached(worker)

    def _tell(self, worker: WorkerId, number: int, is_left_alone: bool = False) -> None:
        began = self.sent_as(worker, self._orders.begun(worker))
        record = self._workers.get(worker)
        if is_left_alone and record is not None and record.task is not None:
            began = record.task.id
        self._feed(Scheduler.revoked, worker, number, began)

    def sent_as(self, worker: WorkerId, number: int) -> TaskId | None:
        """The task that a worker was sent under a number, if it still has it."""
        record = self._workers.get(worker)
        if record is None or record.task is None:
            return None
        for sent in (record.task, *record.queue):
            call = self._calls[sent.id]
            # An actor's calls have higher numbers than it has itself.
            is_begun_actor = call.site.actor is not None and number > call.number
            if call.number == number or is_begun_actor:
                return sent.id
        return None
