"""One task of this process, from submission until its code has stopped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import host_of_task, take_kept
from aiogpu.client.interface import Host
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.recovery import may_retry
from aiogpu.engines.inline.outcome import Outcome, hold_for
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.runtime.objects.values import unfinished_in
from aiogpu.runtime.pending_tasks import Call, pass_on
from aiogpu.serialization.exceptions import RAISED, unpack_failure
from aiogpu.serialization.serializer import is_retried
from aiogpu.wire.messages import Done, Failed
from aiogpu.worker.streams import StreamSender

if TYPE_CHECKING:
    from aiogpu.engines.inline.execute import Executor
    from aiogpu.engines.inline.runner import Runner

_log: Final = logging.getLogger(__name__)
running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job whose code asks; the asyncio tasks that it starts inherit it."""
acting_job: Final[ContextVar[Job | None]] = ContextVar("acting_job", default=None)
"""The job that has made the actor whose coroutine asks; inherited as well."""


def id_of_caller() -> int:
    """By which the code that asks is told apart from others; 0 for the program."""
    job = running_job.get() or acting_job.get()
    return 0 if job is None else job.id


@dataclass(slots=True, eq=False)
class Job:
    """A task, what it holds, and what it has started.

    Attributes:
        record: its state, as `status()` shows it.
        call: its function and arguments, and who waits for it.
        runner: carries it on its loop.
        due: the loop's time at which its `timeout` passes, None without one.
        parent: the task that has started it, None for one of the program's.
        brood: the tasks that it has started and that have not ended.
        children: those that wait for their turn on top of it; some are no brood of
            its own, but what a task that has ended was not to take with it.
        waiters: how many wait for it.
        lease: what it holds while it runs.
        surroundings: what it finds around it while it runs.
        main: runs its coroutine; None for a plain function.
        started: the asyncio tasks that its code has started.
        timer: rings when its time is up, or its patience with a cancel.
        aside: what has begun on top of it and pauses, while its own code goes on.
        is_urgent: whether it runs on top of whatever runs, since an actor needs it.
        flow: the way out for its items, if it is a generator that has begun.
        error: the last answer as an exception, if it was needed before it is told.
        worn: put on whenever its code runs, where other code runs in between.
    """

    record: TaskRecord
    call: Call
    runner: Runner
    due: float | None = None
    parent: Job | None = None
    brood: dict[TaskId, Job] = field(default_factory=dict)
    children: deque[Job] = field(default_factory=deque)
    waiters: int = 0
    lease: Lease | None = None
    surroundings: Surroundings | None = None
    main: asyncio.Task[Outcome] | None = None
    started: set[asyncio.Task[object]] = field(default_factory=set)
    timer: asyncio.Handle | None = None
    aside: list[Job] = field(default_factory=list)
    is_urgent: bool = False
    worn: Surroundings | None = None
    flow: StreamSender | None = None
    error: Exception | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name} {self.record.state.value}>"

    @property
    def id(self) -> TaskId:
        """The task's number."""
        return self.record.id

    @property
    def name(self) -> str:
        """The task's name."""
        return self.record.spec.name

    @property
    def at_work(self) -> WorkerRecord | None:
        """What stands for the worker that runs its code, None while it waits."""
        return self.record.worker

    @property
    def is_waiting(self) -> bool:
        """True if none of its code has run."""
        return self.record.state is TaskState.WAITING

    @property
    def is_overdue(self) -> bool:
        """True if its time is up."""
        return self.due is not None and self.runner.loop.time() >= self.due

    @property
    def has_ended(self) -> bool:
        """True if its code has stopped, or never ran."""
        return self.record.state is TaskState.ENDED

    @property
    def is_about_to_end(self) -> bool:
        """True if its code has stopped, and the loop is to tell of it next."""
        return self.main is not None and self.main.done()

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a task that it has started."""
        return any(child.waiters for child in self.brood.values())

    @property
    def actor_id(self) -> int | None:
        """The number of the actor whose code it runs; None for a task."""
        return None

    def worker_id(self, depth: int) -> WorkerId:
        """By which number its code and `status()` know where it runs."""
        return WorkerId(depth)

    def function(self, executor: Executor) -> Callable[..., Any]:
        """Return what is called; raises whatever unpickling it raises."""
        return executor.function(self.call.site)

    def tell(self, outcome: Outcome) -> None:
        """Tell who waits what has come of it."""
        call, answer = self.call, outcome.answer
        hold_for(outcome.carried, call.receiver)
        if type(answer) is Done and call.receiver is not None:
            call.receiver.receive(answer.payload)
        elif type(answer) is Failed:
            error = self.error or unpack_failure(answer, self.name)
            outcome.show_frames(error)
            call.tell(error)

    def let_go(self, result: bytes) -> None:
        """Children to which the result has handles go on without their parent."""
        for task in unfinished_in(result):
            child = self.brood.pop(TaskId(task), None)
            if child is not None:
                child.parent = None

    def is_retried(self, outcome: Outcome) -> bool:
        """Return whether it is to be tried again after an attempt that ended so."""
        answer, original = outcome.answer, outcome.original
        self.error = None
        if type(answer) is not Failed or outcome.is_ctrl_c:
            return False
        is_named = original is not None and self._names(original)
        return (self._names(answer) or is_named) and may_retry(self.record)

    def _names(self, failed: Failed) -> bool:
        """Return whether its options name what was raised; that is kept, to be told."""
        wanted = self.call.site.retry_exceptions
        if wanted is False or failed.kind != RAISED:
            return False
        self.error = unpack_failure(failed, self.name)
        try:
            return is_retried(wanted, self.error)
        except Exception as error:  # noqa: BLE001 - a metaclass of the user's may raise
            _log.warning("! %s is not retried: %r", self.name, error)
            return False

    def pass_item(self, payload: bytes) -> None:
        """Give an item to who waits."""
        call = self.call
        call.passed += 1
        if call.receiver is not None:
            hold_for(take_kept(), call.receiver)
        pass_on(call.receiver, (payload,))
        self.runner.note_item()

    def fail_wait(self, reason: str) -> bool:
        """Tell who waits that the wait can never end; whether the job is over by it."""
        self.call.tell_deadlock(reason)
        return True

    def on_end(self) -> None:
        """Its code has stopped, or never ran."""

    def fresh_context(self, host: Host) -> Context:
        """An empty context, as a worker's is, but for whose it is."""
        context = Context()
        context.run(running_job.set, self)
        context.run(host_of_task.set, host)
        return context

    def stop_timer(self) -> None:
        """Have nothing rung for it any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
