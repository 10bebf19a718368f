"""What the driver keeps of a task while the core decides about its id.

A `Site` is built once per function and options, a `Call` once per task. The
`Receiver` is whoever waits: the driver tells it exactly one thing, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.errors import (
    DeadlockError,
    NodeClosedError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.runtime.receiver import ItemReceiver as ItemReceiver  # noqa: PLC0414
from aiogpu.runtime.receiver import Receiver as Receiver  # noqa: PLC0414
from aiogpu.runtime.receiver import pass_on as pass_on  # noqa: PLC0414
from aiogpu.runtime.receiver import tell_safely
from aiogpu.serialization.serializer import RETRY_NONE, Retried, dump_whole
from aiogpu.wire.messages import Run

if TYPE_CHECKING:
    from aiogpu.core.model.request import Request, TaskSpec
    from aiogpu.runtime.slot import LiveWorker
    from aiogpu.wire.messages import Done, Failed

_NO_WINDOWS: Final[Mapping[str, int]] = {}
_site_ids: Final = count(1)
_function_ids: Final = count(1)


@dataclass(slots=True, eq=False)
class Function:
    """A function as workers get it: sent once to each, known by its id."""

    id: int
    payload: bytes


def new_function_id() -> int:
    """An id for a function; no two functions of this process share one."""
    return next(_function_ids)


class ActorTerms(NamedTuple):
    """What all actors of a class with its options have in common.

    Attributes:
        mode: how calls are run; see `wire.acting`.
        limits: by group, how many calls run at once.
        groups: by method, its group, where it is not the default one.
        windows: by method that is a generator, how many items it may be ahead.
        max_task_retries: how often a call is tried again whose process has died.
        keeps_cpus: whether it holds its CPUs for as long as it lives.
        face: what handles to it are made of: the program's own, or pickled by another
            process; nobody here looks at it.
    """

    mode: str
    limits: Mapping[str, int]
    groups: Mapping[str, str]
    max_task_retries: int = 0
    keeps_cpus: bool = False
    face: object = None
    windows: Mapping[str, int] = _NO_WINDOWS

    def packed_face(self) -> bytes:
        """The face as other processes get it."""
        return self.face if type(self.face) is bytes else dump_whole(self.face)


@dataclass(slots=True, eq=False)
class Site:
    """A function with its options, as all its calls share it.

    Attributes:
        id: known to workers by this.
        function: what is run.
        spec: what the core is asked for.
        resources: the request in the user's terms, for the task to ask about.
        environ: variables of `runtime_env`.
        is_coroutine: whether it is cancelled by a message first.
        retry_exceptions: exceptions after which it is tried again, True for all, where
            it runs in this process.
        retried: the same for workers; see `wire.retried`.
        checked_by: who has found last that the request can be met.
        actor: how its calls are run, if it is a class.
        window: if it is a generator, how many items it may be ahead; else 0.
    """

    id: int
    function: Function
    spec: TaskSpec
    resources: Mapping[str, float]
    environ: Mapping[str, str]
    is_coroutine: bool
    retry_exceptions: Retried = False
    retried: bytes = RETRY_NONE
    checked_by: object = None
    actor: ActorTerms | None = None
    window: int = 0

    def holding(self, request: Request) -> Site:
        """The same for a call that holds more than was asked for; its spec stays."""
        return replace(self, id=new_site_id(), resources=request.as_numbers())


def new_site_id() -> int:
    """An id for a site; no two sites of this process share one."""
    return next(_site_ids)


@dataclass(slots=True, eq=False)
class Call:
    """One task: its arguments going out, its answer coming back.

    Attributes:
        receiver: None once it has been told how the task ended.
        client: the program that has submitted it.
        worker: id of the worker that it was sent to last.
        number: under which it was sent.
        answer: what that worker said.
        limit: of a stream, how many items it may yield in all.
        passed: how many have come.
    """

    site: Site
    payload: bytes
    receiver: Receiver | None
    client: int = 0
    worker: int = 0
    number: int = 0
    answer: Done | Failed | None = None
    limit: int = 0
    passed: int = 0

    def run(self, task: int, is_last: bool, worker: LiveWorker) -> Run:
        """What its worker is told; what its payload refers to is lent to that."""
        site, payload = self.site, self.payload
        if type(payload) is not bytes:
            payload = worker.borrow(payload)
        if not site.window:
            return Run(task, site.id, payload, is_last, self.number)
        limit = self.limit or site.window
        return Run(task, site.id, payload, is_last, self.number, limit, self.passed)

    def send_to(self, worker: int, number: int) -> None:
        """Note that it goes to a worker now; what another one said is void."""
        self.worker, self.number = worker, number
        self.answer = None

    def tell(self, error: Exception) -> None:
        """Tell who waits that there will be no result; he is told no more."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            tell_safely(receiver, error)

    def tell_timeout(self) -> TaskTimeoutError:
        """Tell who waits that its time is up; gives what he is told."""
        spec = self.site.spec
        error = TaskTimeoutError(
            f"{spec.name} did not end within its timeout of {spec.timeout:g} s "
            f"after .remote(); it is being stopped."
        )
        self.tell(error)
        return error

    def tell_deadlock(self, reason: str) -> None:
        """Tell who waits that the wait could never end."""
        self.tell(
            DeadlockError(
                f"{reason}. The wait could never end. Let the one that waits ask for "
                f"less, or end before it starts the other."
            )
        )

    def tell_disowned(self) -> None:
        """Tell who waits that the task ends with the one that has started it."""
        self.tell(
            TaskCancelledError(
                f"{self.site.spec.name} was stopped, since the task that had started "
                f"it has ended or is being stopped."
            )
        )

    def tell_closed(self) -> None:
        """Tell who waits that the node was shut down."""
        name = self.site.spec.name
        self.tell(NodeClosedError(f"the node was shut down before {name} had ended."))
