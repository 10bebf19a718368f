"""The current task of this thread or loop, and its client.

`current` is one object per process, since a worker runs one task at a time; all threads
and coroutines of the task share it. On an inline node, where tasks run in the program's
process, a context variable holds the client of each task (`inline_client`). This module
does not import asyncio, which plain functions do not need.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

from aiogpu.errors import MisuseError, NodeError

if TYPE_CHECKING:
    from aiogpu.client.interface import ActorClient, Client, InlineClient


class ActorExit(BaseException):
    """Raised by `exit_actor()`; not an `Exception`, so `except Exception` lets it pass.

    A method may still swallow it, by `except BaseException` or a bare `except`. So
    `exit_actor()` also records the call, and `has_exited()` is checked after the method
    has returned.
    """


def _goes_on(_task: int) -> bool:
    return False


class Context:
    """Facts about this process and its current task.

    Attributes:
        actor: the actor's number if this process is an actor, else None.
        loader: the thread that unpickles a function, a class or arguments or preloads
            modules, which may import modules; 0 for none.
        node: id of the node, "" in a process that is no worker.
        home: the node to which the numbers of actors refer; "" for this process's own.
        worker: id of the worker, 0 in a process that is no worker.
        task: id of the running task, 0 between tasks.
        name: the running task's name.
        resources: resources of the running task, `{"CPU": 1.0, "GPU": 0.25}`.
        accelerators: device ids by kind, `{"GPU": (0,)}`.
        client: the client of the running task; None in a process that is no worker.
        is_stopping: returns True for a task if it, its program or its node is to stop.
        exits: the asyncio tasks and threads in which `exit_actor()` was called.
    """

    __slots__ = (
        "accelerators",
        "actor",
        "client",
        "exits",
        "home",
        "is_stopping",
        "loader",
        "name",
        "node",
        "resources",
        "task",
        "worker",
    )

    def __init__(self) -> None:
        self.actor: int | None = None
        self.loader = 0
        self.node = ""
        self.home = ""
        self.worker = 0
        self.task = 0
        self.name = ""
        self.resources: Mapping[str, float] = {}
        self.accelerators: Mapping[str, tuple[int | str, ...]] = {}
        self.client: ActorClient | None = None
        self.is_stopping: Callable[[int], bool] = _goes_on
        self.exits: set[object] = set()

    @property
    def is_loading(self) -> bool:
        """True while this thread loads code for a task, which may import modules."""
        return self.loader == get_ident()


def _running_code() -> object:
    """Return the asyncio task that runs in this thread, else the thread's id."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task: object = asyncio.current_task()
        if task is not None:
            return task
    return get_ident()


def note_exit() -> None:
    """Record that the running method has called `exit_actor()`."""
    current.exits.add(_running_code())


def has_exited() -> bool:
    """Return True once if the method that just ended here called `exit_actor()`.

    Check `current.exits` first: it is empty in almost every process.
    """
    running = _running_code()
    if running not in current.exits:
        return False
    current.exits.remove(running)
    return True


method_called: Final = ContextVar("aiogpu_method", default=("", 0))
"""The running call of an actor: its method's name on the wire (see `worker.chunk`) and
its number."""


current = Context()
"""The context of this process."""


decorated: Final[WeakSet[Any]] = WeakSet()
"""What this process has decorated, each with its function or class as `function`."""


inline_client: Final[ContextVar[InlineClient | None]] = ContextVar(
    "inline_client", default=None
)
"""The client of the running task on an inline node; else None."""


class ProxyMaker(Protocol):
    """Makes objects for code without an event loop; see `api.portal`."""

    def wrap(self, target: Any) -> Any:
        """Return the object that such code uses instead of `target`."""


proxy_maker: Final[ContextVar[Any]] = ContextVar("proxy_maker", default=None)
"""The `ProxyMaker` while this code runs or unpickles for code without an event loop;
else None."""


def for_consumer(restored: Any) -> Any:
    """Return an unpickled handle, actor or queue as the code that gets it can use it.

    Tasks of an inline node may inherit the context of a program without a loop.
    """
    maker: ProxyMaker | None = proxy_maker.get()
    if maker is None or is_in_task():
        return restored
    return maker.wrap(restored)


def is_loop_running() -> bool:
    """Return whether an event loop runs in this thread; does not import asyncio."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def is_in_task() -> bool:
    """Return whether the caller is code of a task, on any kind of node."""
    return current.client is not None or inline_client.get() is not None


def client_of_caller() -> Client | None:
    """Return the client of the running code; None for code that uses a session.

    Coroutines of an inline node run on the program's loop, and use its session.
    """
    client = inline_client.get()
    if client is None:
        return current.client
    asyncio = sys.modules["asyncio"]
    return None if asyncio._get_running_loop() is client.program else client


def client_of_process() -> ActorClient:
    """Return the client of the task or actor in this process.

    Raises:
        NodeError: no task runs in this process.
    """
    if current.client is None:
        raise NodeError("no task of aiogpu runs in this process, or in this thread.")
    return current.client


def client_of_task() -> Client:
    """Return the client of the task that calls this, on any kind of node.

    Raises:
        NodeError: the caller is not code of a task.
    """
    return inline_client.get() or client_of_process()


def check_task_runs(name: str) -> None:
    """Refuse a request of a task that has ended.

    Args:
        name: name of the function or method that is called.

    Raises:
        MisuseError: the task has ended.
    """
    if not current.task:
        raise MisuseError(
            f"{name}.remote() was called after the task had ended, by a thread that "
            f"the task left running."
        )


def no_call_to_report() -> MisuseError:
    """Make the error for a report that belongs to no task or call."""
    return MisuseError(
        "aiogpu.report() was called outside a task or method: in an actor's "
        "constructor, in a thread that a method has started, or in a thread that "
        "outlives its task. Call it in the task or method itself."
    )


def error_inside_task(what: str) -> NodeError:
    """Make the error for a request that only the node's program may make."""
    return NodeError(
        f"{what} was called inside a task; only the program that opened the node may "
        f"call it. Inside a task, aiogpu.get_runtime_context() shows its resources."
    )
