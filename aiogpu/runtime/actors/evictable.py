"""An actor that leaves the node while nobody calls it and others need its resources.

The core chooses the actors that leave (`scheduler.contention.eviction`). The process of
such an actor ends as if the actor did, but the actor lives on: it keeps its handles,
its name and its restarts. Its next call waits until it has a process again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.core.mailbox import CallId, Mailbox
from aiogpu.core.model.ids import TaskId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.actors.actor import Actor, ActorState, died
from aiogpu.wire import messages as wire

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.scheduler.scheduler import Feed
    from aiogpu.errors import ActorDiedError
    from aiogpu.runtime.actors.actor import Register


class EvictableActor(Actor):
    """An actor with the option `evict_after`.

    Attributes:
        kept: what `on_evict` has returned, for the next process; b"" for nothing.
        is_returning: it has left, and waits for its next process.
    """

    def __init__(
        self,
        func: FunctionSpec,
        owner: Register,
        key: tuple[str, str] | None,
        feed: Feed,
    ) -> None:
        super().__init__(func, owner, key)
        self.kept = b""
        self.is_returning = False
        self._feed = feed
        self._is_resting = False
        self._stays_until = 0.0

    @property
    def _has_work(self) -> bool:
        # Calls that wait for an argument are no reason to stay: the task that makes
        # the argument may need what the actor holds.
        return any(map(len, self.mailboxes.values()))

    def on_created(self) -> None:
        """Handle that the constructor has returned."""
        super().on_created()
        self.kept = b""
        after = self.terms.evict_after
        assert after is not None, self
        self._stays_until = asyncio.get_running_loop().time() + after
        self._rest_if_idle()

    def on_answer(self, answer: wire.Done | wire.Failed) -> None:
        """Handle the answer to a call."""
        super().on_answer(answer)
        self._rest_if_idle()

    def cancel(self, number: CallId) -> bool:
        """Cancel a call; return True if its process must be notified."""
        must_notify = super().cancel(number)
        self._rest_if_idle()
        return must_notify

    def _rest_if_idle(self) -> None:
        is_idle = self.state is ActorState.ALIVE and not self._has_work
        if is_idle and not self._is_resting:
            self._is_resting = True
            self._feed(Scheduler.rest, TaskId(self.id), self._stays_until)

    def post(self, number: CallId, mailbox: Mailbox) -> None:
        """Send a call, or queue it until there is a process."""
        super().post(number, mailbox)
        if self._is_resting:
            self._stir()
        elif self.state is ActorState.EVICTED and self.worker is None:
            self._return()

    def _stir(self) -> None:
        self._is_resting = False
        self._feed(Scheduler.stir, TaskId(self.id))

    def evict(self) -> None:
        """Tell the process to end; calls from here on wait for the next process."""
        worker = self.worker
        if self._has_work or worker is None or worker.peer is None:
            return  # the core is about to hear of it
        self.state, self._is_resting = ActorState.EVICTED, False
        for mailbox in self.mailboxes.values():
            mailbox.is_open = False
        worker.peer.send(wire.Leave(is_eviction=True))

    def lose(self, begun: CallId) -> list[Receiver]:
        """Note that the process has ended, perhaps while it was leaving."""
        is_leaving = self.state is ActorState.EVICTED
        receivers = super().lose(begun)
        if is_leaving and self.state is ActorState.PENDING:
            self.state = ActorState.EVICTED
        elif self._is_resting:
            self._stir()
        return receivers

    def on_evicted(
        self, answer: wire.Done | wire.Failed | None
    ) -> ActorDiedError | None:
        """Handle that the process has left.

        Args:
            answer: its last message, with what `on_evict` has returned or raised; None
                if it has died before.

        Returns:
            The error by which the actor is to end; None if it lives on.
        """
        self.evictions += 1
        # From here on the messages of this process change nothing.
        self.worker = None
        if self.state is not ActorState.EVICTED:
            return None  # it was killed meanwhile
        if isinstance(answer, wire.Failed):
            raised = f"{answer.type_name}: {answer.message}".rstrip(": ")
            return died(self.name, f"its on_evict() has raised {raised}.")
        if self.terms.keeps_state and answer is not None:
            self.kept = answer.payload
        elif self.terms.keeps_state:
            # What `on_evict` would have returned is lost, as in any other death.
            self._feed(Scheduler.use_restart, TaskId(self.id))
        if self._has_work:
            self._return()
        else:
            self.end_if_idle()
        return None

    def _return(self) -> None:
        if self.state is ActorState.EVICTED:
            self.state, self.is_returning = ActorState.PENDING, True
            self._feed(Scheduler.bring_back, TaskId(self.id))

    def die(self, why: Exception | wire.Failed) -> None:
        """Mark the actor as dead, and fail all present and later calls."""
        self.kept = b""
        super().die(why)

    def leave(self, why: str) -> None:
        """Tell the process to end after the calls that it was sent, for good."""
        if self.state is ActorState.EVICTED:
            self.state = ActorState.ALIVE  # it ends already; it will not come back
        super().leave(why)
