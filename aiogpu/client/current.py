"""The current task of this thread or loop, and the client that serves it.

One value per process, since a worker runs one task at a time; the threads and
coroutines of that task see the same. Where tasks share their program's process, a
context variable has the client of each (`inline_client`). Light to import: asyncio
stays out, since plain functions need none.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from aiogpu.errors import MisuseError, NodeError

if TYPE_CHECKING:
    from aiogpu.client.interface import ActorClient, Client, InlineClient


class ActorExit(BaseException):
    """Raised by `exit_actor()`; not an `Exception`, so `except Exception` lets it by.

    A method may swallow it all the same, by `except BaseException` or a bare `except`.
    `exit_actor()` therefore notes the call as well, and `has_exited()` is asked when
    the method has returned.
    """


def _goes_on(_task: int) -> bool:
    return False


class Context:
    """The worker's and its current task's facts.

    Attributes:
        actor: the actor's number if this process is an actor, else None.
        loader: the thread that unpickles a function, a class or arguments, which may
            import their modules, or preloads some; 0 for none.
        node: id of the node, empty in a process that is no worker.
        home: the node whose actors' numbers are meant here; "" where none has others'.
        worker: id of the worker, 0 in a process that is none.
        task: id of the running task, 0 between tasks.
        name: the running task's name.
        resources: what it holds, `{"CPU": 1.0, "GPU": 0.25}`.
        accelerators: device ids by kind, `{"GPU": (0,)}`.
        client: the client of the running task; None in a process that is no worker.
        is_stopping: tells of a task whether it, its program or its node is to stop.
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
        """True if this thread imports modules, or may, for a task that is to begin."""
        return self.loader == get_ident()


def _running_code() -> object:
    """The asyncio task that runs in this thread; without one, the thread's id."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task: object = asyncio.current_task()
        if task is not None:
            return task
    return get_ident()


def note_exit() -> None:
    """Note that the running method has called `exit_actor()`."""
    current.exits.add(_running_code())


def has_exited() -> bool:
    """Return True once if the method that just ended here called `exit_actor()`.

    Ask `current.exits` first: it is empty in almost every process.
    """
    running = _running_code()
    if running not in current.exits:
        return False
    current.exits.remove(running)
    return True


method_called: Final = ContextVar("aiogpu_method", default=("", 0))
"""What an actor's running call names as its method, with what `worker.chunk` adds, and
the call's number."""


current = Context()
"""The context of this process."""


inline_client: Final[ContextVar[InlineClient | None]] = ContextVar(
    "inline_client", default=None
)
"""The client of the task whose code asks, on an inline node; else None."""


inline_report: Final[ContextVar[Callable[[bytes], object] | None]] = ContextVar(
    "inline_report", default=None
)
"""Takes the reports of the task or call whose code runs, on an inline node; else None.
"""


def is_loop_running() -> bool:
    """Return whether an event loop runs in this thread; imports nothing to find out."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def is_in_task() -> bool:
    """Return whether code of a task asks, wherever that task runs."""
    return current.client is not None or inline_client.get() is not None


def client_of_caller() -> Client | None:
    """The client that makes requests for the running code; None where a session does.

    Coroutines of an inline node run on the program's loop, and use its session.
    """
    client = inline_client.get()
    if client is None:
        return current.client
    asyncio = sys.modules["asyncio"]
    return None if asyncio._get_running_loop() is client.program else client


def client_of_process() -> ActorClient:
    """The client of the task or actor that has this process.

    Raises:
        NodeError: it is no process of a task.
    """
    if current.client is None:
        raise NodeError("no task of aiogpu runs in this process, or in this thread.")
    return current.client


def client_of_task() -> Client:
    """The client of the task whose code asks, wherever that task runs.

    Raises:
        NodeError: it is no code of a task.
    """
    return inline_client.get() or client_of_process()


def check_task_runs(name: str) -> None:
    """Refuse a request that nobody would get the answer of.

    Args:
        name: of the function or method that is called.

    Raises:
        MisuseError: the task has ended.
    """
    if not current.task:
        raise MisuseError(
            f"{name}.remote() was called after the task had ended, by a thread that it "
            f"has left behind."
        )


def no_call_to_report() -> MisuseError:
    """The error for a report that would belong to no task or call."""
    return MisuseError(
        "aiogpu.report() was called where no task or method runs to which it would "
        "belong: in an actor's constructor, or in a thread that outlives its task or "
        "that a method has started. Call it in the task or method itself."
    )


def error_inside_task(what: str) -> NodeError:
    """The error for what only a program may ask of its node."""
    return NodeError(
        f"{what} was called inside a task; only the program that has opened the node "
        f"can ask it. Inside a task, aiogpu.get_runtime_context() tells what it holds."
    )
