"""Placements of a node without processes: who runs in one, and ends with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.core.model.request import BundleRef
from aiogpu.core.records import TaskState
from aiogpu.core.resources.placement_group import bundles_for, why_infeasible
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.errors import AiogpuError
from aiogpu.runtime.callers.leases import misfit, removed

if TYPE_CHECKING:
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.core.records import TaskRecord
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.engines.inline.job import Job
    from aiogpu.engines.inline.node import InlineNode
    from aiogpu.engines.inline.resident import Resident


class InlinePlacements:
    """Those that are held or asked for, and those that end.

    Attributes:
        names: of all of them, by key.
    """

    def __init__(self, node: InlineNode) -> None:
        self._node = node
        self.names: dict[str, str] = {}
        self._ending: dict[str, Lease] = {}

    def __repr__(self) -> str:
        return f"<InlinePlacements {list(self.names.values())}>"

    def refusal(self, spec: TaskSpec) -> AiogpuError | None:
        """Why nobody with this spec is taken; None if he is in none, or may be."""
        placement_group = spec.shape.request.placement_group
        if not isinstance(placement_group, BundleRef):
            return None
        if placement_group.key not in self.names:
            return removed(placement_group.name, spec.name, UNKNOWN)
        reason = why_infeasible(self._node.ledger, spec.shape.request)
        return None if reason is None else misfit(spec, reason)

    def open(self, key: str) -> None:
        """It is granted: who can never run in it is told."""
        for job in self._jobs_in(key):
            refusal = self.refusal(job.record.spec)
            if refusal is not None and job.record.state is TaskState.WAITING:
                _end(job, refusal)
                job.runner.stop(job)

    def remove(self, key: str, lease: Lease | None) -> None:
        """End those who are in it; what it holds is free when they have stopped."""
        name = self.names.pop(key)
        if lease is not None:
            self._ending[key] = lease
        for resident in self._residents_in(key):
            actor = resident.actor
            actor.fail(removed(name, actor.name, REMOVED))
            resident.kill()
        for job in self._jobs_in(key):
            _end(job, removed(name, job.name, REMOVED))
            job.runner.stop(job)

    def look(self) -> None:
        """Give back what nobody is in any more."""
        ledger = self._node.ledger
        for key, lease in list(self._ending.items()):
            if all(part.is_idle for part in bundles_for(ledger, BundleRef(key, ""))):
                del self._ending[key]
                ledger.give_back(lease)

    def members_of(self, record: TaskRecord) -> int:
        """Return how many tasks and actors were given one that have not ended."""
        placement_group = record.spec.shape.request.placement_group
        assert placement_group is not None, record
        actors = {one.actor.id for one in self._residents_in(placement_group.key)}
        return len({*actors, *(job.id for job in self._jobs_in(placement_group.key))})

    def _jobs_in(self, key: str) -> list[Job]:
        return [job for job in self._node.jobs.values() if _is_in(key, job.record.spec)]

    def _residents_in(self, key: str) -> list[Resident]:
        living = self._node.actors.living()
        return [one for one in living if _is_in(key, one.actor.site.spec)]


def _is_in(key: str, spec: TaskSpec) -> bool:
    placement_group = spec.shape.request.placement_group
    return isinstance(placement_group, BundleRef) and placement_group.key == key


def _end(job: Job, error: AiogpuError) -> None:
    job.call.tell(error)
    job.waiters = 0
