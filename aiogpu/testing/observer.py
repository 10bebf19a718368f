"""A node of paper as it can be seen: who runs, who waits, who was told what."""

from __future__ import annotations

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.core.records import TaskState, WorkerState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing.simulated import News, PaperTask, PaperWorker


class Onlooker:
    """Sees a scheduler and the paper that it moves, and holds one to the other.

    Attributes:
        scheduler: the scheduler under test.
        tasks: all tasks ever submitted, by name.
        workers: the workers that are not gone, by id.
        leases: the holders of leases that were granted and not given back, by name.
        placement_groups: the same of placement groups.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tasks: dict[str, PaperTask] = {}
        self.workers: dict[WorkerId, PaperWorker] = {}
        self.leases: dict[str, WorkerId] = {}
        self.placement_groups: dict[str, WorkerId] = {}
        self._by_id: list[PaperTask] = []

    @property
    def running(self) -> set[str]:
        """Tasks that a worker has begun and not answered."""
        return {w.task.spec.name for w in self.workers.values() if w.task}

    @property
    def queued(self) -> set[str]:
        """Tasks that a worker was sent ahead."""
        return self._in_state(TaskState.QUEUED)

    @property
    def blocked(self) -> set[str]:
        """Tasks that wait for others and hold no CPU meanwhile."""
        return self._in_state(TaskState.BLOCKED)

    @property
    def starting(self) -> set[str]:
        """Tasks that hold resources while their worker is being forked."""
        return self._in_state(TaskState.STARTING)

    @property
    def waiting(self) -> set[str]:
        """Tasks that hold nothing yet."""
        return self._in_state(TaskState.WAITING)

    @property
    def unsettled(self) -> list[WorkerId]:
        """Workers that have gone and whose devices were not seen free yet."""
        settling = WorkerState.SETTLING
        return [one.id for one in self.scheduler.holders if one.state is settling]

    def _in_state(self, state: TaskState) -> set[str]:
        return {r.spec.name for r in self.scheduler.tasks.values() if r.state is state}

    @property
    def told(self) -> dict[str, News]:
        """What the owners were told, by task."""
        return {name: task.news for name, task in self.tasks.items() if task.news}

    @property
    def forgotten(self) -> set[str]:
        """Tasks that ended while nobody waited for them any more."""
        return {name for name, task in self.tasks.items() if task.is_forgotten}

    @property
    def free_gpus(self) -> list[float]:
        """The share of each GPU that nobody holds."""
        return [part / UNIT for part in self.scheduler.ledger.device_sets[GPU].free]

    @property
    def free(self) -> dict[str, float]:
        """How much of each resource nobody holds."""
        return self.scheduler.ledger.available()

    def gpus_of(self, name: str) -> list[int]:
        """The GPUs that the task got when it was last sent to a worker."""
        return list(self.tasks[name].gpus)

    def worker_of(self, whom: str | int) -> WorkerId:
        """The worker that a task holds; an id stands for itself."""
        if isinstance(whom, int):
            assert whom in self.workers, f"there is no worker {whom}"
            return WorkerId(whom)
        record = self.scheduler.tasks.get(self.tasks[whom].id)
        worker = record.worker if record else None
        assert worker is not None, f"{whom!r} has no worker"
        return worker.id

    def check(self) -> None:
        """Assert that the scheduler's picture is sound, and agrees with this one."""
        self.scheduler.check()
        held = {*self.leases.values(), *self.placement_groups.values()}
        known_workers = {holder.id for holder in self.scheduler.holders}
        assert known_workers == {*self.workers, *held, *self.unsettled}
        states = (
            *(TaskState.QUEUED, TaskState.RUNNING, TaskState.BLOCKED),
            TaskState.STOPPING,
        )
        known = set().union(*map(self._in_state, states))
        seen = [t for w in self.workers.values() for t in (*w.sent, *w.void)]
        names = {task.spec.name for task in seen} | self.leases.keys()
        names |= self.placement_groups.keys()
        assert known == names, (known, names)
        assert len(seen) + len(held) == len(names), "a task was sent to two workers"
        for task in self._by_id:
            is_over = task.is_forgotten or task.news == "settled"
            assert is_over == (task.id not in self.scheduler.tasks), task
