"""The node's mind: events in, effects out, nothing else.

`handle(event, now)` brings every record up to date, then matches what waits with what
is free; `deadline()` says when to ask again. Two things hold always: a lease ends only
when the code that it was taken for has stopped, and every task ends in exactly one of
`Settle`, `Expire`, `Lose`, `Deadlock`, `Disown`, `Abandon` or, when its owner has
cancelled it, `Forget` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from aiogpu.core import events
from aiogpu.core.alarms import ring
from aiogpu.core.closing import close
from aiogpu.core.departure import depart
from aiogpu.core.dispatch import (
    hand_over,
    refill_spares,
    release,
    reside,
    start,
    take_turn,
    welcome,
)
from aiogpu.core.effects import NOTHING, Abandon, Disown, Effect, Forget, Settle
from aiogpu.core.expecting import expect, supply
from aiogpu.core.family import adopt, detach, end_deadlocks, on_waits, stop
from aiogpu.core.finish import Failure, end_specially
from aiogpu.core.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.news import NEWS, take_in
from aiogpu.core.node import Node
from aiogpu.core.placement import note_stuck, place
from aiogpu.core.policy import Patience
from aiogpu.core.ready import Line
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.specs import TaskSpec
from aiogpu.core.stopping import (
    interrupt,
    make_way,
    retire_clean,
    retire_idle,
    withdraw,
)
from aiogpu.core.timers import AlarmKind
from aiogpu.core.watch import on_revoked, on_skipped, spoil

_RUNNING: Final = TaskState.RUNNING


class Scheduler(Node):
    """Decides for one node."""

    def __init__(self, ledger: Ledger, patience: Patience | None = None) -> None:
        super().__init__(ledger, patience)
        self._ways: Final[dict[type[events.Event], Callable[..., Sequence[Effect]]]] = {
            events.Submitted: self._on_submitted,
            events.Supplied: self._on_supplied,
            events.TaskFinished: self._on_finished,
            events.WorkerSpoilt: self._on_spoilt,
            events.TaskWaits: self._on_waits,
            events.Detached: self._on_detached,
            events.Resides: self._on_resides,
            events.TaskSkipped: self._on_skipped,
            events.Revoked: self._on_revoked,
            events.Cancelled: self._on_cancelled,
            events.WorkerStarted: self._on_worker_started,
            events.WorkerGone: self._on_worker_gone,
            events.Outdated: self._on_outdated,
            events.TimePassed: self._on_time_passed,
            events.Closing: self._on_closing,
            **dict.fromkeys(NEWS, self._on_news),
        }

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.tasks)} tasks, {self.workers!r}, {self.ledger!r}>"

    @property
    def is_closed(self) -> bool:
        """Whether a closing node has nothing left that runs or is to be told."""
        return self.is_closing and not len(self.workers) and not self.tasks

    def deadline(self) -> float | None:
        """When to send `TimePassed`, None for never."""
        return self.timers.earliest

    def handle(self, event: events.Event, now: float) -> Sequence[Effect]:
        """Take in what happened; answer what is to be done, in order."""
        if self.clients is not None:
            self.clients.now = now
        return self._ways[type(event)](event, now)

    def _on_submitted(self, e: events.Submitted, now: float) -> Sequence[Effect]:
        return self.submit(e.task, e.spec, now, e.parent, e.needs, e.client)

    def submit(  # noqa: PLR0917 - by position, each time
        self,
        task: TaskId,
        spec: TaskSpec,
        now: float,
        parent: TaskId | None = None,
        needs: tuple[TaskId, ...] | None = None,
        client: ClientId = OWN,
    ) -> Sequence[Effect]:
        """`Submitted`, for those who call it a million times."""
        if self.is_closing:
            return [Abandon(task), Forget(task)]
        record = TaskRecord(task, spec, spec.max_retries, now, client)
        if parent is not None:
            starter = self.tasks.get(parent)
            if starter is None or starter.state is TaskState.STOPPING:
                return [Disown(task), Forget(task)]
            adopt(starter, record)
        self.tasks[task] = record
        line: Line = spec.shape
        if self.clients is not None:
            self.clients.enter(record, now)
            line = record.client, spec.shape
        if spec.timeout is not None:
            self.timers.set(now + spec.timeout, AlarmKind.EXPIRE, task)
        if needs is not None or spec.is_grouped:
            return self._set_aside(record, needs, now)
        effects: list[Effect] = []
        bucket = self.ready.by_shape.get(line)
        # Where others of its shape wait, it must wait as well; where they do not,
        # nobody who waits could use what it takes.
        if bucket is None and (lease := self.take(record)):
            start(self, record, lease, now, effects)
            return effects
        if bucket is None:
            self.ready.push(record)
            note_stuck(self, record, now)
            return self._place(now, effects) if self.holds_back else NOTHING
        bucket.push(record)
        if self.reservation is None or bucket.head() is not record:
            return NOTHING
        return self._place(now, effects) if self.holds_back else NOTHING

    def _set_aside(
        self, record: TaskRecord, needs: tuple[TaskId, ...] | None, now: float
    ) -> Sequence[Effect]:
        if not record.spec.is_grouped:
            expect(self, record, needs or ())
            return NOTHING
        from aiogpu.core.gangs import enter  # few programs have any

        return self._place(now, enter(self, record, needs))

    def _on_supplied(self, event: events.Supplied, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        if supply(self, event.task):
            end_deadlocks(self, now, effects)
            self._place(now, effects)
        return effects

    def _on_finished(self, it: events.TaskFinished, now: float) -> Sequence[Effect]:
        return self.finish(it.task, it.worker, it.retry, it.took, now, it.ran_out)

    def finish(  # noqa: PLR0917 - by position, each time
        self,
        task: TaskId,
        worker_id: WorkerId,
        retry: bool,
        took: float,
        now: float,
        ran_out: bool = False,
    ) -> Sequence[Effect]:
        """`TaskFinished`, for those who call it a million times."""
        worker = self.workers.get(worker_id)
        record = None if worker is None else worker.task
        if worker is None or record is None or record.id != task:
            return NOTHING
        effects: list[Effect] = []
        spec, state = record.spec, record.state
        line: Line = spec.shape
        if self.clients is not None:
            self.clients.now = now
            line = record.client, spec.shape
        record.worker = worker.task = None
        if took:
            spec.pace.note(took)
        is_special = record.kin is not None or retry or state is not _RUNNING
        if ran_out or self.solitude.is_wanted:
            is_special = True
        if is_special:
            assert worker.lease is not None, worker
            if worker.lease.is_lent:
                self.ledger.resume(worker.lease)
            end_specially(self, record, Failure(retry, ran_out), now, effects)
        else:
            self.end(record)
            effects.append(Settle(task))
        if spec.max_calls:
            worker.calls[spec.function] = worker.calls.get(spec.function, 0) + 1
        self._go_on(worker, line, now, effects)
        if is_special:
            # It may wait again, and what it had started may have held something.
            self._place(now, effects)
        return effects

    def _go_on(
        self, worker: WorkerRecord, line: Line, now: float, effects: list[Effect]
    ) -> None:
        """Give a worker that has ended a task its next one, or let it rest."""
        if worker.queue:
            take_turn(self, worker, now, effects)
            return
        worker.is_revoking = False
        by_shape = self.ready.by_shape
        if by_shape and not self.is_closing:
            bucket = by_shape.get(line)
            if bucket is not None and hand_over(self, worker, bucket, effects, now):
                return
        release(self, worker, now, effects)
        idle, solitude = self.workers.idle, self.solitude
        if by_shape or idle > self.most_idle or solitude.is_wanted:
            self._place(now, effects)

    def _on_spoilt(self, event: events.WorkerSpoilt, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        effects: list[Effect] = []
        if worker is not None and worker.state is WorkerState.BUSY:
            spoil(self, worker, effects)
            self._place(now, effects)
        return effects

    def _on_waits(self, event: events.TaskWaits, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None:
            return NOTHING
        effects: list[Effect] = []
        on_waits(self, record, event, now, effects)
        return self._place(now, effects)

    def _on_detached(self, event: events.Detached, _: float) -> Sequence[Effect]:
        detach(self.tasks.get(event.task))
        return NOTHING

    def _on_resides(self, event: events.Resides, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None or record.state is not _RUNNING:
            return NOTHING
        reside(self, record)
        return self._place(now, [])

    def _on_skipped(self, event: events.TaskSkipped, now: float) -> Sequence[Effect]:
        worker, record = self.workers.get(event.worker), self.tasks.get(event.task)
        if worker is None or record is None:
            return NOTHING
        effects: list[Effect] = []
        on_skipped(self, worker, record, effects)
        return self._place(now, effects)

    def _on_revoked(self, event: events.Revoked, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None:
            return NOTHING
        effects: list[Effect] = []
        on_revoked(self, worker, event, now, effects)
        end_deadlocks(self, now, effects)
        record = worker.task
        if record and record.state is TaskState.STOPPING and record.stop is None:
            # It was cancelled in the queue, and has begun all the same.
            interrupt(self, record, now, effects)
        return self._place(now, effects)

    def _on_cancelled(self, event: events.Cancelled, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None:
            return NOTHING
        effects: list[Effect] = []
        is_alone = record.state is TaskState.WAITING and record.kin is None
        if is_alone and not self.holds_back and not record.spec.is_grouped:
            # It held nothing, and nobody waited for it.
            withdraw(self, record, now, effects)
            return effects
        stop(self, record, now, effects)
        return self._place(now, effects)

    def _on_worker_started(
        self, event: events.WorkerStarted, now: float
    ) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return NOTHING
        effects: list[Effect] = []
        had_outage = self.outages.pop(worker.environment, None) is not None
        welcome(self, worker, now, effects)
        if effects and not had_outage:
            return effects
        return self._place(now, effects)

    def _on_worker_gone(self, event: events.WorkerGone, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None or worker.state is WorkerState.SETTLING:
            return NOTHING
        effects: list[Effect] = []
        depart(self, worker, event, now, effects)
        return self._place(now, effects)

    def _on_news(self, event: events.Event, now: float) -> Sequence[Effect]:
        return self._place(now, take_in(self, event, now))

    def _on_outdated(self, event: events.Outdated, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        retire_clean(self, event.environment, now, effects)
        if self.is_closing:
            return effects
        if event.environment:
            # Its zygote may have made way for another's, to which it would do the same.
            self.spares.forget(event.environment)
            self.note_spares()
        refill_spares(self, effects)
        return effects

    def _on_time_passed(self, _: events.TimePassed, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        for alarm in self.timers.due(now):
            ring(self, alarm, now, effects)
        return self._place(now, effects)

    def _on_closing(self, event: events.Closing, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        close(self, event.at_once, now, effects)
        return effects

    def _place(self, now: float, effects: list[Effect]) -> list[Effect]:
        if self.solitude.is_wanted and not self.is_closing:
            alone = self.solitude.begin(self)
            if alone is not None:
                start(self, *alone, now, effects)
            make_way(self, now, effects)
        if self.ready.by_shape:
            if not self.is_closing:
                places = place if self.clients is None else self.clients.place
                for record, lease in places(self, now, effects):
                    start(self, record, lease, now, effects)
        else:
            self.reservation = None
        if self.workers.idle > self.most_idle:
            # After placing, so that work comes first.
            retire_idle(self, now, effects)
        if self.gangs and not self.is_closing:
            from aiogpu.core.gangs import tend

            if tend(self, now, effects):
                self._place(now, effects)
        return effects

    def check(self) -> None:
        """Assert what must hold between any two events. Costs O(everything)."""
        from aiogpu.core.audit import check

        check(self)
