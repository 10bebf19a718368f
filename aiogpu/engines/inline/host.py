"""A task's way to the node that runs it, for code that has no node on its own loop.

Plain code that waits runs a loop meanwhile: its children are carried on that as the
program's tasks are on the program's. So they pause when it goes on before they end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from aiogpu.client.current import error_inside_task
from aiogpu.core.model.ids import TaskId
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.supplies import needed_by
from aiogpu.errors import MisuseError, NodeError
from aiogpu.runtime.actors.registry import FIRST_CALL
from aiogpu.wire.messages import ASYNC

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.inline.node import InlineNode
    from aiogpu.engines.inline.runner import Runner


class TaskHost:
    """The node as the code of one attempt at a task sees it; see `family.Host`.

    Attributes:
        upsets: how many children that plain code may wait for have failed so far.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._node = job.runner.node
        self._thread = threading.get_ident()
        self._home: Runner | None = None
        self._runners = {job.runner.loop: job.runner}
        self._awaited: list[Job] = []
        self._awaited_calls: list[int] = []
        self.upsets = 0

    def __repr__(self) -> str:
        return f"<TaskHost of {self._job!r}>"

    @property
    def waits(self) -> InlineNode:
        """Who is to be told of waits on an event loop."""
        return self._node

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the task; gives its number.

        Raises:
            MisuseError: the task has ended.
            NodeError: this is another thread than the task's.
            SerializationError: the arguments are too large to be sent.
        """
        self._check(f"{site.spec.name}.remote()")
        loop = asyncio._get_running_loop()
        runner = self._at_home() if loop is None else self._beside(loop)
        return runner.submit(site, payload, receiver)

    def call(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number.

        Raises:
            MisuseError: the task has ended.
            NodeError: this is another thread than the task's, or the method runs on
                the program's loop, which this code keeps from running.
        """
        actors = self._node.actors
        called = actors.known(actor)
        self._check(f"{called.name}.{method}.remote()")
        if called.site.actor is not None and called.site.actor.mode == ASYNC:
            raise NodeError(
                f"{called.name}.{method}.remote() was called by {self._job.name}, "
                f"whose plain code holds the thread. On an inline node a class that "
                f"has `async def` methods runs on the program's event loop, in that "
                f"same thread: make the caller an `async def`, or open a node with "
                f"address='local'."
            )
        number = called.call(method, payload, receiver)
        loop = asyncio._get_running_loop()
        if loop is not None:
            self._beside(loop).wake()
        return number

    far = None

    def engine(self, _loop: asyncio.AbstractEventLoop | None) -> None:
        """The program's own engine takes all calls; see `Host.engine`."""
        return

    @property
    def program(self) -> asyncio.AbstractEventLoop:
        """The loop of the program that has opened the node."""
        return self._node.actors.runner.loop

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        self._node.demand(child, limit)

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        self.upsets += 1
        self._node.cancel(child)

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs."""
        with suppress(RuntimeError):  # the loop is closed, and the child has ended
            loop = (self._home or self._job.runner).loop
            loop.call_soon_threadsafe(self._node.cancel, child)

    def cancel(self, task: int) -> None:
        """Stop a child that is awaited on an event loop."""
        self._node.cancel(task)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """The task's code waits for these, or for none any more.

        Raises:
            NodeError: this is another thread than the task's.
        """
        if children:
            self._check("aiogpu.get()")
        self.end_wait(waiter)
        found = [self._node.jobs.get(TaskId(child)) for child in children]
        self._awaited = [job for job in found if job is not None]
        self._awaited_calls = [child for child in children if child >= FIRST_CALL]
        for call in self._awaited_calls:
            self._node.begin_wait(call)
        for job in self._awaited:
            job.waiters = 1
            self._bring_up(job)

    def _bring_up(self, job: Job) -> None:
        """Have a job run now, and before it what it needs, whoever has started them.

        What a job needs may need others in turn, ten thousand in a row, so this is a
        depth-first search with a stack of its own.
        """
        jobs, seen = self._node.jobs, set[TaskId]()
        stack: list[tuple[Job, bool]] = [(job, False)]
        while stack:
            one, has_its_needs = stack.pop()
            if has_its_needs:
                self._node.turns.bring_up(one, self._job)
            elif one.is_waiting and one.id not in seen:
                seen.add(one.id)
                stack.append((one, True))
                needs = (jobs.get(TaskId(value.task)) for value in needed_by(one))
                stack += [(needed, False) for needed in needs if needed is not None]

    def end_wait(self, waiter: object) -> None:
        """Nobody of the task's plain code waits any more."""
        for job in self._awaited:
            job.waiters = 0
        for call in self._awaited_calls:
            self._node.end_wait(call)
        self._awaited, self._awaited_calls = [], []

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Run the children until something is done; False if time is up before."""
        turns = self._node.turns
        self._end_strays()
        turns.resume(self._job)
        try:
            return self._at_home().run_until(is_done, deadline)
        finally:
            turns.set_aside(self._job)

    def close(self) -> None:
        """End what plain code has started: its function has returned."""
        job, turns = self._job, self._node.turns
        job.runner.disown(job)
        turns.let_go(job)
        try:
            self._end_strays()
            turns.resume(job)
            while (last := turns.running[-1]) is not job:
                last.runner.see_off(last)
            self._end_streams()
        finally:
            home, self._home = self._home, None
            if home is not None:
                _close(home.loop)

    def _end_strays(self) -> None:
        """End what was left unfinished by a loop of the user's that has stopped."""
        while (last := self._node.turns.running[-1]) is not self._job:
            last.call.tell_disowned()
            last.runner.stop(last)
            last.runner.see_off(last)

    def _end_streams(self) -> None:
        """End the generators that run on the loop of plain code, which is closed."""
        for stream in list(self._node.beside.jobs.values()):
            if self._home is not None and stream.runner is self._home:
                stream.call.tell_disowned()
                self._home.stop(stream)
                self._home.see_off(stream)

    def _at_home(self) -> Runner:
        """The runner for plain code that waits."""
        if self._home is None:
            self._home = self._beside(asyncio.new_event_loop())
        return self._home

    def _beside(self, loop: asyncio.AbstractEventLoop) -> Runner:
        runner = self._runners.get(loop)
        if runner is None:
            runner = self._runners[loop] = type(self._job.runner)(loop, self._node)
        return runner

    def _check(self, what: str) -> None:
        if self._job.has_ended:
            raise MisuseError(
                f"{what} was called after {self._job.name} had ended, by code that it "
                f"has left behind."
            )
        if self._thread != threading.get_ident():
            raise NodeError(
                f"{what} was called in a thread of {self._job.name}'s own. On an "
                f"inline node a task starts others in the thread that it runs in."
            )


def _close(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        # What was left behind has been told of; asyncio need not do so again.
        loop.set_exception_handler(lambda loop, context: None)
        loop.close()
