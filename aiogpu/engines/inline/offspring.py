"""The asyncio tasks that a task's coroutine starts: they end with it.

Those that a coroutine of an actor starts end with the actor, and find around them
what it finds, as long as their code runs.

In a worker they are all that its loop has. Here the loop is the program's, so they
are told apart by the context that they inherit. asyncio shows a task's context from
Python 3.12 on only; a task factory sees it everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from aiogpu.core.records import TaskState
from aiogpu.engines.inline.job import Job, acting_job, running_job

if TYPE_CHECKING:
    from aiogpu.engines.inline.execute import Executor

AnyCoroutine = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class Offspring:
    """Keeps watch over a loop while coroutines of jobs run on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor) -> None:
        self._loop = loop
        self._executor = executor
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
        job, begun = running_job.get(), None
        if job is not None and job.record.state is TaskState.ENDED:
            job = None
        if job is None:
            job = acting_job.get()
            if job is not None and type(coroutine) is CoroutineType:
                begun, coroutine = coroutine, self._executor.dressed(job, coroutine)
        make = self._program_factory
        task: asyncio.Task[Any]
        if make is not None:
            task = make(loop, coroutine, **options)
        else:
            task = asyncio.Task(coroutine, loop=loop, **options)
        if job is not None:
            job.started.add(task)
            task.add_done_callback(job.started.discard)
        if begun is not None:
            # It may be cancelled before it has begun.
            task.add_done_callback(partial(_close, begun))
        return task


def _close(begun: Coroutine[Any, Any, Any], _task: asyncio.Task[Any]) -> None:
    begun.close()


async def end_started(job: Job) -> None:
    """Cancel what a job has started and not awaited, and wait for its end."""
    rest = list(job.started)
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.gather(*rest, return_exceptions=True)
