"""The placements of one node: who has asked is told, and so is who was in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.errors import InfeasibleError, PlacementRemovedError

if TYPE_CHECKING:
    from aiogpu.core.effects import Granted
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.core.queue.sharded_dict import ShardedDict
    from aiogpu.runtime.call import Call
    from aiogpu.runtime.leases import LeaseReceiver


class Placements:
    """See above."""

    def __init__(self, calls: ShardedDict[Call]) -> None:
        self._calls = calls
        self._held: dict[TaskId, tuple[WorkerId, int]] = {}

    def __repr__(self) -> str:
        return f"<Placements {len(self.pids)} held>"

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the programs that have asked for them, by holder."""
        for task in list(self._held):
            if task not in self._calls:
                del self._held[task]
        return {int(holder): pid for holder, pid in self._held.values()}

    def grant(self, effect: Granted) -> None:
        """Tell who has asked for a placement that all its bundles are held."""
        receiver = cast("LeaseReceiver", self._calls[effect.task].receiver)
        self._held[effect.task] = effect.holder, receiver.pid
        receiver.receive(b"")


def removed(placement: str, name: str, reason: str) -> PlacementRemovedError:
    """The error of what was to run in a placement, or did."""
    return PlacementRemovedError(
        f"{placement}, the placement of {name}, {reason}; {name} ends with it.",
        placement,
    )


def misfit(spec: TaskSpec, reason: str) -> InfeasibleError:
    """The error of what can never run in the bundles of its placement."""
    return InfeasibleError(
        f"{spec.name} asks for {spec.shape.request}, and can never run there: "
        f"{reason}. Ask for less, or for a placement that has it."
    )
