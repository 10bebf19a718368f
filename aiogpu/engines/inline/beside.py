"""The generators that run beside the turns: their consumers run in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.engines.inline.job import acting_job

if TYPE_CHECKING:
    from contextvars import Context

    from aiogpu.engines.inline.job import Job
    from aiogpu.engines.inline.turns import Turns
    from aiogpu.worker.streams import StreamSender


class Beside:
    """See above.

    Attributes:
        flows: the ways out for their items, by the task's or call's number; also of
            generators of actors, which have no turns.
        jobs: those that have left their turn, in that order.
    """

    def __init__(self, turns: Turns) -> None:
        self.flows: dict[int, StreamSender] = {}
        self.jobs: dict[int, Job] = {}
        self._turns = turns

    def __repr__(self) -> str:
        return f"<Beside {list(self.jobs.values())!r}>"

    def enter(self, job: Job, context: Context) -> None:
        """A job has just begun, and is a generator: others take their turns.

        Args:
            job: the job.
            context: in which its code runs; what it starts runs on top of whatever
                runs then, as what methods of actors start.
        """
        assert job.surroundings is not None, job
        self._turns.running.remove(job)
        job.surroundings.take_off()
        job.worn = job.surroundings.again()
        context.run(acting_job.set, job)
        self.jobs[job.id] = job

    def bring_back(self, job: Job) -> None:
        """If a job has entered, have it lie on top again: it is tried once more."""
        if self.leave(job):
            assert job.surroundings is not None, job
            self._turns.running.append(job)
            job.surroundings.put_on()
            job.worn = None

    def leave(self, job: Job) -> bool:
        """An attempt at a job has ended; False if it had not entered."""
        job.flow = None
        self.flows.pop(job.id, None)
        return self.jobs.pop(job.id, None) is not None

    def rise(self, task: int, limit: int) -> None:
        """Let a generator yield so many items in all."""
        flow = self.flows.get(task)
        if flow is not None:
            flow.rise(limit)
