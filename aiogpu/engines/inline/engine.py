"""Tasks in the calling process, one after the other, in the order of submission.

For tests and debuggers: breakpoints, monkeypatches and coverage reach into tasks.
All that one process can keep is kept as in a worker: copies of values, devices,
variables, errors, timeouts, retries, cancelling. A plain function blocks the loop
while it runs and cannot be interrupted; a coroutine is awaited on the loop.
"""

from __future__ import annotations

import asyncio
import os
from importlib import import_module

from aiogpu.accelerators.registry import INSTALLED
from aiogpu.core.ids import TaskId
from aiogpu.core.records import TaskRecord
from aiogpu.core.snapshot import NodeStatus
from aiogpu.core.why import Why
from aiogpu.engines.admission import check_arguments, check_site
from aiogpu.engines.base import NodeOptions, error_inside_task
from aiogpu.engines.inline.execute import Executor
from aiogpu.engines.inline.job import Job, running_job
from aiogpu.engines.inline.picture import picture_inline, why_inline
from aiogpu.engines.inline.runner import Runner
from aiogpu.engines.inventory import take_inventory
from aiogpu.errors import NodeClosedError, PreloadError
from aiogpu.runtime.assignment import Assignment
from aiogpu.runtime.call import Call, Receiver, Site


class InlineEngine:
    """A node without processes."""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._loop = loop
        self._runner: Runner | None = None
        self._is_closing = False
        self._last_task = 0
        # Left on sites that were found feasible.
        self._mark = object()

    def __repr__(self) -> str:
        return f"<InlineEngine {self._runner!r}>"

    async def open(self) -> None:
        """Import what is to be preloaded, and detect what there is."""
        options = self._options
        for module in options.preload:
            try:
                import_module(module)
            except Exception as error:
                raise PreloadError(
                    f"init(preload=...) names {module!r}, which cannot be imported: "
                    f"{type(error).__name__}: {error}. Install it, or leave it out."
                ) from error
        ledger = await take_inventory(options)
        self._runner = Runner(
            self._loop,
            ledger,
            Assignment(INSTALLED, ledger, os.environ),
            Executor(self._loop, is_silent=not options.log_to_driver),
            options.cancel_grace,
        )

    @property
    def _open_runner(self) -> Runner:
        if self._runner is None:
            raise NodeClosedError("this node is not running.")
        return self._runner

    def _asked(self, what: str) -> Runner:
        """The runner, for the program; tasks are refused as in a worker."""
        if running_job.get() is not None:
            raise error_inside_task(what)
        return self._open_runner

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Let a task wait for its turn; see `Engine.submit`."""
        runner, spec = self._open_runner, site.spec
        if self._is_closing:
            raise NodeClosedError("this node is being shut down.")
        if site.checked_by is not self._mark:
            check_site(site, runner.ledger)
            site.checked_by = self._mark
        check_arguments(site, payload)
        self._last_task += 1
        now = self._loop.time()
        record = TaskRecord(TaskId(self._last_task), spec, spec.max_retries, now)
        due = None if spec.timeout is None else now + spec.timeout
        runner.add(Job(record, Call(site, payload, receiver), due))
        return record.id

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if self._runner is None:
            return
        job = self._runner.jobs.get(TaskId(task))
        if job is not None:
            job.call.receiver = None
            self._runner.stop(job)

    def total(self) -> dict[str, float]:
        """All resources by name."""
        return self._asked("aiogpu.cluster_resources()").ledger.totals()

    def available(self) -> dict[str, float]:
        """What is free of each."""
        return self._asked("aiogpu.available_resources()").ledger.available()

    def status(self) -> NodeStatus:
        """Who holds what, what waits; each running task counts as a worker."""
        runner = self._asked("aiogpu.status()")
        return picture_inline(runner.ledger, runner.turns, self._loop.time())

    def why(self, task: int) -> Why | None:
        """Why a task waits; see `Engine.why`."""
        runner = self._asked("handle.why()")
        job = runner.jobs.get(TaskId(task))
        if job is None:
            return None
        return why_inline(job, runner.turns, self._loop.time())

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind."""
        self._is_closing = True
        if self._runner is not None:
            await self._runner.close()

    def abandon(self) -> None:
        """The same in haste."""
        if self._runner is not None:
            self._runner.abandon()
