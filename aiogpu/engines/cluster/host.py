"""The cluster as the code of a task sees it, in a worker of Ray's; see `family.Host`.

Coroutines have a session on their event loop, as programs have. Plain code has no loop:
what it starts is carried on one of its thread's own, which runs while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.client.current import error_inside_task
from aiogpu.engines.cluster.interrupts import interrupts
from aiogpu.engines.cluster.loops import TaskLoop, has_loop, task_loop
from aiogpu.engines.cluster.payload import kept_in
from aiogpu.serialization.payload import has_handles
from aiogpu.worker.execute import is_coroutine

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.engines.cluster.values import ClusterValues

_engines: Final[dict[asyncio.AbstractEventLoop, RayEngine]] = {}


def engine_on(loop: asyncio.AbstractEventLoop) -> RayEngine:
    """The engine of code that runs on a loop in this process, which is Ray's."""
    engine = _engines.get(loop)
    if engine is None:
        from aiogpu.engines.cluster.engine import RayEngine

        for closed in [one for one in _engines if one.is_closed()]:
            del _engines[closed]
        engine = _engines[loop] = RayEngine.inside(loop)
    return engine


class ClusterHost:
    """See above: the node of one task, or of one actor.

    Attributes:
        upsets: how many children that plain code may wait for have failed so far.
    """

    def __init__(self, loop: TaskLoop | None = None) -> None:
        """Have plain code's calls carried on a loop, or on one of each thread's own."""
        self.upsets = 0
        self._loop = loop
        self._has_ended = False

    def __repr__(self) -> str:
        return "<ClusterHost>"

    @property
    def task_loop(self) -> TaskLoop:
        """The loop of the task's own thread, or of the actor."""
        found = self._loop or task_loop()
        found.wait_for(engine_on(found.loop).calls)
        return found

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop on which plain code of this thread has its calls carried."""
        return self.task_loop.loop

    def engine(self, loop: asyncio.AbstractEventLoop | None) -> RayEngine:
        """Who takes the calls of code that a loop runs; None for plain code."""
        return engine_on(loop or self.program)

    @property
    def _engine(self) -> RayEngine:
        return self.engine(asyncio._get_running_loop())

    @property
    def far(self) -> ClusterValues:
        """Who knows the values of the cluster."""
        return self._engine.far

    @property
    def waits(self) -> ClusterValues:
        """Who is to be told of waits on an event loop: nobody needs to be."""
        return self._engine.far

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number."""
        with interrupts.put_off():
            return self._engine.submit(site, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number."""
        with interrupts.put_off():
            return self._engine.actors.known(actor).call(method, payload, receiver)

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        with interrupts.put_off():
            self._engine.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        with interrupts.put_off():
            self.upsets += 1
            self._engine.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs."""
        engine = self._engine
        with suppress(RuntimeError):  # the loop is closed
            engine.loop.call_soon_threadsafe(engine.cancel, child)

    def cancel(self, task: int) -> None:
        """Stop a child or a call."""
        with interrupts.put_off():
            self._engine.cancel(task)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """The task's code waits: Ray sees that by itself."""

    def end_wait(self, waiter: object) -> None:
        """All that it waited for has ended."""

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Wait until something is done; False if time is up before."""
        return self.task_loop.run_until(is_done, deadline)

    def opened(
        self, function: Callable[..., Any], payload: bytes, load: Callable[..., Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; handles for a coroutine are its loop's."""
        if not (has_references(payload) and is_coroutine(function)):
            return load(payload)  # type: ignore[no-any-return]
        loop = self.program
        try:
            # Within: an interrupt may come as soon as it is set.
            asyncio._set_running_loop(loop)
            return load(payload)  # type: ignore[no-any-return]
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """The task has ended: what it has started ends with it; once."""
        if self._has_ended or not has_loop():
            return
        loop = task_loop()
        # The task's code has ended by now: an interrupt has nothing more to end.
        with suppress(KeyboardInterrupt), interrupts.put_off():
            try:
                loop.end_rest()
            finally:
                engine = _engines.get(loop.loop)
                if engine is not None:
                    if engine.calls.is_posted:
                        # Else what has come is kept until this process's next task.
                        loop.settle()
                    engine.end_children()
            self._has_ended = True


def has_references(payload: bytes) -> bool:
    """Return whether unpickling it makes handles."""
    kept = kept_in(payload)
    if kept is None:
        return has_handles(payload)
    parts: tuple[bytes, ...] = payload.parts  # type: ignore[attr-defined]
    return bool(kept.references) or any(map(has_references, parts))
