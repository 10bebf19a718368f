"""The node's mind: events in, effects out, nothing else.

`handle(event, now)` brings every record up to date, then matches what waits with
what is free. `deadline()` says when it wants to be asked again although nothing
happened. Two things hold always: a lease ends only when the code that it was
taken for has stopped, and every submitted task ends in exactly one of `Settle`,
`Expire`, `Lose`, `Abandon` or, when its owner has cancelled it, `Forget` alone.
"""

from __future__ import annotations

from typing import assert_never

from aiogpu.core.effects import (
    Abandon,
    Assign,
    Effect,
    Expire,
    Forget,
    Interrupt,
    Kill,
    Lose,
    Retire,
    Settle,
    Spawn,
)
from aiogpu.core.events import (
    Cancelled,
    Closing,
    Event,
    Submitted,
    TaskFinished,
    TimePassed,
    WorkerGone,
    WorkerStarted,
)
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Lease, Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.placement import place
from aiogpu.core.policy import STARTS_ALLOWED, Patience, may_retry
from aiogpu.core.ready import ReadyQueue
from aiogpu.core.records import (
    TaskRecord,
    WorkerRecord,
    binding_of,
    move_task,
    move_worker,
)
from aiogpu.core.specs import TaskSpec
from aiogpu.core.timers import AlarmKind, Timers
from aiogpu.core.workers import Workers


