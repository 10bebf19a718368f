"""A scheduler with paper workers, paper GPUs and a clock that is moved by hand.

A test tells `World` what happens, in the words of a story, and reads what came of
it. `World` does what the scheduler asks for, with no process and no wait, and after
every step holds the scheduler to its promises: its own `check()`, and what only an
onlooker can see (a worker never changes its devices, an owner is told once).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from aiogpu.core import effects, events
from aiogpu.core.devices import Device, DeviceSet
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.policy import Patience
from aiogpu.core.records import Binding, binding_of
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
from aiogpu.core.specs import Shape, TaskSpec
from aiogpu.errors import InfeasibleError

News = Literal["settled", "expired", "lost", "abandoned"]
"""What a task's owner can be told."""

NEWS: Final[Mapping[type[effects.Effect], News]] = {
    effects.Settle: "settled",
    effects.Expire: "expired",
    effects.Lose: "lost",
    effects.Abandon: "abandoned",
}


@dataclass(slots=True)
class PaperWorker:
    """A worker process as an onlooker sees it.

    Attributes:
        has_started: whether it has connected.
        is_ending: whether it gets no more work.
        task: what it was sent and has not answered.
        binding: environment and devices of the first task that it was sent.
    """

    id: WorkerId
    has_started: bool = False
    is_ending: bool = False
    task: PaperTask | None = None
    binding: Binding | None = None


@dataclass(slots=True, eq=False)
class PaperTask:
    """A task as its owner sees it.

    Attributes:
        news: what the owner was told, None so far.
        is_cancelled: whether the owner has cancelled it, before any news.
        is_forgotten: whether what is kept for it may be dropped.
        interrupts: how often a worker was asked to stop it.
        gpus: the devices that it got when it was last sent.
    """

    id: TaskId
    spec: TaskSpec
    news: News | None = None
    is_cancelled: bool = False
    is_forgotten: bool = False
    interrupts: int = 0
    gpus: tuple[int, ...] = ()


