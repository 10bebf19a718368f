"""Fakes for the tests of the API: an engine, actors, a worker's channel."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiogpu
from aiogpu.api.actors.actor import ActorHandle
from aiogpu.api.actors.methods import ActorInterface
from aiogpu.api.map import Results
from aiogpu.api.results.handle import Handle
from aiogpu.api.session import Session
from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.client.interface import Receiver
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.errors import ActorDiedError, InfeasibleError
from aiogpu.observe.why import Why
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_result, load_arguments
from aiogpu.wire.messages import ChildDone, ChildFailed, Message, Submit, Wait
from aiogpu.worker.nested import TaskClient
from tests.support.waits import turns

UNREADABLE = b"no pickle"
"""A result that cannot be unpickled."""


async def outcome(awaitable: asyncio.Future[Any]) -> Any:
    """Return the result or the error of an awaitable."""
    (result,) = await asyncio.gather(awaitable, return_exceptions=True)
    return result


async def started(awaitable: Any, count: int = 10) -> asyncio.Task[Any]:
    """Start a task that awaits, let it run as far as it can, and return it."""

    async def wait() -> Any:
        return await awaitable

    task = asyncio.ensure_future(wait())
    await turns(count)
    return task


async def listed(results: Results[Any]) -> list[Any]:
    return [result async for result in results]


# Engines


def function_spec(name: str = "train") -> FunctionSpec:
    """Return a function that never runs."""
    request = Request.of({"CPU": UNIT}, {})
    return FunctionSpec(
        id=new_func_id(),
        function=Function(new_function_id(), b"pickled"),
        spec=TaskSpec(name, Shape(request)),
        resources=request.as_numbers(),
        environ={},
        is_coroutine=False,
    )


@dataclass(eq=False)
class FakeEngine:
    """An engine that runs nothing: the test opens it, ends its tasks and closes it.

    Attributes:
        story: the requests, in order.
        calls: the arguments of each task; tasks are numbered from 1.
        max_retries: the option of each task.
        receivers: the receiver of each task.
        may_open: set when `open` may end.
        may_close: set when `close` may end.
        open_error: raised at the end of `open`.
        close_error: raised at the end of `close`.
        infeasible: names of tasks that are refused.
    """

    story: list[str] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    max_retries: list[int] = field(default_factory=list)
    receivers: dict[int, Receiver] = field(default_factory=dict)
    may_open: asyncio.Event = field(default_factory=asyncio.Event)
    may_close: asyncio.Event = field(default_factory=asyncio.Event)
    open_error: BaseException | None = None
    close_error: BaseException | None = None
    infeasible: set[str] = field(default_factory=set)

    waits = None
    home = "fake"
    remote_values = None
    has_gone = False

    def __post_init__(self) -> None:
        self.may_open.set()
        self.may_close.set()

    def __repr__(self) -> str:
        return "<FakeEngine>"

    async def open(self) -> None:
        self.story.append("open")
        await self.may_open.wait()
        if self.open_error is not None:
            raise self.open_error
        self.story.append("opened")

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        if func.spec.name in self.infeasible:
            raise InfeasibleError(f"{func.spec.name} asks for too much.")
        self.calls.append(load_arguments(payload)[0] if payload else ())
        self.max_retries.append(func.spec.max_retries)
        task = len(self.calls)
        self.receivers[task] = receiver
        self.story.append(f"submit {func.spec.name}")
        return task

    def cancel(self, task: int) -> None:
        self.story.append(f"cancel {task}")

    async def close(self) -> None:
        self.story.append("close")
        await self.may_close.wait()
        if self.close_error is not None:
            raise self.close_error
        self.story.append("closed")

    def force_close(self) -> None:
        self.story.append("force_close")

    def close_now(self) -> None:
        self.story.append("close_now")

    def after_fork(self) -> None:
        """A fork changes nothing."""

    # Methods for tests.

    def answer(self, *tasks: int) -> None:
        """Let tasks return their numbers."""
        for task in tasks:
            self.receivers[task].settle(dump_result(task))

    def fail(self, task: int, error: Exception) -> None:
        self.receivers[task].settle(error)

    @property
    def cancelled(self) -> list[int]:
        return [int(step[7:]) for step in self.story if step.startswith("cancel ")]


def opening(engine: FakeEngine) -> Session:
    """Make a session of the running loop and start to open it."""
    session = Session(engine, asyncio.get_running_loop())  # type: ignore[arg-type]
    session.start_opening()
    return session


async def opened(engine: FakeEngine) -> Session:
    session = opening(engine)
    await session.opened()
    return session


# Handles


class Owner:
    """An owner of tasks that never run; records cancellations."""

    state = "starting"

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, task: int) -> None:
        self.cancelled.append(task)

    async def why(self, name: str, task: int) -> Why:
        return Why(name, task, self.state)

    def start(self, count: int) -> list[Any]:
        loop = asyncio.get_running_loop()
        handles: list[Any] = [Handle("train", self, loop) for _ in range(count)]
        for number, handle in enumerate(handles, 1):
            handle.task_id = number
        return handles


# Actors


class Model:
    """The actors' class."""

    def embed(self, text: str) -> str:
        return text

    def reset(self) -> None:
        pass


