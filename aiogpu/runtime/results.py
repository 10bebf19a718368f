"""Settles the receivers of tasks, and passes on the items of streams."""

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
from aiogpu.runtime.actors.actor import killed_for_good
from aiogpu.runtime.history import (
    CANCELLED,
    DIED,
    FAILED,
    FINISHED,
    FailureReason,
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
    settle_with_fault,
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
"""Sends a warning to a program, by number; returns False if the program is gone."""


LogFailure = Callable[[int, int, str, str], None]
"""Writes lines about a task of another program to the log. The arguments: the program,
the task, the prefix of the lines, and the lines."""


class ResultDelivery:
    """Settles the receivers of one node's tasks.

    Attributes:
        deaths: the deaths that the core is being notified of, by worker.
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
        # Outcomes of tasks that are settled, but whose code may still run.
        self._early_outcomes: dict[int, tuple[str, FailureReason]] = {}
        self._calls = calls
        self._guard = guard

    def settle(self, effect: effects.Settle) -> None:
        """Settle a task whose code has ended."""
        calls, task = self._calls, effect.task
        young = calls.young
        call = young[task] if task in young else calls[task]
        receiver, answer = call.receiver, call.answer
        assert receiver is not None, call
        history, now, spec = self.history, self._scheduler.now, call.func.spec
        site = history.sites[call.worker]
        if type(answer) is Done:
            took = answer.took
            if spec.is_endless:
                took = round((now - site.began) * 1e6)
            # `History.add`, inlined: this is the usual end of a task.
            site.began = now
            history.ring.append(
                (task, spec, call.client, site.place, effect.since, now, took, FINISHED)
            )
            history.finished += 1
            try:
                receiver.settle(answer.payload)
            except Exception as error:  # noqa: BLE001 - passed to the receiver
                settle_with_fault(receiver, error)
        elif type(answer) is Failed:
            outcome = CANCELLED if answer.kind == STOPPED else FAILED
            failure = FailureReason.of(
                answer.type_name, answer.message, answer.traceback
            )
            history.add(
                task, spec, call.client, site, effect.since, now, outcome, failure
            )
            if outcome is FAILED:
                self._log(call.client, task, spec.name, site, failure)
            settle(receiver, answer)
        # Last: if an exception cuts this short, the call is failed with its node.
        young.pop(task, None) or calls.pop(task)

    def fail(self, effect: effects.Fail) -> None:
        """Settle a task without a result, with the reason."""
        call, task, reason = self._calls[effect.task], effect.task, effect.reason
        spec = call.func.spec
        match effect.failure:
            case effects.Failure.EXPIRED:
                message = f"its timeout of {spec.timeout:g} s: {reason}"
                self._note(task, call, TaskTimeoutError, message)
                call.fail(too_late(spec, reason))
            case effects.Failure.OVERRUN:
                message = f"its run_timeout of {spec.run_timeout:g} s: {reason}"
                self._note(task, call, TaskTimeoutError, message)
                call.fail(overrun(spec.name, spec.run_timeout, reason))
            case effects.Failure.LOST:
                assert effect.worker is not None, effect
                death = self.deaths[effect.worker]
                error = self.cause_of(task, spec.name, effect.worker, death)
                if reason:
                    error.add_note(reason)
                self._note(task, call, type(error), str(error), DIED)
                call.fail(error)
            case effects.Failure.KILLED:
                killed = killed_for_good(spec.name)
                self._note(task, call, type(killed), str(killed), CANCELLED)
                call.fail(killed)
            case effects.Failure.DEADLOCKED:
                self._note(task, call, DeadlockError, reason)
                call.fail_deadlocked(reason)
            case effects.Failure.DISOWNED:
                message = "the task that had started it has ended or is being stopped"
                self._note(task, call, TaskCancelledError, message, CANCELLED)
                call.fail_disowned()
            case effects.Failure.ABANDONED:
                message = "the node was shut down"
                self._note(task, call, NodeClosedError, message, CANCELLED)
                call.fail_closed()
            case effects.Failure.EVICTED:
                from aiogpu.runtime.callers.leases import removed

                placement_group = spec.shape.request.placement_group
                assert placement_group is not None, effect
                evicted = removed(placement_group.name, spec.name, reason)
                self._note(task, call, PlacementRemovedError, str(evicted))
                call.fail(evicted)
            case effects.Failure.MISFIT:
                from aiogpu.runtime.callers.leases import misfit

                unfit = misfit(spec, reason)
                self._note(task, call, InfeasibleError, str(unfit))
                call.fail(unfit)

    def _note(
        self,
        task: int,
        call: Call,
        error: type[Exception],
        message: str,
        outcome: str = FAILED,
    ) -> None:
        """Keep the outcome of a task until its code has stopped."""
        if call.receiver is None:
            return
        failure = FailureReason.of(error.__name__, message)
        self._early_outcomes[task] = outcome, failure
        if outcome != CANCELLED:
            site = self.history.sites[call.worker]
            self._log(call.client, task, call.func.spec.name, site, failure)

    def _log(
        self, client: int, task: int, name: str, site: Site, failure: FailureReason
    ) -> None:
        """Write a failure of another program's task to the log of tasks."""
        if client and self._log_failure is not None:
            error, message, traceback = failure
            text = traceback or (f"{error}: {message}" if message else error)
            pid = f" pid={site.place[1]}" if site.place else ""
            self._log_failure(client, task, f"{name}{pid}", text)

    def cause_of(self, task: int, name: str, worker: int, death: Death) -> Exception:
        """Return the error of a task or an actor whose worker has died."""
        return (
            (self._gpu_guard and self._gpu_guard.explain(worker, task))
            or (self._guard and self._guard.explain(name, worker, death))
            or describe_death(name, death)
        )

    def warn(self, effect: effects.Warn) -> None:
        """Warn the program of a task that waits for resources that are never freed."""
        from aiogpu.observe.snapshot import stall_warning

        node = self._scheduler
        record = node.tasks.get(effect.task)
        if record is None:
            return  # the task has timed out at the same moment
        client = record.client
        reason = stall_warning(node, record, node.now)
        if self._warn_owner is None or not self._warn_owner(client, reason):
            _log.warning("! %s", reason)

    def forget(self, effect: effects.Forget) -> None:
        """Drop an ended task that has no receiver, with its arguments."""
        task, history, now = effect.task, self.history, self._scheduler.now
        call = self._calls.pop(task)
        spec, failure = call.func.spec, None
        # An actor without handles and a lease that was held count as finished.
        is_done = spec.is_endless and (effect.has_begun or not spec.is_lease)
        outcome = FINISHED if is_done else CANCELLED
        if task in self._early_outcomes:
            outcome, failure = self._early_outcomes.pop(task)
        site = history.sites[call.worker if effect.has_begun else 0]
        history.add(task, spec, call.client, site, effect.since, now, outcome, failure)

    def note_stop(self, task: int, error: str, message: str) -> None:
        """Note why a task will be cancelled, or an actor killed."""
        if self._calls.get(TaskId(task)) is not None:
            self._early_outcomes[task] = CANCELLED, FailureReason(error, message)

    def note_attempt(
        self,
        scheduler: Scheduler,
        now: float,
        task: TaskId,
        call: Call,
        outcome: str,
        began: float,
    ) -> Sequence[Effect]:
        """Add an attempt to the history, if the task is retried; a step for `feed`."""
        record = scheduler.tasks.get(task)
        if record is not None:
            site = Site(self.history.sites[call.worker].place, began)
            spec, client = record.spec, record.client
            self.history.add(task, spec, client, site, record.since, now, outcome)
        return NOTHING

    def note_call(self, actor: int, name: str, failure: FailureReason) -> None:
        """Add the failure of an actor's call to the history."""
        call, now = self._calls.get(TaskId(actor)), self._scheduler.now
        client, site = OWN if call is None else call.client, Site(None)
        if call is not None:
            site = self.history.sites[call.worker]
        self.history.add_call(actor, name, client, now, failure)
        self._log(client, actor, name, site, failure)

    def client_of(self, task: int) -> int:
        """Return the program that owns a task or actor that has not ended."""
        call = self._calls.get(TaskId(task))
        return OWN if call is None else call.client

    def on_items(self, worker: LiveWorker, message: Items) -> None:
        """Pass on items from the generator of a task, or of a call of an actor."""
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
        """Pass on a report of a task, or of a call of an actor."""
        if worker.actor is not None:
            call: Call | ActorCall | None = worker.actor.calls.get(message.task)
        else:
            call = self._calls.get(TaskId(message.task))
        if call is not None:
            pass_on_report(call.receiver, message.lost, message.payload)
