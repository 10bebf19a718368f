"""Runs a task's code: finds the function, calls or awaits it, packs the outcome.

Values pass through pickles as on their way to a worker and back, the function too:
what it closes over is a copy, and so are the globals that it uses if it is defined
in `__main__`. A function of a module is that module's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CoroutineType, coroutine
from typing import Any

from aiogpu.client.current import ActorExit, current, has_exited, take_kept
from aiogpu.client.function_spec import Site
from aiogpu.engines.inline.ctrl_c import CtrlC
from aiogpu.engines.inline.host import TaskHost
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.offspring import end_started
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.shortage import with_shortage
from aiogpu.engines.inline.silence import silence
from aiogpu.engines.inline.streaming import begin_stream
from aiogpu.engines.inline.supplies import supplied
from aiogpu.serialization.exceptions import LEFT, RAISED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    dump_result,
    load_arguments,
    load_function,
    split_results,
)
from aiogpu.wire.messages import Done
from aiogpu.worker.streams import UnsendableError

AnyCoroutine = Coroutine[Any, Any, Any]


class Executor:
    """The functions that this process knows as a worker would, and how to run them."""

    def __init__(self, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._ctrl_c = CtrlC()
        self._functions: dict[int, Callable[..., Any]] = {}

    def call(self, job: Job, host: TaskHost) -> Outcome | AnyCoroutine:
        """Call the function, outside of any event loop, as in a worker.

        Gives the coroutine where that is what the function gives; `finish` it.
        """
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            try:
                return self._call(job, host)
            finally:
                host.close()
        finally:
            asyncio._set_running_loop(loop)

    def _call(self, job: Job, host: TaskHost | None = None) -> Outcome | AnyCoroutine:
        kind = UNREADABLE
        try:
            with self._step(job):
                function = job.function(self)
                args, kwargs = _arguments(job)
                kind = RAISED
                value = function(*args, **kwargs)
                if type(value) is CoroutineType:
                    return value
                value = split_results(value, job.call.payload)
                _raise_exit()
                if job.call.limit or job.call.site.window:
                    return begin_stream(job, value, host)
                kind = UNSENDABLE
                return _packed(job, value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            return self._failed(job, kind, error)

    async def interleave(self, job: Job) -> Outcome:
        """Call an actor's method on the loop that runs, and await what it gives."""
        outcome = self._call(job)
        return (
            outcome if isinstance(outcome, Outcome) else await self.finish(job, outcome)
        )

    async def finish(self, job: Job, begun: AnyCoroutine) -> Outcome:
        """Await a coroutine to its end, and end what it has started."""
        kind = RAISED
        try:
            value = await self.stepwise(job, begun)
            value = split_results(value, job.call.payload)
            _raise_exit()
            kind = UNSENDABLE
            with self._step(job):
                return _packed(job, value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            kind = UNSENDABLE if type(error) is UnsendableError else kind
            return self._failed(job, kind, error)
        finally:
            await end_started(job)

    def _failed(self, job: Job, kind: str, error: BaseException) -> Outcome:
        take_kept()  # the result that they were in will never be sent
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
        outcome = Outcome.failed(job.id, kind, error, self.is_ctrl_c(error))
        if kind != LEFT:
            outcome = with_shortage(job, outcome)
        return outcome._replace(carried=take_kept())

    def is_ctrl_c(self, error: BaseException) -> bool:
        """Whether the code that has run last was ended by the user at the keyboard."""
        return self._ctrl_c.is_real(error)

    @coroutine
    def stepwise(self, job: Job, begun: AnyCoroutine) -> Generator[Any, Any, Any]:
        """Drive a coroutine, so that it is seen when its code begins and pauses."""
        # Not a name of its own: an error would hold itself, by its frames.
        next_step: list[Callable[[], Any]] = [partial(begun.send, None)]
        while True:
            with self._step(job):
                try:
                    awaited = next_step.pop()()
                except StopIteration as ended:
                    return ended.value
            try:
                next_step.append(partial(begun.send, (yield awaited)))
            except GeneratorExit:
                # It was left behind and its loop has gone: nothing can be awaited.
                job.started.clear()
                begun.close()
                raise
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle
                next_step.append(partial(begun.throw, error))

    @contextmanager
    def _step(self, job: Job) -> Iterator[None]:
        """The block runs the user's code, from here to its next pause."""
        with ExitStack() as stack:
            if job.worn is not None:
                stack.enter_context(job.worn.on())
            if self._is_silent:
                stack.enter_context(silence())
            stack.enter_context(self._ctrl_c.watched())
            yield

    async def dressed(self, job: Job, begun: AnyCoroutine) -> Any:
        """Await what an actor's code has started, in the actor's surroundings."""
        return await self.stepwise(job, begun)

    def function(self, site: Site) -> Callable[..., Any]:
        """Return what a site stands for; raises whatever unpickling it raises."""
        sent = site.function
        if site.spec.max_calls == 1:
            # Its worker would have run nothing before.
            return self._load(sent.payload)
        found = self._functions.get(sent.id)
        if found is None:
            found = self._functions[sent.id] = self._load(sent.payload)
        return found

    def _load(self, payload: bytes) -> Callable[..., Any]:
        loaded: Callable[..., Any] = load_function(payload)
        return loaded


def _raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a call is given; handles for a coroutine are its loop's."""
    payload = supplied(job.call.payload)
    if asyncio._get_running_loop() is not None or not (
        has_handles(payload) and job.call.site.is_coroutine
    ):
        return load_arguments(payload)
    asyncio._set_running_loop(job.runner.loop)
    try:
        return load_arguments(payload)
    finally:
        asyncio._set_running_loop(None)


def _packed(job: Job, value: object) -> Outcome:
    result = dump_result(value)
    if isinstance(result, PickledValue):
        result = job.runner.node.pack(result)
        job.let_go(result)
    return Outcome(Done(job.id, result), carried=take_kept())