class FakeActor:
    """The link to an actor that becomes ready, answers and dies when the test says so.

    Attributes:
        calls: the handles of its calls, in order.
        arguments: the method and arguments of each call.
        story: the requests to end.
        cancelled: the number of cancelled calls.
        most: the number of such actors that have room at once; None if unknown.
    """

    name = "Model"
    interface: ActorInterface | None = ActorInterface(Model)
    own = None
    most: int | None = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[Handle[Any]] = []
        self.arguments: list[Any] = []
        self.story: list[str] = []
        self.cancelled = 0
        self._is_ready = False
        self._death: Exception | None = None
        self._readies: list[Handle[None]] = []
        self._ends: list[Handle[None]] = []
        self._losses: list[Handle[None]] = []

    def cancel(self, _task: int) -> None:
        self.cancelled += 1

    def _handle(self, label: str) -> Handle[Any]:
        return Handle(label, self, asyncio.get_running_loop())  # type: ignore[arg-type]

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Handle[Any]:
        assert not returns
        assert not window
        handle = self._handle(label)
        self.calls.append(handle)
        self.arguments.append((method, *load_arguments(payload)[0]))
        if self._death is not None:
            handle.settle(self._death)
        return handle

    def ready(self) -> Handle[None]:
        handle = self._handle("ready")
        self._readies.append(handle)
        self._settle_readies()
        return handle

    def room(self) -> Handle[Any]:
        handle = self._handle("Model()")
        handle.settle(dump_result((self.most, "half a GPU")))
        return handle

    def ended(self) -> Handle[None]:
        handle = self._handle("ended")
        self._ends.append(handle)
        return handle

    def lost(self) -> Handle[None]:
        handle = self._handle("lost")
        self._losses.append(handle)
        if self._death is not None or not self._is_ready:
            self._lose()
        return handle

    def _lose(self) -> None:
        for handle in self._losses:
            handle.settle(NONE_PAYLOAD)

    def watch(self, watcher: object) -> None:
        """Only the test ends a fake actor."""

    def kill(self, no_restart: bool) -> None:
        self.story.append("kill" if no_restart else "restart")

    def terminate(self) -> None:
        self.story.append("terminate")

    def _settle_readies(self) -> None:
        for handle in self._readies:
            if self._death is not None:
                handle.settle(self._death)
            elif self._is_ready:
                handle.settle(NONE_PAYLOAD)

    # Events in the life of the actor.

    def live(self) -> None:
        """Let the constructor return."""
        self._is_ready = True
        self._settle_readies()

    def answer(self, call: int = -1, value: Any = None) -> None:
        self.calls[call].settle(dump_result(value))

    def restart(self) -> None:
        """Let the process die and another one take its place."""
        self._is_ready = False
        self._lose()
        error = ActorDiedError("it restarts", "Model", is_restarting=True)
        for handle in self.calls:
            handle.settle(error)

    def die(self, why: Exception | str = "it died", is_gone: bool = False) -> None:
        """Let the actor die; its process is gone only with `is_gone`."""
        self._death = ActorDiedError(why, "Model") if isinstance(why, str) else why
        self._lose()
        for handle in self.calls:
            handle.settle(self._death)
        self._settle_readies()
        if is_gone:
            self.end()

    def end(self) -> None:
        """Let the process end."""
        for handle in self._ends:
            handle.settle(NONE_PAYLOAD)


class FakeActors:
    """A factory of actors.

    Attributes:
        links: the links to all actors.
        refuses: raised in place of making an actor.
    """

    def __init__(self) -> None:
        self.links: list[FakeActor] = []
        self.refuses: Exception | None = None

    def make(self) -> ActorHandle[Model]:
        if self.refuses is not None:
            raise self.refuses
        link = FakeActor(len(self.links))
        self.links.append(link)
        return ActorHandle(link)  # type: ignore[arg-type]

    def live(self) -> None:
        for link in self.links:
            link.live()

    def end(self) -> None:
        for link in self.links:
            link.end()

    @property
    def loads(self) -> list[int]:
        """The number of calls of each actor."""
        return [len(link.calls) for link in self.links]

    @property
    def stories(self) -> list[list[str]]:
        return [link.story for link in self.links]


# Tasks that start others


class FakeChannel:
    """A worker's channel that records sent messages and returns one per read.

    Its pipe is readable as long as there is a message.
    """

    is_main_thread = True
    loans = None

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.coming: deque[Message] = deque()
        self.on_child = lambda _message: False
        self._reading, self._writing = os.pipe()

    def fileno(self) -> int:
        return self._reading

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def admit_guests(self, are_admitted: bool) -> None:
        pass

    def wait(self, _seconds: float | None) -> None:
        pass

    def read_ready(self, is_guest: bool = False) -> bool:
        assert is_guest
        if self.coming:
            os.read(self._reading, 1)
            self.on_child(self.coming.popleft())
        return True

    def put(self, *messages: Message) -> None:
        for message in messages:
            self.coming.append(message)
            os.write(self._writing, b".")

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)

    @property
    def waits(self) -> list[tuple[int, ...]]:
        """The children that the task waits for, after each report to the node."""
        waits: list[tuple[int, ...]] = []
        for message in self.sent:
            if isinstance(message, Wait):
                before = waits[-1] if waits and message.is_more else ()
                waits.append((*before, *message.children))
        return waits

    @property
    def submitted(self) -> list[int]:
        """The numbers of the started children."""
        return [message.child for message in self.sent if isinstance(message, Submit)]


def task_client_on(channel: FakeChannel) -> TaskClient:
    return TaskClient(channel)  # type: ignore[arg-type]


def start_children(count: int) -> list[Any]:
    """Start tasks inside a task; they are numbered from 1."""

    @aiogpu.remote
    def child() -> object: ...

    return [child.remote() for _ in range(count)]


def done(child: int, value: object = None) -> ChildDone:
    return ChildDone(child, dump_result(value))


def failed(child: int, error: BaseException) -> ChildFailed:
    return ChildFailed(child, *pack_failure(0, RAISED, error, "").why)
