"""A call of an actor's method, while its code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiogpu.core.records import WorkerRecord
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.worker.chunk import method_of, plain_name

if TYPE_CHECKING:
    from aiogpu.engines.inline.execute import Executor
    from aiogpu.engines.inline.resident import Resident


@dataclass(slots=True, eq=False)
class Invocation(Job):
    """See above.

    Attributes:
        resident: the actor's object.
        method: name of the method.
    """

    resident: Resident = field(kw_only=True)
    method: str = field(kw_only=True)

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"{self.record.spec.name}.{self.method}"

    @property
    def task_name(self) -> str:
        """What its code is told that it is called."""
        return f"{self.record.spec.name}.{plain_name(self.method)}"

    @property
    def actor_id(self) -> int:
        """The number of the actor whose method it is."""
        return self.resident.actor.id

    @property
    def at_work(self) -> WorkerRecord | None:
        """What stands for the actor's process."""
        record = self.resident.record
        return record.worker if record is not None else None

    def function(self, executor: Executor) -> Callable[..., Any]:
        """The method; where it cannot be had, the call raises why."""
        resident, method = self.resident, self.method

        def call(*args: Any, **kwargs: Any) -> Any:
            return method_of(resident.object, method)(*args, **kwargs)

        return call

    def tell(self, outcome: Outcome) -> None:
        """Tell the caller what has come of it."""
        self.resident.answer(outcome)

    def pass_item(self, payload: bytes) -> None:
        """Give an item to the caller."""
        asked = self.resident.actor.calls.get(self.id)
        self.call.receiver = None if asked is None else asked.receiver
        if asked is not None:
            asked.passed += 1
        Job.pass_item(self, payload)  # slots have made this another class

    def on_end(self) -> None:
        """Its code has stopped: the next call may run."""
        self.resident.on_call_ended(self)
