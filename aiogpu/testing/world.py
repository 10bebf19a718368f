"""A scheduler with paper workers, paper GPUs and a clock that is moved by hand.

A test tells `World` what happens, in the words of a story, and reads what came of
it. `World` does what the scheduler asks for, with no process and no wait, and after
every step holds the scheduler to its promises: its own `check()`, and what only an
onlooker can see (a worker never changes its devices, an owner is told once).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import (
    Device,
    DeviceSelector,
    DurationEstimate,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.units import (
    BY_SHARE,
    CPU,
    GPU,
    TYPE_PREFIX,
    UNIT,
    device_quantity,
    parse_size,
    quantity,
)
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskState, WorkerState, binding_of
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.placement_group import why_infeasible
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import InfeasibleError
from aiogpu.observe.snapshot import stall_warning
from aiogpu.testing.clock import HandClock
from aiogpu.testing.simulated import Event, SimulatedTask, SimulatedWorker, event

P = ParamSpec("P")


class World:
    """A simulated node: `w.submit("a"); w.finish("a"); assert w.told["a"]`.

    A forked worker starts, one that is to end goes, and what is to be taken back is
    back, at once. A test that wants to be there in between says `starts=False`,
    `exits=False` or `revokes=False`, and calls `start()`, `die()` or `revoked()`.

    Attributes:
        scheduler: the scheduler under test.
        clock: the time. Move it by `advance`, which wakes the scheduler on the way.
        starts: whether a forked worker connects at once.
        exits: whether a worker that is killed, retired or done is gone at once.
        revokes: whether what is taken back is known at once.
        settles: whether the devices of a worker that has gone must be seen free.
        took: seconds that each task says it took.
        tasks: all tasks ever submitted, by name.
        workers: the workers that are not gone, by id.
        leases: the holders of leases that were granted and not given back, by name.
        placement_groups: the same of placement groups.
        effects: what the scheduler answered to the last call, in order.
        retired, killed: ids of workers that were told to exit, or killed, in order.
        warnings: the tasks whose programs were warned, each with the text, in order.
    """

    def __init__(
        self,
        cpus: float = 16,
        gpus: int = 0,
        *,
        gpu_types: Sequence[str] = (),
        gpu_memory: int | str = 0,
        devices: Sequence[Device] | None = None,
        resources: Mapping[str, float] | None = None,
        config: SchedulerConfig | None = None,
        starts: bool = True,
        exits: bool = True,
        revokes: bool = True,
        took: float = 0.0,
        clock: HandClock | None = None,
    ) -> None:
        types = dict(enumerate(gpu_types))
        if devices is None:
            size = _bytes(gpu_memory)
            count = gpus or len(types)
            devices = [Device(i, types.get(i), memory=size) for i in range(count)]
        scalars = _amounts({CPU: cpus, **(resources or {})})
        there = {device.type for device in devices if device.type}
        scalars.update({TYPE_PREFIX + name: UNIT for name in there})
        self.scheduler = Scheduler(Ledger(scalars, [DeviceSet(GPU, devices)]), config)
        self.clock = clock or HandClock()
        self.starts, self.exits, self.revokes = starts, exits, revokes
        self.settles = False
        self.took = took
        self.tasks: dict[str, SimulatedTask] = {}
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.leases: dict[str, WorkerId] = {}
        self.placement_groups: dict[str, WorkerId] = {}
        self.effects: list[effects.Effect] = []
        self.retired: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self.announced: list[str] = []
        self.warnings: list[tuple[str, str]] = []
        self._by_id: list[SimulatedTask] = []
        self._coming: deque[Event] = deque()
        self._paces: dict[int, DurationEstimate] = {}

    def __repr__(self) -> str:
        return f"<World at {self.now:g}s: {self.scheduler!r}>"

    def submit(
        self,
        name: str,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        accelerator_type: str | None = None,
        where: DeviceSelector | None = None,
        gpu_memory: int | str = 0,
        retries_oom: bool = False,
        strategy: Literal["pack", "spread"] = "pack",
        environment: Mapping[str, str] | None = None,
        function: int = 0,
        max_calls: int = 0,
        max_retries: int = 3,
        priority: int = 0,
        timeout: float | None = None,
        run_timeout: float | None = None,
        stop_grace: float = 0.0,
        cancel_grace: float | None = None,
        parent: str | None = None,
        is_detached: bool = False,
        is_endless: bool = False,
        is_lease: bool = False,
        needs: Sequence[str] | None = None,
        client: int = OWN,
    ) -> None:
        """Submit a task by a new name; `InfeasibleError` if it could never run.

        `LimitError` if its program, that of its parent, has as many as it may.
        """
        assert name not in self.tasks, f"{name!r} was submitted before"
        scalars = _amounts({CPU: num_cpus, **(resources or {})})
        devices = {GPU: device_quantity("num_gpus", num_gpus)}
        spread = {"pack": False, "spread": True}[strategy]
        request = Request.of(
            *(scalars, devices, accelerator_type),
            spread=spread,
            where=where,
            gpu_memory=_bytes(gpu_memory),
        )
        shape = Shape(request, tuple(sorted((environment or {}).items())))
        pace = self._paces.setdefault(function, DurationEstimate())
        spec = TaskSpec(
            *(name, shape, function, max_calls, max_retries, priority, timeout),
            *(cancel_grace, is_detached, is_endless, retries_oom, is_lease),
            *(run_timeout, stop_grace),
            pace=pace,
        )
        self._enter(spec, parent, needs, client)

    def _enter(
        self,
        spec: TaskSpec,
        parent: str | None,
        needs: Sequence[str] | None,
        client: int,
    ) -> None:
        name, request = spec.name, spec.shape.request
        if reason := why_infeasible(self.scheduler.ledger, request):
            raise InfeasibleError(f"{name!r} can never run: {reason}")
        by = self.tasks[parent].id if parent else None
        expected = None if needs is None else tuple(self.tasks[n].id for n in needs)
        self._submit(spec, by, expected, ClientId(client))

    def _submit(
        self,
        spec: TaskSpec,
        parent: TaskId | None,
        needs: tuple[TaskId, ...] | None,
        client: ClientId,
    ) -> None:
        is_known = client == OWN or self.scheduler.clients is not None
        assert is_known, f"program {client} submits before any has joined"
        self.scheduler.admit(spec.shape.request, client, parent)
        task = SimulatedTask(TaskId(len(self._by_id)), spec)
        self.tasks[spec.name] = task
        self._by_id.append(task)
        self._happen(event(Scheduler.submit, task.id, spec, parent, needs, client))

    def join(
        self, client: int, weight: float = 1.0, limits: Limits | None = None
    ) -> None:
        """A program joins the node, or has other terms from now on."""
        self._happen(
            event(Scheduler.join, ClientId(client), weight, limits or Limits())
        )

    def fall_behind(self, client: int, is_behind: bool = True) -> None:
        """A program does not read what it is sent, or has caught up."""
        self._happen(event(Scheduler.set_behind, ClientId(client), is_behind))

    def leave(self, client: int) -> None:
        """A program leaves: it submits nothing more."""
        self._happen(event(Scheduler.leave, ClientId(client)))

    def supply(self, name: str) -> None:
        """All arguments of a task are there that were not."""
        self._happen(event(Scheduler.supply, self.tasks[name].id))

    def start(self, whom: str | int) -> None:
        """A forked worker connects; named by its id or by the task it is for."""
        self._happen(event(Scheduler.worker_started, self.worker_of(whom)))

    def begin(self, name: str, *, ago: float = 0.0) -> None:
        """The worker says that the code of a task has begun, so many seconds `ago`."""
        worker, when = self.worker_of(name), self.now - ago
        self._happen(event(Scheduler.began, self.tasks[name].id, worker, when))

    def finish(self, name: str, *, retry: bool = False, ran_out: bool = False) -> None:
        """The worker answers.

        Args:
            name: the task that has run.
            retry: by a failure that is to be retried.
            ran_out: by one for want of device memory.
        """
        self._answer(name, retry, ran_out)
        self._happen()

    def _answer(
        self, name: str, retry: bool = False, ran_out: bool = False
    ) -> SimulatedWorker:
        task = self.tasks[name]
        worker = self.workers[self.worker_of(name)]
        assert worker.task is task, f"{name!r} does not run on a worker"
        worker.answer()
        finished = event(
            Scheduler.finish, task.id, worker.id, retry, self.took, ran_out
        )
        self._coming.append(finished)
        if worker.is_ending:
            self._leave(worker)
        else:
            worker.begin()
        return worker

    def wait_for(self, name: str, *children: str) -> None:
        """A task's code waits for other tasks, or for none."""
        ids = tuple(self.tasks[child].id for child in children)
        self._happen(event(Scheduler.wait_for, self.tasks[name].id, ids))

    def revoked(self, whom: str | int) -> None:
        """A worker reports which of its revoked tasks it had not begun."""
        worker = self.workers[self.worker_of(whom)]
        self._happen(worker.know_revoked())

    def skip(self, name: str, *, is_late: bool = False) -> None:
        """The worker answers and, in the same moment, finds its next task revoked.

        `is_late`: it is known what was taken back before the worker says so.
        """
        worker = self._answer(name)
        assert worker.void, f"nothing behind {name!r} was taken back"
        skipped = event(Scheduler.task_skipped, worker.skip().id, worker.id)
        self._happen()
        if is_late:
            self._happen(worker.know_revoked())
        self._happen(skipped)

    def stop(self, whom: str | int) -> None:
        """A worker begins no further task, as under SIGSTOP."""
        self.workers[self.worker_of(whom)].is_stopped = True

    def cancel(self, name: str) -> None:
        """The owner of a task cancels it."""
        task = self.tasks[name]
        task.is_cancelled = task.news is None
        self._happen(event(Scheduler.cancel, task.id))

    def die(self, whom: str | int) -> None:
        """A worker's process ends; named as in `start`."""
        self._happen(self.workers[self.worker_of(whom)].gone(self.settles))

    def spoil(self, whom: str | int) -> None:
        """A worker will exit after its current task."""
        worker = self.workers[self.worker_of(whom)]
        worker.is_ending = True
        worker.drop_queue()
        self._happen(event(Scheduler.worker_spoilt, worker.id))

    def lease(self, name: str, *, num_cpus: float = 0, **asked: Any) -> None:
        """Ask for a lease by a new name, as `submit` does for a task."""
        asked |= {"max_calls": 1, "max_retries": 0, "is_endless": True}
        self.submit(name, num_cpus=num_cpus, is_lease=True, **asked)

    def give_back(self, name: str, *, settles: bool = False) -> None:
        """All that a lease was granted for has ended."""
        self._happen(event(Scheduler.lease_returned, self.leases[name], settles))

    def tell(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[effects.Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Any other event: `w.tell(Scheduler.worker_spoilt, worker)`."""
        self._happen(event(step, *args, **kwargs))

    def announce_stop(self, client: int | None = None) -> None:
        """A program says that it stops, or the node does."""
        whose = None if client is None else ClientId(client)
        self._happen(event(Scheduler.announce_stop, whose))

    def close(self, at_once: bool = False) -> None:
        """The node shuts down, in order or by force."""
        self._happen(event(Scheduler.close, at_once))

    def advance(self, seconds: float) -> None:
        """Time passes; the scheduler is woken at each of its deadlines."""
        self.effects = []
        until = self.now + seconds
        while (moment := self.scheduler.deadline()) is not None and moment <= until:
            self._wake(moment)
        self.clock.advance_to(until)

    def run_dry(self) -> None:
        """Let all workers start, answer and end, until nothing changes."""
        self.starts = self.exits = self.revokes = True
        self.settles = False
        for unsettled in self.unsettled:
            self._coming.append(event(Scheduler.devices_free, unsettled))
        for worker in self.workers.values():
            worker.is_stopped = False
            worker.begin()
            while worker.revoking:
                self._coming.append(worker.know_revoked())
            if not worker.has_started:
                self._coming.append(event(Scheduler.worker_started, worker.id))
            elif worker.is_ending and worker.task is None:
                self._leave(worker)
        expecting = self.scheduler.expecting
        self._coming.extend(event(Scheduler.supply, one) for one in expecting)
        self._go_on()
        while True:
            while running := [w.task for w in self.workers.values() if w.task]:
                self.finish(running[0].spec.name)
            if self._end_one_holder():
                continue
            moment, timers = self.scheduler.deadline(), self.scheduler.timers
            if moment is None:
                return
            if self.scheduler.stalls_at and len(timers) == 1 and self.waiting:
                return  # what waits now waits for a device that is set aside
            self._wake(moment)

    def _end_one_holder(self) -> bool:
        """Give a lease back, or remove a placement group; False if there is none."""
        for name in [*self.leases, *self.placement_groups]:
            self.cancel(name)
            if name in self.leases:
                self.give_back(name)
            return True
        return False

    # What there is to see.

    @property
    def running(self) -> set[str]:
        """Tasks that a worker has begun and not answered."""
        return {w.task.spec.name for w in self.workers.values() if w.task}

    def _in_state(self, state: TaskState) -> set[str]:
        return {r.spec.name for r in self.scheduler.tasks.values() if r.state is state}

    @property
    def queued(self) -> set[str]:
        """Tasks that a worker was sent ahead."""
        return self._in_state(TaskState.QUEUED)

    @property
    def blocked(self) -> set[str]:
        """The tasks that wait for others and hold no CPU."""
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

    @property
    def told(self) -> dict[str, str]:
        """The outcomes that owners were told, by task."""
        return {name: task.news for name, task in self.tasks.items() if task.news}

    @property
    def forgotten(self) -> set[str]:
        """The tasks that ended after their owners had gone."""
        return {name for name, task in self.tasks.items() if task.is_forgotten}

    @property
    def free_gpus(self) -> list[float]:
        """The free share of each GPU."""
        return [part / UNIT for part in self.scheduler.ledger.device_sets[GPU].free]

    @property
    def free(self) -> dict[str, float]:
        """The free amount of each resource."""
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

    # How effects are carried out.

    @property
    def now(self) -> float:
        """The time in seconds."""
        return self.clock.now

    def _happen(self, *happened: Event) -> None:
        self.effects = []
        self._coming.extend(happened)
        self._go_on()

    def _wake(self, moment: float) -> None:
        self.clock.advance_to(moment)
        self._coming.append(event(Scheduler.wake))
        self._go_on()

    def _go_on(self) -> None:
        while self._coming:
            step, args, kwargs = self._coming.popleft()
            if step is Scheduler.worker_started:
                self.workers[args[0]].has_started = True
            elif step is Scheduler.revoked and args[0] in self.workers:
                self.workers[args[0]].forget_void(args[1])
            elif step is Scheduler.task_skipped:
                self.workers[args[1]].drop(self._by_id[args[0]])
            elif step is Scheduler.worker_gone:
                # One that is killed while it leaves has two reasons to go.
                self.workers.pop(args[0], None)
            for effect in step(self.scheduler, self.now, *args, **kwargs):
                self.effects.append(effect)
                self._apply(effect)
            self.check()

    def _apply(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Spawn(worker, environment):
                self.workers[worker] = SimulatedWorker(worker, environment)
                if self.starts:
                    self._coming.append(event(Scheduler.worker_started, worker))
            case effects.Assign():
                self._send(effect)
            case effects.Ahead(worker, tasks):
                self._send_ahead(self.workers[worker], tasks)
            case effects.Revoke(worker, number):
                self.workers[worker].revoke(number)
                if self.revokes:
                    self._coming.append(self.workers[worker].know_revoked())
            case effects.Interrupt(task, worker):
                known = self.workers[worker]
                assert self._by_id[task] in (*known.sent, *known.void), effect
                self._by_id[task].interrupts += 1
            case effects.Announce(task, worker):
                known = self.workers[worker]
                assert self._by_id[task] in known.sent, effect
                self.announced.append(self._by_id[task].spec.name)
            case effects.Granted():
                self._grant(effect)
            case effects.Reclaim(task, holder):
                assert self.leases[self._by_id[task].spec.name] == holder, effect
            case effects.Retire(worker):
                assert not self.workers[worker].sent, effect
                self.retired.append(worker)
                self._leave(self.workers[worker])
            case effects.Kill(worker):
                self.killed.append(worker)
                self._leave(self.workers[worker])
            case effects.Warn(task):
                assert self._by_id[task].news is None, effect
                node = self.scheduler
                if record := node.tasks.get(task):  # else its time was up just then
                    warning = stall_warning(node, record, self.now)
                    self.warnings.append((record.spec.name, warning))
            case effects.Settle(task):
                self._tell(task, "settled")
            case effects.Fail(task, failure, reason):
                self._tell(task, failure.value, reason)
            case effects.Forget(task):
                self._forget(task)

    def _grant(self, granted: effects.Granted) -> None:
        task, lease = self._by_id[granted.task], granted.lease
        if lease.parts:
            self.placement_groups[task.spec.name] = granted.holder
            return
        assert not self.scheduler.ledger.drains(lease), granted
        task.gpus = dict(binding_of(task.spec, lease)[1]).get(GPU, ())
        self.leases[task.spec.name] = granted.holder

    def _forget(self, id_: TaskId) -> None:
        task = self._by_id[id_]
        assert not task.is_forgotten, id_
        task.is_forgotten = True
        self.leases.pop(task.spec.name, None)
        self.placement_groups.pop(task.spec.name, None)

    def _tell(self, id_: TaskId, news: str, reason: str = "") -> None:
        owner = self._by_id[id_]
        assert owner.news is None, (news, owner)
        assert not owner.is_cancelled, (news, owner)
        owner.news, owner.reason = news, reason

    def _send(self, assign: effects.Assign) -> None:
        worker, task = self.workers[assign.worker], self._by_id[assign.task]
        binding = binding_of(task.spec, assign.lease)
        state = (worker.has_started, worker.is_ending, len(worker.sent))
        assert state == (True, False, 0), assign
        assert task.spec.shape.environment == worker.environment, assign
        assert assign.is_first == (worker.binding is None), assign
        assert assign.is_first or worker.binding == binding, assign
        assert assign.is_first or task.spec.max_calls != 1, assign
        assert not self.scheduler.ledger.drains(assign.lease), assign
        worker.binding, worker.is_ending = binding, assign.is_last
        worker.sent.append(task)
        worker.begin()
        task.gpus = dict(binding[1]).get(GPU, ())

    def _send_ahead(self, worker: SimulatedWorker, tasks: list[TaskId]) -> None:
        assert worker.binding is not None, worker
        record = self.scheduler.workers.get(worker.id)
        assert record is not None, worker
        assert record.lease is not None, worker
        assert not self.scheduler.ledger.drains(record.lease), worker
        for id_ in tasks:
            task = self._by_id[id_]
            task.gpus = dict(worker.binding[1]).get(GPU, ())
            worker.sent.append(task)
        worker.begin()

    def _leave(self, worker: SimulatedWorker) -> None:
        worker.is_ending = True
        if self.exits:
            self._coming.append(worker.gone(self.settles))


def _amounts(quantities: Mapping[str, float]) -> dict[str, int]:
    return {name: quantity(name, value) for name, value in quantities.items()}


def _bytes(gpu_memory: int | str) -> int:
    is_share = gpu_memory == "share"
    return BY_SHARE if is_share else parse_size("gpu_memory", gpu_memory)
