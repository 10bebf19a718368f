"""A scheduler with paper workers, paper GPUs and a clock that is moved by hand.

A test tells `World` what happens, in the words of a story, and reads what came of
it. `World` does what the scheduler asks for, with no process and no wait, and after
every step holds the scheduler to its promises: its own `check()`, and what only an
onlooker can see (a worker never changes its devices, an owner is told once).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from aiogpu.core import effects, events
from aiogpu.core.devices import Device, DeviceSet
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.pace import Pace
from aiogpu.core.policy import Patience
from aiogpu.core.records import binding_of
from aiogpu.core.resources import (
    CPU,
    GPU,
    TYPE_PREFIX,
    UNIT,
    Request,
    device_quantity,
    quantity,
)
from aiogpu.core.scheduler import Scheduler
from aiogpu.core.specs import Environment, Shape, TaskSpec
from aiogpu.errors import InfeasibleError
from aiogpu.testing.clock import HandClock
from aiogpu.testing.onlooker import Onlooker
from aiogpu.testing.paper import NEWS, PaperTask, PaperWorker


class World(Onlooker):
    """A node on paper: `w.submit("a"); w.finish("a"); assert w.told["a"]`.

    A forked worker starts, one that is to end goes, and what is to be taken back is
    back, at once. A test that wants to be there in between says `starts=False`,
    `exits=False` or `revokes=False`, and calls `start()`, `die()` or `revoked()`.

    Attributes:
        clock: the time. Move it by `advance`, which wakes the scheduler on the way.
        starts: whether a forked worker connects at once.
        exits: whether a worker that is killed, retired or done is gone at once.
        revokes: whether what is taken back is known at once.
        settles: whether the devices of a worker that has gone must be seen free.
        took: seconds that each task says it took.
        effects: what the scheduler answered to the last call, in order.
        retired, killed: ids of workers that were told to exit, or killed, in order.
    """

    def __init__(  # noqa: PLR0913 - the figures that a node is given
        self,
        cpus: float = 16,
        gpus: int = 0,
        *,
        gpu_types: Sequence[str] = (),
        resources: Mapping[str, float] | None = None,
        patience: Patience | None = None,
        starts: bool = True,
        exits: bool = True,
        revokes: bool = True,
        took: float = 0.0,
        clock: HandClock | None = None,
    ) -> None:
        types = dict(enumerate(gpu_types))
        devices = [Device(i, types.get(i)) for i in range(gpus or len(types))]
        scalars = _amounts({CPU: cpus, **(resources or {})})
        scalars.update({TYPE_PREFIX + name: UNIT for name in gpu_types})
        ledger = Ledger(scalars, [DeviceSet(GPU, devices)])
        self.clock = clock or HandClock()
        super().__init__(Scheduler(ledger, patience))
        self.starts = starts
        self.exits = exits
        self.revokes = revokes
        self.settles = False
        self.took = took
        self.effects: list[effects.Effect] = []
        self.retired: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self._paces: dict[int, Pace] = {}
        self._coming: deque[events.Event] = deque()

    def __repr__(self) -> str:
        return f"<World at {self.now:g}s: {self.scheduler!r}>"

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self.clock.now

    def submit(  # noqa: PLR0913 - the options that a task is given
        self,
        name: str,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        accelerator_type: str | None = None,
        strategy: Literal["pack", "spread"] = "pack",
        environment: Mapping[str, str] | None = None,
        function: int = 0,
        max_calls: int = 0,
        max_retries: int = 3,
        priority: int = 0,
        timeout: float | None = None,
        cancel_grace: float | None = None,
        parent: str | None = None,
        is_detached: bool = False,
        is_endless: bool = False,
        needs: Sequence[str] | None = None,
    ) -> None:
        """Submit a task by a new name; `InfeasibleError` if it could never run."""
        assert name not in self.tasks, f"{name!r} was submitted before"
        scalars = _amounts({CPU: num_cpus, **(resources or {})})
        devices = {GPU: device_quantity("num_gpus", num_gpus)}
        spread = {"pack": False, "spread": True}[strategy]
        request = Request.of(scalars, devices, accelerator_type, spread=spread)
        shape = Shape(request, tuple(sorted((environment or {}).items())))
        pace = self._paces.setdefault(function, Pace())
        spec = TaskSpec(
            *(name, shape, function, max_calls, max_retries, priority, timeout),
            *(cancel_grace, is_detached, is_endless, False, pace),
        )
        if reason := self.scheduler.ledger.why_infeasible(request):
            raise InfeasibleError(f"{name!r} can never run: {reason}")
        task = PaperTask(TaskId(len(self._by_id)), spec)
        self.tasks[name] = task
        self._by_id.append(task)
        starter = self.tasks[parent].id if parent else None
        expected = None if needs is None else tuple(self.tasks[n].id for n in needs)
        self._happen(events.Submitted(task.id, spec, starter, expected))

    def supply(self, name: str) -> None:
        """All arguments of a task are there that were not."""
        self._happen(events.Supplied(self.tasks[name].id))

    def start(self, whom: str | int) -> None:
        """A forked worker connects; named by its id or by the task it is for."""
        self._happen(events.WorkerStarted(self.worker_of(whom)))

    def finish(self, name: str, *, retry: bool = False) -> None:
        """The worker answers; with `retry`, by a failure that is to be retried."""
        self._answer(name, retry)
        self._happen()

    def _answer(self, name: str, retry: bool = False) -> PaperWorker:
        task = self.tasks[name]
        worker = self.workers[self.worker_of(name)]
        assert worker.task is task, f"{name!r} does not run on a worker"
        worker.answer()
        self._coming.append(events.TaskFinished(task.id, worker.id, retry, self.took))
        if worker.is_ending:
            self._leave(worker)
        else:
            worker.begin()
        return worker

    def wait_for(self, name: str, *children: str) -> None:
        """A task's code waits for others, or for none any more."""
        ids = tuple(self.tasks[child].id for child in children)
        self._happen(events.TaskWaits(self.tasks[name].id, ids))

    def revoked(self, whom: str | int) -> None:
        """It is known what a worker has not begun of what it was sent."""
        worker = self.workers[self.worker_of(whom)]
        self._happen(worker.know_revoked())

    def skip(self, name: str, *, is_late: bool = False) -> None:
        """The worker answers and, in the same moment, finds its next task revoked.

        `is_late`: it is known what was taken back before the worker says so.
        """
        worker = self._answer(name)
        assert worker.void, f"nothing behind {name!r} was taken back"
        skipped = events.TaskSkipped(worker.skip().id, worker.id)
        self._happen()
        if is_late:
            self._happen(worker.know_revoked())
        self._happen(skipped)

    def stop(self, whom: str | int) -> None:
        """A worker begins nothing any more, as one under SIGSTOP."""
        self.workers[self.worker_of(whom)].is_stopped = True

    def cancel(self, name: str) -> None:
        """The task's owner does not want its result any more."""
        task = self.tasks[name]
        task.is_cancelled = task.news is None
        self._happen(events.Cancelled(task.id))

    def die(self, whom: str | int) -> None:
        """A worker's process ends; named as in `start`."""
        self._happen(self.workers[self.worker_of(whom)].gone(self.settles))

    def spoil(self, whom: str | int) -> None:
        """A worker will end by itself after the task that it runs."""
        worker = self.workers[self.worker_of(whom)]
        worker.is_ending = True
        worker.drop_queue()
        self._happen(events.WorkerSpoilt(worker.id))

    def tell(self, event: events.Event) -> None:
        """Something else happens."""
        self._happen(event)

    def close(self, at_once: bool = False) -> None:
        """The node shuts down, in order or by force."""
        self._happen(events.Closing(at_once))

    def advance(self, seconds: float) -> None:
        """Time passes; the scheduler is woken at each of its deadlines."""
        self.effects = []
        until = self.now + seconds
        while (moment := self.scheduler.deadline()) is not None and moment <= until:
            self._wake(moment)
        self.clock.advance_to(until)

    def run_dry(self) -> None:
        """Let all workers start, answer and end, until nothing moves any more."""
        self.starts = self.exits = self.revokes = True
        self.settles = False
        for unsettled in self.unsettled:
            self._coming.append(events.Settled(unsettled))
        for worker in self.workers.values():
            worker.is_stopped = False
            worker.begin()
            while worker.revoking:
                self._coming.append(worker.know_revoked())
            if not worker.has_started:
                self._coming.append(events.WorkerStarted(worker.id))
            elif worker.is_ending and worker.task is None:
                self._leave(worker)
        self._coming.extend(map(events.Supplied, self.scheduler.expecting))
        self._go_on()
        while True:
            while running := [w.task for w in self.workers.values() if w.task]:
                self.finish(running[0].spec.name)
            if (moment := self.scheduler.deadline()) is None:
                return
            self._wake(moment)

    def _happen(self, *happened: events.Event) -> None:
        self.effects = []
        self._coming.extend(happened)
        self._go_on()

    def _wake(self, moment: float) -> None:
        self.clock.advance_to(moment)
        self._coming.append(events.TimePassed())
        self._go_on()

    def _go_on(self) -> None:
        while self._coming:
            event = self._coming.popleft()
            if isinstance(event, events.WorkerStarted):
                self.workers[event.worker].has_started = True
            elif isinstance(event, events.Revoked) and event.worker in self.workers:
                self.workers[event.worker].forget_void(event.number)
            elif isinstance(event, events.TaskSkipped):
                self.workers[event.worker].drop(self._by_id[event.task])
            elif isinstance(event, events.WorkerGone):
                # One that is killed while it leaves has two reasons to go.
                self.workers.pop(event.worker, None)
            for effect in self.scheduler.handle(event, self.now):
                self.effects.append(effect)
                self._apply(effect)
            self.check()

    def _apply(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Spawn(worker, environment):
                self._fork(worker, environment)
            case effects.Assign():
                self._send(effect)
            case effects.Ahead(worker, tasks):
                self._send_ahead(self.workers[worker], tasks)
            case effects.Revoke(worker, number):
                self._revoke(self.workers[worker], number)
            case effects.Interrupt(task, worker):
                known = self.workers[worker]
                assert self._by_id[task] in (*known.sent, *known.void), effect
                self._by_id[task].interrupts += 1
            case effects.Retire(worker):
                assert not self.workers[worker].sent, effect
                self.retired.append(worker)
                self._leave(self.workers[worker])
            case effects.Kill(worker):
                self.killed.append(worker)
                self._leave(self.workers[worker])
            case _:
                self._tell(effect)

    def _fork(self, worker: WorkerId, environment: Environment) -> None:
        self.workers[worker] = PaperWorker(worker, environment)
        if self.starts:
            self._coming.append(events.WorkerStarted(worker))

    def _revoke(self, worker: PaperWorker, number: int) -> None:
        worker.revoke(number)
        if self.revokes:
            self._coming.append(worker.know_revoked())

    def _tell(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.Forget):
            task = self._by_id[effect.task]
            assert not task.is_forgotten, effect
            task.is_forgotten = True
            return
        owner = self._by_id[effect.task]  # type: ignore[union-attr]
        assert owner.news is None, (effect, owner)
        assert not owner.is_cancelled, (effect, owner)
        owner.news = NEWS[type(effect)]
        owner.reason = getattr(effect, "reason", "")

    def _send(self, assign: effects.Assign) -> None:
        worker, task = self.workers[assign.worker], self._by_id[assign.task]
        binding = binding_of(task.spec, assign.lease)
        state = (worker.has_started, worker.is_ending, len(worker.sent))
        assert state == (True, False, 0), assign
        assert task.spec.shape.environment == worker.environment, assign
        assert assign.is_first == (worker.binding is None), assign
        assert assign.is_first or worker.binding == binding, assign
        assert assign.is_first or task.spec.max_calls != 1, assign
        worker.binding, worker.is_ending = binding, assign.is_last
        worker.sent.append(task)
        worker.begin()
        task.gpus = dict(binding[1]).get(GPU, ())

    def _send_ahead(self, worker: PaperWorker, tasks: list[TaskId]) -> None:
        assert worker.binding is not None, worker
        for id_ in tasks:
            task = self._by_id[id_]
            task.gpus = dict(worker.binding[1]).get(GPU, ())
            worker.sent.append(task)
        worker.begin()

    def _leave(self, worker: PaperWorker) -> None:
        worker.is_ending = True
        if self.exits:
            self._coming.append(worker.gone(self.settles))


def _amounts(quantities: Mapping[str, float]) -> dict[str, int]:
    return {name: quantity(name, value) for name, value in quantities.items()}
