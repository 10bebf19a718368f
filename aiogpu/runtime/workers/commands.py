"""Commands to workers: by message, and by the control page while they are busy.

A busy worker does not read messages. So the control page shows the driver which task a
worker has begun, and the worker which tasks it must not begin; see
`memory.control_page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.model.ids import TaskId
from aiogpu.memory.control_page import ALL, ControlPage
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.wire import messages as wire

SETTLES: Final = 1e-3
"""Seconds after which each side certainly sees what the other side wrote to the page: a
store leaves its processor within microseconds."""


class WorkerCommands:
    """Sends commands to the live workers of one node."""

    def __init__(self, workers: Mapping[int, LiveWorker], page: ControlPage) -> None:
        self._workers = workers
        self._page = page

    def assign(
        self,
        worker_id: int,
        task: int,
        call: Call,
        bind: wire.Bind | None,
        is_last: bool,
    ) -> None:
        """Send a task; `bind` comes first if the worker is fresh."""
        worker = self._workers[worker_id]
        func, peer = call.func, worker.peer
        if peer is None:
            return
        # The worker is idle, so the lines from its pipes belong to ended tasks.
        if worker.slot.output.last:
            worker.slot.output.last.clear()
        run = call.run(task, is_last, worker.borrow)
        if bind is None and func.id in worker.funcs:
            peer.send_one(run)
            return
        messages: list[wire.Message] = [] if bind is None else [bind]
        peer.send(*messages, *worker.introduce(func), run)

    def create(
        self, worker_id: int, call: Call, bind: wire.Bind | None, creation: wire.Create
    ) -> None:
        """Turn a worker into an actor."""
        worker = self._workers[worker_id]
        if worker.peer is not None:
            worker.slot.output.last.clear()
            first = [] if bind is None else [bind]
            payload = worker.borrow(creation.payload)
            kept = worker.borrow(creation.kept) if creation.kept else b""
            creation = creation._replace(payload=payload, kept=kept)
            worker.peer.send(*first, *worker.introduce(call.func), creation)

    def demand(self, worker_id: int, task: int, limit: int) -> None:
        """Let a task's generator yield `limit` items in all."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.peer is not None:
            worker.peer.post(wire.Demand(task, limit))

    def drop(self, worker: LiveWorker, call: int, count: int) -> None:
        """Tell an actor's process that the result of a call is no longer wanted."""
        if worker.peer is not None:
            worker.peer.send(wire.Drop(call))
            self._page.drop(worker.slot.index, count)

    def call_off(self, worker: LiveWorker) -> None:
        """Tell an actor to end, and to begin none of the calls that it was sent."""
        self._page.drop(worker.slot.index, ALL)
        if worker.peer is not None:
            worker.peer.send(wire.Leave())

    def expect_actor(self, worker: LiveWorker) -> None:
        """Reset the control page for a worker that becomes an actor.

        The page may still describe the slot's previous worker.
        """
        self._page.drop(worker.slot.index, 0)
        self._page.note_begun(worker.slot.index, 0)

    def send_ahead(
        self,
        worker_id: int,
        tasks: Sequence[TaskId],
        calls: Sequence[Call | None],
        number: int,
    ) -> None:
        """Send tasks to a busy worker, in one write.

        Args:
            worker_id: the worker.
            tasks: the tasks.
            calls: the call of each task.
            number: the number before the first task's number.
        """
        worker = self._workers[worker_id]
        messages: list[wire.Message] = []
        for task, call in zip(tasks, calls, strict=True):
            assert call is not None, task
            number += 1
            call.worker, call.number, call.answer = worker_id, number, None
            func, payload = call.func, call.payload
            if func.id not in worker.funcs:
                messages += worker.introduce(func)
            if func.window or type(payload) is not bytes:
                messages.append(call.run(task, False, worker.borrow))
            else:
                messages.append(wire.Run(task, func.id, payload, False, number))
        if worker.peer is not None:
            worker.peer.send(*messages)

    def is_reached(self, worker_id: int) -> bool:
        """Return True if everything sent to a worker has left this process."""
        worker = self._workers.get(worker_id)
        return worker is None or worker.peer is None or not worker.peer.unsent

    def revoke(self, worker_id: int, below: int) -> None:
        """Keep a worker from beginning work with a number lower than `below`."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._page.revoke(worker.slot.index, below)

    def begun(self, worker_id: int) -> int:
        """Return the number of the work that a worker began last, 0 for none."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else self._page.begun(worker.slot.index)

    def announce_stop(self) -> None:
        """Tell all tasks that the node stops."""
        self._page.announce_stop()

    def announce(self, worker_id: int, task: int) -> None:
        """Tell a task that its program stops."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._page.announce(worker.slot.index, task)

    def interrupt(
        self, worker_id: int, task: int, attempt: int, is_coroutine: bool
    ) -> None:
        """Ask a worker to stop a task, by signal; a coroutine first by message."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.status is not None:
            return
        slot = worker.slot
        self._page.cancel(slot.index, task)
        if self._page.acknowledged(slot.index) == task:
            return
        if is_coroutine and attempt == 0:
            if worker.peer is not None:
                worker.peer.send(wire.Cancel(task))
        elif slot.keeper is not None:
            slot.keeper.send(wire.Signal(worker_id))
