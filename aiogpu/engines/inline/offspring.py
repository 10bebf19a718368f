"""The asyncio tasks that a task's coroutine starts: they end with it.

In a worker they are all that its loop has. Here the loop is the program's, so they
are told apart by the context that they inherit. asyncio shows a task's context from
Python 3.12 on only; a task factory sees it everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from aiogpu.core.lifecycle import TaskState
from aiogpu.engines.inline.job import Job, running_job

AnyCoroutine = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class Offspring:
    """Keeps watch over a loop while coroutines of jobs run on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coroutines = 0
        self._factory: Any = self._make
        self._program_factory: Any = None

    def begin(self) -> None:
        """One coroutine more runs."""
        self._coroutines += 1
        if self._coroutines == 1:
            self._program_factory = self._loop.get_task_factory()
            self._loop.set_task_factory(self._factory)

    def end(self) -> None:
        """One coroutine less runs; with the last, the loop is as it was."""
        self._coroutines -= 1
        if not self._coroutines and self._loop.get_task_factory() is self._factory:
            self._loop.set_task_factory(self._program_factory)

    def _make(
        self, loop: asyncio.AbstractEventLoop, coroutine: AnyCoroutine, **options: Any
    ) -> asyncio.Future[Any]:
        make = self._program_factory
        task: asyncio.Task[Any]
        if make is not None:
            task = make(loop, coroutine, **options)
        else:
            task = asyncio.Task(coroutine, loop=loop, **options)
        job = running_job.get()
        if job is not None and job.record.state is not TaskState.ENDED:
            job.started.add(task)
            task.add_done_callback(job.started.discard)
        return task


async def end_started(job: Job) -> None:
    """Cancel what a job has started and not awaited, and wait for its end."""
    rest = list(job.started)
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.gather(*rest, return_exceptions=True)
