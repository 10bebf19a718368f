"""The making of an actor: the job whose turn it is when a constructor runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiogpu.core.model.ids import WorkerId
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.engines.inline.execute import Executor
    from aiogpu.engines.inline.resident import Resident


@dataclass(slots=True, eq=False)
class Creation(Job):
    """See above.

    Attributes:
        resident: what is made; it keeps what the job holds.
    """

    resident: Resident = field(kw_only=True)

    @property
    def actor_id(self) -> int:
        """The number of the actor that it makes."""
        return self.id

    def worker_id(self, depth: int) -> WorkerId:
        """By which number its code and `status()` know where it runs."""
        return self.resident.worker_id

    def function(self, executor: Executor) -> Callable[..., Any]:
        """What makes the object and keeps it; raises what unpickling the class does."""
        cls, resident = executor.function(self.call.site), self.resident

        def make(*args: Any, **kwargs: Any) -> None:
            resident.object = cls(*args, **kwargs)

        return make

    def tell(self, outcome: Outcome) -> None:
        """Tell who waits for the actor that it was made, or why it never will be."""
        self.call.receiver = None
        if type(outcome.answer) is Failed:
            error = unpack_failure(outcome.answer, self.name)
            outcome.show_frames(error)
            self.resident.actor.break_down(outcome.answer, error)
        else:
            self.resident.on_made()

    def fail_wait(self, reason: str) -> bool:
        """Tell who waits for calls; the program may still place the actor."""
        self.waiters = 0
        self.resident.fail_waits(reason)
        return False

    def on_end(self) -> None:
        """The constructor has ended, or never began."""
        self.resident.on_creation_ended()