class World:
    """A node on paper: `w.submit("a"); w.finish("a"); assert w.told["a"]`.

    A forked worker starts, and one that is to end goes, at once. A test that wants
    to be there in between says `starts=False` or `exits=False`, and then calls
    `start()` or `die()` itself.

    Attributes:
        now: the time, in seconds since the world began.
        scheduler: the scheduler under test.
        starts: whether a forked worker connects at once.
        exits: whether a worker that is killed, retired or done is gone at once.
        tasks: all tasks ever submitted, by name.
        workers: the workers that are not gone, by id.
        effects: what the scheduler answered to the last call, in order.
        retired: ids of workers that were told to exit, in order.
        killed: ids of workers that were killed, in order.
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
    ) -> None:
        types = dict(enumerate(gpu_types))
        devices = [Device(i, types.get(i)) for i in range(gpus or len(types))]
        scalars = _amounts({CPU: cpus, **(resources or {})})
        scalars.update({TYPE_PREFIX + name: UNIT for name in gpu_types})
        ledger = Ledger(scalars, [DeviceSet(GPU, devices)])
        self.now = 0.0
        self.scheduler = Scheduler(ledger, patience)
        self.starts = starts
        self.exits = exits
        self.tasks: dict[str, PaperTask] = {}
        self.workers: dict[WorkerId, PaperWorker] = {}
        self.effects: list[effects.Effect] = []
        self.retired: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self._by_id: list[PaperTask] = []
        self._coming: deque[events.Event] = deque()

    def __repr__(self) -> str:
        return f"<World at {self.now:g}s: {self.scheduler!r}>"

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
    ) -> None:
        """Submit a task by a new name; `InfeasibleError` if it could never run."""
        assert name not in self.tasks, f"{name!r} was submitted before"
        scalars = _amounts({CPU: num_cpus, **(resources or {})})
        devices = {GPU: device_quantity("num_gpus", num_gpus)}
        spread = {"pack": False, "spread": True}[strategy]
        request = Request.of(scalars, devices, accelerator_type, spread=spread)
        shape = Shape(request, tuple(sorted((environment or {}).items())))
        spec = TaskSpec(
            name, shape, function, max_calls, max_retries, priority, timeout
        )
        if reason := self.scheduler.ledger.why_infeasible(request):
            raise InfeasibleError(f"{name!r} asks for {reason}")
        task = PaperTask(TaskId(len(self._by_id)), spec)
        self.tasks[name] = task
        self._by_id.append(task)
        self._happen(events.Submitted(task.id, spec))

    def start(self, whom: str | int) -> None:
        """A forked worker connects; named by its id or by the task it is for."""
        self._happen(events.WorkerStarted(self.worker_of(whom)))

    def finish(self, name: str, *, retry: bool = False) -> None:
        """The worker answers; with `retry`, by a failure that is to be retried."""
        task = self.tasks[name]
        worker = self.workers[self.worker_of(name)]
        assert worker.task is task, f"{name!r} has not been sent to a worker"
        worker.task = None
        self._coming.append(events.TaskFinished(task.id, worker.id, retry))
        if worker.is_ending:
            self._leave(worker)
        self._happen()

    def cancel(self, name: str) -> None:
        """The task's owner does not want its result any more."""
        task = self.tasks[name]
        task.is_cancelled = task.news is None
        self._happen(events.Cancelled(task.id))

    def die(self, whom: str | int) -> None:
        """A worker's process ends; named by its id or by the task it is for."""
        self._happen(events.WorkerGone(self.worker_of(whom)))

    def close(self) -> None:
        """The node shuts down."""
        self._happen(events.Closing())

    def advance(self, seconds: float) -> None:
        """Time passes; the scheduler is woken at each of its deadlines."""
        self.effects = []
        until = self.now + seconds
        while (moment := self.scheduler.deadline()) is not None and moment <= until:
            self._wake(moment)
        self.now = until

    def run_dry(self) -> None:
        """Let all workers start, answer and end, until nothing moves any more."""
        self.starts = self.exits = True
        for worker in self.workers.values():
            if not worker.has_started:
                self._coming.append(events.WorkerStarted(worker.id))
            elif worker.is_ending and worker.task is None:
                self._leave(worker)
        self._go_on()
        while running := [w.task for w in self.workers.values() if w.task]:
            self.finish(running[0].spec.name)
        while (moment := self.scheduler.deadline()) is not None:
            self._wake(moment)

    @property
    def running(self) -> set[str]:
        """Tasks that a worker was sent and has not answered."""
        return {w.task.spec.name for w in self.workers.values() if w.task}

    @property
    def starting(self) -> set[str]:
        """Tasks that hold resources while their worker is being forked."""
        return self._in_state(TaskState.STARTING)

    @property
    def waiting(self) -> set[str]:
        """Tasks that hold nothing yet."""
        return self._in_state(TaskState.WAITING)

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

    def _happen(self, *happened: events.Event) -> None:
        self.effects = []
        self._coming.extend(happened)
        self._go_on()

    def _wake(self, moment: float) -> None:
        self.now = max(self.now, moment)
        self._coming.append(events.TimePassed())
        self._go_on()

    def _go_on(self) -> None:
        while self._coming:
            event = self._coming.popleft()
            if isinstance(event, events.WorkerStarted):
                self.workers[event.worker].has_started = True
            elif isinstance(event, events.WorkerGone):
                # One that is killed while it leaves has two reasons to go.
                self.workers.pop(event.worker, None)
            for effect in self.scheduler.handle(event, self.now):
                self.effects.append(effect)
                self._apply(effect)
            self.check()

    def _apply(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Spawn(worker):
                self.workers[worker] = PaperWorker(worker)
                if self.starts:
                    self._coming.append(events.WorkerStarted(worker))
            case effects.Assign():
                self._send(effect)
            case effects.Interrupt(task, worker):
                assert self.workers[worker].task is self._by_id[task], effect
                self._by_id[task].interrupts += 1
            case effects.Retire(worker):
                assert self.workers[worker].task is None, effect
                self.retired.append(worker)
                self._leave(self.workers[worker])
            case effects.Kill(worker):
                self.killed.append(worker)
                self._leave(self.workers[worker])
            case effects.Forget(task):
                assert not self._by_id[task].is_forgotten, effect
                self._by_id[task].is_forgotten = True
            case _:
                owner = self._by_id[effect.task]
                assert owner.news is None, (effect, owner)
                assert not owner.is_cancelled, (effect, owner)
                owner.news = NEWS[type(effect)]

    def _send(self, assign: effects.Assign) -> None:
        worker, task = self.workers[assign.worker], self._by_id[assign.task]
        binding = binding_of(task.spec, assign.lease)
        state = (worker.has_started, worker.is_ending, worker.task)
        assert state == (True, False, None), assign
        assert assign.is_first == (worker.binding is None), assign
        assert assign.is_first or worker.binding == binding, assign
        assert assign.is_first or task.spec.max_calls != 1, assign
        worker.task, worker.binding, worker.is_ending = task, binding, assign.is_last
        task.gpus = dict(binding[1]).get(GPU, ())

    def _leave(self, worker: PaperWorker) -> None:
        worker.is_ending = True
        if self.exits:
            self._coming.append(events.WorkerGone(worker.id))

    def check(self) -> None:
        """Assert that the scheduler's picture is sound, and agrees with this one."""
        self.scheduler.check()
        assert {worker.id for worker in self.scheduler.workers} == set(self.workers)
        sent = self._in_state(TaskState.RUNNING) | self._in_state(TaskState.STOPPING)
        assert sent == self.running, (sent, self.running)
        for task in self._by_id:
            is_over = task.is_forgotten or task.news in {"settled", "lost"}
            assert is_over == (task.id not in self.scheduler.tasks), task


def _amounts(quantities: Mapping[str, float]) -> dict[str, int]:
    return {name: quantity(name, value) for name, value in quantities.items()}
