"""One task of this process, from submission until its code has stopped."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Final

from aiogpu.core.ids import TaskId
from aiogpu.core.ledger import Lease
from aiogpu.core.records import TaskRecord
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.runtime.call import Call

running_job: Final[ContextVar[Job | None]] = ContextVar("running_job", default=None)
"""The job whose code asks; the asyncio tasks that it starts inherit it."""


@dataclass(slots=True, eq=False)
class Job:
    """A task, what it holds, and what it has started.

    Attributes:
        record: its state, as `status()` shows it.
        call: its function and arguments, and who waits for it.
        due: the loop's time at which its `timeout` passes, None without one.
        children: the tasks that it has submitted and that have not begun.
        lease: what it holds while it runs.
        surroundings: what it finds around it while it runs.
        main: runs its coroutine; None for a plain function.
        started: the asyncio tasks that its code has started.
        timer: rings when its time is up, or its patience with a cancel.
    """

    record: TaskRecord
    call: Call
    due: float | None = None
    children: deque[Job] = field(default_factory=deque)
    lease: Lease | None = None
    surroundings: Surroundings | None = None
    main: asyncio.Task[Outcome] | None = None
    started: set[asyncio.Task[object]] = field(default_factory=set)
    timer: asyncio.Handle | None = None

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
    def is_about_to_end(self) -> bool:
        """Whether its code has stopped, and the loop is to tell of it next."""
        return self.main is not None and self.main.done()

    def fresh_context(self) -> Context:
        """An empty context, as a worker's is, but for whose it is."""
        context = Context()
        context.run(running_job.set, self)
        return context

    def stop_timer(self) -> None:
        """Have nothing rung for it any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
