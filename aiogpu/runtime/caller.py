"""Who starts tasks over a socket: a worker for its task, or a client for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiogpu.core.model.ids import OWN, ClientId
from aiogpu.errors import AiogpuError, TaskCancelledError, WorkerDiedError

if TYPE_CHECKING:
    from aiogpu.runtime.actor import Actor
    from aiogpu.runtime.call import Site
    from aiogpu.runtime.lending import Lending
    from aiogpu.runtime.store import Store
    from aiogpu.runtime.transport import Peer
    from aiogpu.runtime.values import Value
    from aiogpu.wire.messages import Failed


@dataclass(slots=True, eq=False)
class Caller:
    """One connection by which tasks are started and values are lent.

    Attributes:
        id: no worker and no client has the same.
        pid: its process, 0 where that is not known.
        client: whose its tasks are that nobody else has started.
        program: what the workers of its tasks begin with; "" for the node's own.
        peer: its connection, None before and after.
        declared: what the tasks that it starts are, by its own numbers.
        children: those of them that have not ended, by its own numbers.
        asked: its unanswered calls of actors and their numbers, by its own.
        waits_for: for which of both a worker's task waits.
        waits_elsewhere: those of them that are no tasks of its own and have not come:
            calls of actors, and values.
        bound: for which of these its main thread waits; see `wire.messages.Wait`.
        holds: how often it counts as a holder of an actor, by the actor's id.
        carried: actors to which what it says next holds handles.
        store: lends it what its payloads refer to.
        lending: what it was lent, None for nothing so far.
        fetched: values that it has asked for and that have not come.
        actor: what it is, None for what is no actor.
    """

    id: int
    pid: int = field(default=0, kw_only=True)
    client: ClientId = field(default=OWN, kw_only=True)
    program: str = field(default="", kw_only=True)
    peer: Peer | None = field(default=None, kw_only=True)
    declared: dict[int, Site | Failed] = field(default_factory=dict, kw_only=True)
    children: dict[int, int] = field(default_factory=dict, kw_only=True)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    waits_for: tuple[int, ...] = field(default=(), kw_only=True)
    waits_elsewhere: set[int] = field(default_factory=set, kw_only=True)
    bound: tuple[int, ...] = field(default=(), kw_only=True)
    holds: dict[int, int] = field(default_factory=dict, kw_only=True)
    carried: tuple[int, ...] = field(default=(), kw_only=True)
    store: Store | None = field(default=None, kw_only=True)
    lending: Lending | None = field(default=None, kw_only=True)
    fetched: dict[int, Value] = field(default_factory=dict, kw_only=True)
    actor: Actor | None = field(default=None, kw_only=True)

    def borrow(self, payload: bytes) -> bytes:
        """The payload that it is sent; what that refers to is lent to it."""
        return payload if self.store is None else self.store.dispatch(self, payload)

    def return_loans(self) -> None:
        """It has ended, and has nothing any more."""
        if self.lending is None or self.store is None:
            return
        if self.client:
            # All its tasks are cancelled, and of a cancelled task nobody is told.
            error: AiogpuError = TaskCancelledError(
                "the task was stopped, since the program that had started it has ended."
            )
        else:
            error = WorkerDiedError(
                f"the result is lost: the worker (pid {self.pid}) that had started the "
                f"task ended before it had passed on what it was told. Let tasks that "
                f"hand on handles end by themselves.",
                self.pid,
            )
        self.store.forget(self.lending, error, is_all=bool(self.client))