class Scheduler:
    """Decides for one node. Holds its ledger, its queue and its records."""

    def __init__(self, ledger: Ledger, patience: Patience | None = None) -> None:
        self.ledger = ledger
        self.patience = patience or Patience()
        self.ready = ReadyQueue()
        self.workers = Workers()
        self.tasks: dict[TaskId, TaskRecord] = {}
        self.timers = Timers()
        self.is_closing = False
        self._most_idle = self.patience.idle_workers

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.tasks)} tasks, {self.workers!r}, {self.ledger!r}>"

    @property
    def is_closed(self) -> bool:
        """Whether a closing node has nothing left that runs."""
        return self.is_closing and not len(self.workers)

    def deadline(self) -> float | None:
        """When to send `TimePassed`, None for never."""
        return self.timers.earliest

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened; answer what is to be done, in order."""
        match event:
            case Submitted(task, spec):
                return self._on_submitted(task, spec, now)
            case TaskFinished(task, worker, retry):
                return self._on_finished(task, worker, retry, now)
            case Cancelled(task):
                return self._on_cancelled(task, now)
            case WorkerStarted(worker):
                return self._on_worker_started(worker, now)
            case WorkerGone(worker):
                return self._on_worker_gone(worker)
            case TimePassed():
                return self._on_time_passed(now)
            case Closing():
                return self._on_closing(now)
            case _:
                assert_never(event)

    def _on_submitted(self, task: TaskId, spec: TaskSpec, now: float) -> list[Effect]:
        if self.is_closing:
            return [Abandon(task), Forget(task)]
        record = TaskRecord(task, spec, spec.max_retries)
        self.tasks[task] = record
        if spec.timeout is not None:
            self.timers.set(now + spec.timeout, AlarmKind.EXPIRE, task)
        effects: list[Effect] = []
        # Where nobody waits, nobody is passed over: the queue may be left out.
        if not self.ready.by_shape:
            lease = self.ledger.take(spec.shape.request)
            if lease is not None:
                self._start(record, lease, effects)
                return effects
        self.ready.push(record)
        return self._place(effects)

    def _on_finished(
        self, task: TaskId, worker_id: WorkerId, retry: bool, now: float
    ) -> list[Effect]:
        worker = self.workers.get(worker_id)
        record = self.tasks.get(task)
        if worker is None or record is None or worker.task is not record:
            return []
        effects: list[Effect] = []
        was_wanted = record.state is TaskState.RUNNING
        record.worker = worker.task = None
        if was_wanted and retry and not self.is_closing and may_retry(record):
            self._wait_again(record)
        else:
            self._end(record)
            effects.append(Settle(task) if was_wanted else Forget(task))
        self._release(worker, record.spec, now)
        if self.ready.by_shape:
            self._place(effects)
        if self.workers.idle > self._most_idle:
            self._retire_idle(now, effects)
        return effects

    def _release(self, worker: WorkerRecord, spec: TaskSpec, now: float) -> None:
        if spec.max_calls:
            worker.calls[spec.function] = worker.calls.get(spec.function, 0) + 1
        if worker.is_last:
            self._let_end(worker, now)
            return
        assert worker.lease is not None, worker
        self.ledger.give_back(worker.lease)
        worker.lease = None
        self.workers.put_idle(worker)

    def _on_cancelled(self, task: TaskId, now: float) -> list[Effect]:
        record = self.tasks.get(task)
        if record is None:
            return []
        effects: list[Effect] = []
        self._withdraw(record, now, effects)
        return self._place(effects)

    def _withdraw(self, record: TaskRecord, now: float, effects: list[Effect]) -> None:
        """Stop a task in whichever state it is; nobody wants its result."""
        if record.state is TaskState.WAITING:
            self._end(record)
            self.ready.discard(record)
            effects.append(Forget(record.id))
        elif record.state is TaskState.STARTING:
            self._unclaim(record)
            self._end(record)
            effects.append(Forget(record.id))
        elif record.state is TaskState.RUNNING:
            move_task(record, TaskState.STOPPING)
            record.kill_at = now + self.patience.cancel_grace
            self._interrupt(record, now, effects)

    def _interrupt(self, record: TaskRecord, now: float, effects: list[Effect]) -> None:
        assert record.worker is not None, record
        effects.append(Interrupt(record.id, record.worker.id, record.interrupts))
        record.interrupts += 1
        again = min(now + self.patience.interrupt_every, record.kill_at)
        self.timers.set(again, AlarmKind.STOP, record.id)

    def _unclaim(self, record: TaskRecord) -> None:
        worker = record.worker
        assert worker is not None, record
        assert worker.lease is not None, worker
        self.ledger.give_back(worker.lease)
        worker.lease = worker.task = record.worker = None
        self.workers.put_unclaimed(worker)

    def _on_worker_started(self, worker_id: WorkerId, now: float) -> list[Effect]:
        worker = self.workers.get(worker_id)
        if worker is None or worker.state is not WorkerState.STARTING:
            return []
        if worker.task is not None and worker.lease is not None:
            worker.task.starts_failed = 0
            return [self._assign(worker.task, worker, worker.lease)]
        self.workers.put_idle(worker)
        effects = self._place([])
        self._retire_idle(now, effects)
        return effects

    def _on_worker_gone(self, worker_id: WorkerId) -> list[Effect]:
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        record = worker.task
        if worker.lease is not None:
            self.ledger.give_back(worker.lease)
        worker.lease = worker.task = None
        self.workers.remove(worker)
        effects: list[Effect] = []
        if record is not None:
            record.worker = None
            self._survive(record, worker_id, effects)
        return self._place(effects)

    def _survive(
        self, record: TaskRecord, worker: WorkerId, effects: list[Effect]
    ) -> None:
        """Decide about a task whose worker has gone."""
        if record.state is TaskState.STARTING:
            record.starts_failed += 1
            try_again = record.starts_failed < STARTS_ALLOWED
        else:
            try_again = record.state is TaskState.RUNNING and may_retry(record)
        if try_again:
            self._wait_again(record)
            return
        was_wanted = record.state is not TaskState.STOPPING
        self._end(record)
        effects.append(Lose(record.id, worker) if was_wanted else Forget(record.id))

    def _on_time_passed(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for alarm in self.timers.due(now):
            if alarm.kind is AlarmKind.END:
                worker = self.workers.get(WorkerId(alarm.subject))
                if worker is not None:
                    effects.append(Kill(worker.id))
                continue
            record = self.tasks.get(TaskId(alarm.subject))
            if record is None:
                continue
            if alarm.kind is AlarmKind.EXPIRE:
                if record.state is not TaskState.STOPPING:
                    effects.append(Expire(record.id))
                    self._withdraw(record, now, effects)
            elif now < record.kill_at:
                self._interrupt(record, now, effects)
            else:
                assert record.worker is not None, record
                # An answer may still be under way; the worker is doomed all the same.
                record.worker.is_last = True
                effects.append(Kill(record.worker.id))
        return self._place(effects)

    def _on_closing(self, now: float) -> list[Effect]:
        self.is_closing = True
        self._most_idle = 0
        effects: list[Effect] = []
        for record in list(self.tasks.values()):
            if record.state is not TaskState.STOPPING:
                effects.append(Abandon(record.id))
                self._withdraw(record, now, effects)
        self._retire_idle(now, effects)
        return effects

    def _retire_idle(self, now: float, effects: list[Effect]) -> None:
        """Retire the longest idle, after placing, so that work comes first."""
        while self.workers.idle > self._most_idle:
            worker = self.workers.pop_longest_idle()
            self._let_end(worker, now)
            effects.append(Retire(worker.id))

    def _let_end(self, worker: WorkerRecord, now: float) -> None:
        move_worker(worker, WorkerState.ENDING)
        self.timers.set(now + self.patience.exit_grace, AlarmKind.END, worker.id)

    def _wait_again(self, record: TaskRecord) -> None:
        move_task(record, TaskState.WAITING)
        self.ready.push_front(record)

    def _end(self, record: TaskRecord) -> None:
        move_task(record, TaskState.ENDED)
        del self.tasks[record.id]
        if record.spec.timeout is not None:
            self.timers.note_stale(AlarmKind.EXPIRE, self.tasks)

    def _place(self, effects: list[Effect]) -> list[Effect]:
        if self.ready.by_shape and not self.is_closing:
            for record, lease in place(self.ready, self.ledger):
                self._start(record, lease, effects)
        return effects

    def _start(self, record: TaskRecord, lease: Lease, effects: list[Effect]) -> None:
        """Find a worker for the task: an idle one that fits, or a new one."""
        spec = record.spec
        worker = None
        if spec.max_calls != 1:
            worker = self.workers.take_idle(binding_of(spec, lease))
        if worker is None:
            worker = self.workers.take_idle(None)
        if worker is not None:
            effects.append(self._assign(record, worker, lease))
            return
        worker = self.workers.take_unclaimed()
        if worker is None:
            worker = self.workers.create()
            effects.append(Spawn(worker.id))
        move_task(record, TaskState.STARTING)
        record.worker, worker.task, worker.lease = worker, record, lease

    def _assign(self, record: TaskRecord, worker: WorkerRecord, lease: Lease) -> Assign:
        spec = record.spec
        is_first = worker.binding is None
        if is_first:
            worker.binding = binding_of(spec, lease)
        if spec.max_calls:
            calls = worker.calls.get(spec.function, 0) + 1
            worker.is_last = calls >= spec.max_calls
        move_task(record, TaskState.RUNNING)
        move_worker(worker, WorkerState.BUSY)
        record.worker, worker.task, worker.lease = worker, record, lease
        return Assign(record.id, worker.id, lease, is_first, worker.is_last)

    def check(self) -> None:
        """Assert what must hold between any two events. Costs O(everything)."""
        self.ledger.check()
        self.workers.check()
        held = [worker.lease.id for worker in self.workers if worker.lease is not None]
        assert sorted(held) == sorted(self.ledger.leases), (held, self.ledger)
        waiting = [r for r in self.tasks.values() if r.state is TaskState.WAITING]
        assert sorted(r.id for r in self.ready) == sorted(r.id for r in waiting)
        assert len(self.ready) == len(waiting), self.ready
        for record in self.tasks.values():
            self._check_task(record)

    def _check_task(self, record: TaskRecord) -> None:
        assert record.state is not TaskState.ENDED, record
        worker = record.worker
        assert (worker is None) == (record.state is TaskState.WAITING), record
        if worker is not None:
            assert worker.task is record, record
            is_starting = record.state is TaskState.STARTING
            expected = WorkerState.STARTING if is_starting else WorkerState.BUSY
            assert worker.state is expected, (record, worker)
            assert worker.lease is not None, worker
            assert worker.lease.request == record.spec.shape.request, worker
