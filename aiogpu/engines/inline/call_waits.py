"""Which code of tasks and methods waits for calls of actors, and when it is in vain.

The program's own waits are not among them: while it waits, its loop runs, and what
runs there may end any wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.engines.inline.job import Job, running_job
from aiogpu.errors import DeadlockError

if TYPE_CHECKING:
    from aiogpu.engines.inline.node import InlineNode
    from aiogpu.engines.inline.residents import Residents
    from aiogpu.runtime.actors.actor import Actor


class CallWaits:
    """See above."""

    def __init__(self, node: InlineNode, actors: Residents) -> None:
        self._node = node
        self._actors = actors
        self._waiting: dict[int, Job] = {}

    def __repr__(self) -> str:
        return f"<CallWaits {self._waiting!r}>"

    def begin(self, number: int) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""
        actor, job = self._actors.called_by(number), running_job.get()
        resident = None if actor is None else self._actors.life(actor.id)
        if actor is None or resident is None:
            return
        if job is not None:
            self._waiting[number] = job
            if resident.peer is None:
                # What does not fit may now be what can never begin.
                resident.creation.waiters = 1
                self._node.wake()
        if resident.is_busy_below:
            method = actor.calls[number].method
            self._fail(
                actor,
                number,
                f"{actor.name}.{method} was called by code for which a method of "
                f"{actor.name} waits, and these run one at a time. Call it directly, "
                f"by self, or let the first one return before.",
            )

    def end(self, number: int) -> None:
        """Nobody waits for a call any more."""
        self._waiting.pop(number, None)

    def are_by(self, job: Job) -> bool:
        """Return whether this job's code waits for a call."""
        return job in self._waiting.values()

    def fail(self, actor: Actor, reason: str) -> None:
        """Tell the code that waits for calls of an actor that it waits in vain."""
        for number in list(actor.calls):
            if number in self._waiting:
                self._fail(actor, number, f"{reason}. The wait could never end.")

    def _fail(self, actor: Actor, number: int, why: str) -> None:
        receiver = actor.calls[number].receiver
        self._actors.cancel(actor.id, number)
        if receiver is not None:
            receiver.fail(DeadlockError(why))
