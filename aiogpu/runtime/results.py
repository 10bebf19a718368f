"""Tells owners what has become of their tasks, and passes on what streams yield."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiogpu.core import effects
from aiogpu.core.effects import Failure
from aiogpu.core.model.ids import OWN, TaskId, WorkerId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import DeadlockError, TaskTimeoutError
from aiogpu.runtime.memory_monitor import MemoryGuard
from aiogpu.runtime.pending_tasks import Call, pass_on, pass_on_report, tell_fault
from aiogpu.runtime.workers.death import Death, describe_death
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.wire.messages import Done, Failed, Items, Report

if TYPE_CHECKING:
    from aiogpu.observe.status import FailureStatus
    from aiogpu.runtime.actors.actor import ActorCall
    from aiogpu.runtime.devices.memory_guard import GpuMemoryGuard


_log: Final = logging.getLogger(__name__)


WarnOwner = Callable[[int, str], bool]
"""Has another program, by its number, log a warning; False if it cannot."""


KEPT: Final = 100
"""Failures that a node remembers."""
LONGEST: Final = 200
"""Characters of a message that are kept."""


class Failures:
    """The last `KEPT` failures of a node's tasks and calls."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int, str, str, str, int]] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<Failures {len(self._noted)}>"

    def note(
        self, now: float, task: int, name: str, error: str, message: str, client: int
    ) -> None:
        """Remember one; the one noted first is forgotten for it."""
        first = message.strip().partition("\n")[0][:LONGEST].rstrip()
        self._noted.append((now, task, name, error, first, client))

    def at(self, now: float) -> tuple[FailureStatus, ...]:
        """Return the remembered failures, the latest first."""
        # Late, as all of status is: few programs ask for it.
        from aiogpu.observe.status import FailureStatus

        return tuple(
            FailureStatus(task, name, error, message, max(now - since, 0.0), client)
            for since, task, name, error, message, client in reversed(self._noted)
        )


class Results:
    """Tells the receivers of one node's tasks how these have ended.

    Attributes:
        deaths: how workers have ended of which the core is being told.
        failures: the last that have failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        calls: ShardedDict[Call],
        guard: MemoryGuard | None = None,
        gpu_guard: GpuMemoryGuard | None = None,
        warn_owner: WarnOwner | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.deaths: dict[WorkerId, Death] = {}
        self._gpu_guard = gpu_guard
        self.failures = Failures()
        self._warn_owner = warn_owner
        self._calls = calls
        self._guard = guard

    def settle(self, effect: effects.Settle) -> None:
        """Settle a task whose code has ended."""
        calls, task = self._calls, effect.task
        call = calls.young.pop(task, None) or calls.pop(task)
        receiver, answer = call.receiver, call.answer
        assert receiver is not None, call
        try:
            if type(answer) is Done:
                receiver.settle(answer.payload)
                return
            if type(answer) is Failed:
                if answer.kind != STOPPED:
                    self.note(task, call, answer.type_name, answer.message)
                receiver.settle(answer)
        except Exception as error:  # noqa: BLE001 - it is told to who waits
            tell_fault(receiver, error)

    def fail(self, effect: effects.Fail) -> None:
        """Settle a task that has no result, with the reason."""
        call, task, reason = self._calls[effect.task], effect.task, effect.reason
        spec = call.func.spec
        match effect.failure:
            case Failure.EXPIRED:
                timeout = f"{spec.timeout or 0.0:g} s"
                self.note(task, call, TaskTimeoutError.__name__, timeout)
                call.tell_timeout()
            case Failure.LOST:
                assert effect.worker is not None, effect
                death = self.deaths[effect.worker]
                error = self.cause_of(task, spec.name, effect.worker, death)
                if reason:
                    error.add_note(reason)
                self.note(task, call, type(error).__name__, str(error))
                call.tell(error)
            case Failure.DEADLOCKED:
                self.note(task, call, DeadlockError.__name__, reason)
                call.tell_deadlock(reason)
            case Failure.DISOWNED:
                call.tell_disowned()
            case Failure.ABANDONED:
                call.tell_closed()
            case Failure.EVICTED:
                from aiogpu.runtime.callers.leases import removed

                placement_group = spec.shape.request.placement_group
                assert placement_group is not None, effect
                call.tell(removed(placement_group.name, spec.name, reason))
            case Failure.MISFIT:
                from aiogpu.runtime.callers.leases import misfit

                call.tell(misfit(spec, reason))

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
        del self._calls[effect.task]

    def note_call(self, actor: int, name: str, failed: Failed) -> None:
        """Remember the failure of a call of an actor."""
        client, now = self.client_of(actor), time.monotonic()
        told = failed.type_name, failed.message
        self.failures.note(now, actor, name, *told, client)

    def client_of(self, task: int) -> int:
        """The program whose a task is that has not ended, or an actor."""
        call = self._calls.get(TaskId(task))
        return OWN if call is None else call.client

    def note(self, task: int, call: Call, error: str, message: str) -> None:
        """Remember a reported failure."""
        if call.receiver is not None:
            now, name = time.monotonic(), call.func.spec.name
            self.failures.note(now, task, name, error, message, call.client)

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
