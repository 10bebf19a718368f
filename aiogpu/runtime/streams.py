"""Streams on their way: items from workers to who waits, demand the other way."""

from __future__ import annotations

from aiogpu.core.model.ids import TaskId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.runtime.call import Call, pass_on
from aiogpu.runtime.orders import Orders
from aiogpu.runtime.slot import LiveWorker
from aiogpu.wire.messages import Items


class Streams:
    """The tasks and calls of one node whose generators yield."""

    def __init__(self, calls: ShardedDict[Call], orders: Orders) -> None:
        self._calls = calls
        self._orders = orders

    def on_items(self, worker: LiveWorker, message: Items) -> None:
        """A worker's generator has yielded."""
        if worker.actor is not None:
            asked = worker.actor.calls.get(message.task)
            if asked is not None:
                asked.passed += len(message.payloads)
                pass_on(asked.receiver, message.payloads)
            return
        call = self._calls.get(TaskId(message.task))
        if call is not None and call.worker == worker.id:
            call.passed += len(message.payloads)
            pass_on(call.receiver, message.payloads)

    def demand(self, task: int, limit: int) -> None:
        """A task may yield so many items in all, over all attempts at it."""
        call = self._calls.get(TaskId(task))
        if call is None:
            return
        call.limit = limit
        self._orders.demand(call.worker, task, limit)
