"""Tells owners what has become of their tasks, and passes on what streams yield."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core import effects
from aiogpu.core.effects import NOTHING, Effect
from aiogpu.core.model.ids import OWN, TaskId, WorkerId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import (
    DeadlockError,
    InfeasibleError,
    NodeClosedError,
    PlacementRemovedError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.runtime.history import (
    CANCELLED,
    DIED,
    FAILED,
    FINISHED,
    Failure,
    History,
    Site,
)
from aiogpu.runtime.memory_monitor import MemoryGuard
from aiogpu.runtime.pending_tasks import (
    Call,
    overrun,
    pass_on,
    pass_on_report,
    settle,
    tell_fault,
    too_late,
)
from aiogpu.runtime.workers.death import Death, describe_death
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.wire.messages import Done, Failed, Items, Report

if TYPE_CHECKING:
    from aiogpu.runtime.actors.actor import ActorCall
    from aiogpu.runtime.devices.memory_guard import GpuMemoryGuard


_log: Final = logging.getLogger(__name__)


WarnOwner = Callable[[int, str], bool]
"""Has another program, by its number, log a warning; False if it cannot."""


LogFailure = Callable[[int, int, str, str], None]
"""Writes lines about a task of another program to the log: the program, the task, who
says it, and the lines."""


class Results:
    """Tells the receivers of one node's tasks how these have ended.

    Attributes:
        deaths: how workers have ended of which the core is being told.
        history: the last tasks that have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        calls: ShardedDict[Call],
        guard: MemoryGuard | None = None,
        gpu_guard: GpuMemoryGuard | None = None,
        warn_owner: WarnOwner | None = None,
        log_failure: LogFailure | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.deaths: dict[WorkerId, Death] = {}
        self._gpu_guard = gpu_guard
        self.history = History()
        self._warn_owner = warn_owner
        self._log_failure = log_failure
        # Whose owners were told, and whose code may not have stopped yet.
        self._told: dict[int, tuple[str, Failure]] = {}
        self._calls = calls
        self._guard = guard

    def settle(self, effect: effects.Settle) -> None:
        """Settle a task whose code has ended."""
        calls, task = self._calls, effect.task
        call = calls.young.pop(task, None) or calls.pop(task)
        receiver, answer = call.receiver, call.answer
        assert receiver is not None, call
        history, now, spec = self.history, self._scheduler.now, call.func.spec
        site = history.sites[call.worker]
        if type(answer) is Done:
            took = answer.took
            if spec.is_endless:
                took = round((now - site.began) * 1e6)
            # As `History.add` does, without a call: this is the usual end.
            site.began = now
            since, client = effect.since, call.client
            history.ring.append(
                (task, spec, client, site.place, since, now, took, FINISHED)
            )
            history.finished += 1
            try:
                receiver.settle(answer.payload)
            except Exception as error:  # noqa: BLE001 - it is told to who waits
                tell_fault(receiver, error)
        elif type(answer) is Failed:
            outcome = CANCELLED if answer.kind == STOPPED else FAILED
            failure = Failure.of(answer.type_name, answer.message, answer.traceback)
            history.add(
                *(task, spec, call.client, site, effect.since, now, outcome, failure)
            )
            if outcome is FAILED:
                self._log(call.client, task, spec.name, site, failure)
            settle(receiver, answer)

    def fail(self, effect: effects.Fail) -> None:
        """Settle a task that has no result, with the reason."""
        call, task, reason = self._calls[effect.task], effect.task, effect.reason
        spec = call.func.spec
        match effect.failure:
            case effects.Failure.EXPIRED:
                told = f"its timeout of {spec.timeout:g} s: {reason}"
                self._note(task, call, TaskTimeoutError, told)
                call.tell(too_late(spec, reason))
            case effects.Failure.OVERRUN:
                told = f"its run_timeout of {spec.run_timeout:g} s: {reason}"
                self._note(task, call, TaskTimeoutError, told)
                call.tell(overrun(spec.name, spec.run_timeout, reason))
            case effects.Failure.LOST:
                assert effect.worker is not None, effect
                death = self.deaths[effect.worker]
                error = self.cause_of(task, spec.name, effect.worker, death)
                if reason:
                    error.add_note(reason)
                self._note(task, call, type(error), str(error), DIED)
                call.tell(error)
            case effects.Failure.DEADLOCKED:
                self._note(task, call, DeadlockError, reason)
                call.tell_deadlock(reason)
            case effects.Failure.DISOWNED:
                told = "the task that had started it has ended or is being stopped"
                self._note(task, call, TaskCancelledError, told, CANCELLED)
                call.tell_disowned()
            case effects.Failure.ABANDONED:
                told = "the node was shut down"
                self._note(task, call, NodeClosedError, told, CANCELLED)
                call.tell_closed()
            case effects.Failure.EVICTED:
                from aiogpu.runtime.callers.leases import removed

                placement_group = spec.shape.request.placement_group
                assert placement_group is not None, effect
                self._note(task, call, PlacementRemovedError, reason)
                call.tell(removed(placement_group.name, spec.name, reason))
            case effects.Failure.MISFIT:
                from aiogpu.runtime.callers.leases import misfit

                self._note(task, call, InfeasibleError, reason)
                call.tell(misfit(spec, reason))

    def _note(
        self,
        task: int,
        call: Call,
        error: type[Exception],
        message: str,
        outcome: str = FAILED,
    ) -> None:
        """Keep what its owner is told now until its code has stopped."""
        if call.receiver is None:
            return
        failure = Failure.of(error.__name__, message)
        self._told[task] = outcome, failure
        if outcome != CANCELLED:
            site = self.history.sites[call.worker]
            self._log(call.client, task, call.func.spec.name, site, failure)

    def _log(
        self, client: int, task: int, name: str, site: Site, failure: Failure
    ) -> None:
        """Write a failure of another program's task to the log of tasks."""
        if client and self._log_failure is not None:
            error, message, traceback = failure
            text = traceback or (f"{error}: {message}" if message else error)
            pid = f" pid={site.place[1]}" if site.place else ""
            self._log_failure(client, task, f"{name}{pid}", text)

    def cause_of(self, task: int, name: str, worker: int, death: Death) -> Exception:
        """The error of what a worker has run that has died: a task, or an actor."""
        return (
            (self._gpu_guard and self._gpu_guard.explain(worker, task))
            or (self._guard and self._guard.explain(name, worker, death))
            or describe_death(name, death)
        )

    def warn(self, effect: effects.Warn) -> None:
        """Warn the program of a task that waits for resources held without end."""
        from aiogpu.observe.snapshot import stall_warning

        node = self._scheduler
        record = node.tasks.get(effect.task)
        if record is None:
            return  # its time was up at the same moment
        client = record.client
        reason = stall_warning(node, record, node.now)
        if self._warn_owner is None or not self._warn_owner(client, reason):
            _log.warning("! %s", reason)

    def forget(self, effect: effects.Forget) -> None:
        """Drop an ended task without waiters, with its arguments."""
        task, history, now = effect.task, self.history, self._scheduler.now
        call = self._calls.pop(task)
        spec, failure = call.func.spec, None
        # An actor that nobody has a handle to, and a lease that was held, are done.
        is_done = spec.is_endless and (effect.has_begun or not spec.is_lease)
        outcome = FINISHED if is_done else CANCELLED
        if task in self._told:
            outcome, failure = self._told.pop(task)
        site = history.sites[call.worker if effect.has_begun else 0]
        history.add(
            *(task, spec, call.client, site, effect.since, now, outcome, failure)
        )

    def note_stop(self, task: int, error: str, message: str) -> None:
        """Note why a task is about to be cancelled, or an actor to be killed."""
        if self._calls.get(TaskId(task)) is not None:
            self._told[task] = CANCELLED, Failure(error, message)

    def note_attempt(
        self,
        scheduler: Scheduler,
        now: float,
        task: TaskId,
        call: Call,
        outcome: str,
        began: float,
    ) -> Sequence[Effect]:
        """Note an attempt at a task, if another one follows; an event for `feed`."""
        record = scheduler.tasks.get(task)
        if record is not None:
            site = Site(self.history.sites[call.worker].place, began)
            whose = record.spec, record.client
            self.history.add(task, *whose, site, record.since, now, outcome)
        return NOTHING

    def note_call(self, actor: int, name: str, failure: Failure) -> None:
        """Remember the failure of a call of an actor."""
        call, now = self._calls.get(TaskId(actor)), self._scheduler.now
        client, site = OWN if call is None else call.client, Site(None)
        if call is not None:
            site = self.history.sites[call.worker]
        self.history.add_call(actor, name, client, now, failure)
        self._log(client, actor, name, site, failure)

    def client_of(self, task: int) -> int:
        """The program whose a task is that has not ended, or an actor."""
        call = self._calls.get(TaskId(task))
        return OWN if call is None else call.client

    def on_items(self, worker: LiveWorker, message: Items) -> None:
        """A worker's generator has yielded: a task's, or that of an actor's call."""
        if worker.actor is not None:
            call: Call | ActorCall | None = worker.actor.calls.get(message.task)
        else:
            call = self._calls.get(TaskId(message.task))
            if call is not None and call.worker != worker.id:
                return
        if call is not None:
            call.passed += len(message.payloads)
            pass_on(call.receiver, message.payloads)

    def on_report(self, worker: LiveWorker, message: Report) -> None:
        """A task has reported on itself, or a call of an actor."""
        if worker.actor is not None:
            call: Call | ActorCall | None = worker.actor.calls.get(message.task)
        else:
            call = self._calls.get(TaskId(message.task))
        if call is not None:
            pass_on_report(call.receiver, message.lost, message.payload)
