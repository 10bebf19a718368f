"""One call of an actor's method, as the driver knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.core.mailbox import CallId, Mailbox
from aiogpu.runtime.call import Receiver
from aiogpu.wire.messages import Invoke

if TYPE_CHECKING:
    from aiogpu.runtime.slot import LiveWorker


@dataclass(slots=True, eq=False)
class ActorCall:
    """See above.

    Attributes:
        receiver: None once nobody waits for it.
        retries_left: how often it is tried again whose process has died; -1 is
            without end.
        limit: of a stream, how many items it may yield in all; 0 for other calls.
        passed: how many have come.
        known_as: the number under which its caller knows it, if that is another one.
    """

    method: str
    payload: bytes
    receiver: Receiver | None
    retries_left: int
    mailbox: Mailbox
    limit: int = 0
    passed: int = 0
    known_as: CallId = 0

    def order(self, number: CallId, worker: LiveWorker) -> Invoke:
        """What its process is told; what its payload refers to is lent to that."""
        payload = self.payload
        if type(payload) is not bytes:
            payload = worker.borrow(payload)
        return Invoke(number, self.method, payload, self.limit, self.passed)
