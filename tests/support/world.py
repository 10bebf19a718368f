"""A scheduler with simulated workers, simulated GPUs and a clock moved by hand.

A test calls methods of `World` for events and reads the resulting state. `World`
carries out the scheduler's effects without processes and waits, and after every step
checks the scheduler: its own `check()`, and properties that only an observer sees (a
worker never changes its devices, an owner gets one outcome).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from tests.support.clock import HandClock
from tests.support.simulated import Event, SimulatedTask, SimulatedWorker, event

P = ParamSpec("P")


class World:
    """A simulated node: `w.submit("a"); w.finish("a"); assert w.told["a"]`.

    Forked workers start, ending workers exit, and revocations are answered at once. To
    test the moments in between, pass `starts=False`, `exits=False` or `revokes=False`,
    and call `start()`, `die()` or `revoked()`.

    Attributes:
        scheduler: the scheduler under test.
        clock: the time. Move it by `advance`, which wakes the scheduler on the way.
        starts: forked workers connect at once.
        exits: workers that are killed, retired or done exit at once.
        revokes: revocations are answered at once.
        settles: devices of exited workers must be observed free.
        took: seconds that each task reports.
        tasks: all tasks ever submitted, by name.
        workers: the workers that have not exited, by id.
        leases: holders of granted leases that were not given back, by name.
        placement_groups: holders of granted placement groups, by name.
        effects: effects of the last call, in order.
        retired, killed: ids of workers that were retired or killed, in order.
        warnings: names of tasks with the warning sent to their programs, in order.
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
        self._leaving: deque[str] = deque()
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
        doubles_share: bool = False,
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
        is_evictable: bool = False,
        is_lease: bool = False,
        needs: Sequence[str] | None = None,
        client: int = OWN,
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Submit a task by a new name.

        `others` are further requests, one of which serves instead: `num_cpus` and
        `num_gpus` of each. An endless task has none.

        Raises:
            InfeasibleError: the task could never run.
            LimitError: its program, or its parent's, has reached its limit.
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
            is_evictable=is_evictable,
            doubles_share=doubles_share,
        )
        if others and not is_endless:
            specs = [replace(spec, shape=_other(spec, **other)) for other in others]
            spec = TaskSpec.any_of([spec, *specs])
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
        """Let a program join the node, or change its weight and limits."""
        self._happen(
            event(Scheduler.join, ClientId(client), weight, limits or Limits())
        )

    def fall_behind(self, client: int, is_behind: bool = True) -> None:
        """Let a program fall behind in reading its messages, or catch up."""
        self._happen(event(Scheduler.set_behind, ClientId(client), is_behind))

    def leave(self, client: int) -> None:
        """Let a program leave: it submits no more tasks."""
        self._happen(event(Scheduler.leave, ClientId(client)))

    def supply(self, name: str) -> None:
        """Supply all missing arguments of a task."""
        self._happen(event(Scheduler.supply, self.tasks[name].id))

    def start(self, whom: str | int) -> None:
        """Connect a forked worker; named by its id or by its task."""
        self._happen(event(Scheduler.worker_started, self.worker_of(whom)))

    def begin(self, name: str, *, ago: float = 0.0) -> None:
        """Report that the code of a task has begun, `ago` seconds ago."""
        worker, when = self.worker_of(name), self.now - ago
        self._happen(event(Scheduler.task_began, self.tasks[name].id, worker, when))

    def halt(self, name: str) -> None:
        """Report that the code of a task stands at a breakpoint."""
        worker = self.worker_of(name)
        self._happen(event(Scheduler.task_halted, self.tasks[name].id, worker, True))

    def go_on(self, name: str) -> None:
        """Report that the code of a task goes on."""
        worker = self.worker_of(name)
        self._happen(event(Scheduler.task_halted, self.tasks[name].id, worker, False))

    def finish(self, name: str, *, retry: bool = False, ran_out: bool = False) -> None:
        """Answer a running task.

        Args:
            name: the task.
            retry: it has failed and is to be retried.
            ran_out: it has failed for lack of device memory.
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
        """Let a task's code wait for other tasks, or for none."""
        ids = tuple(self.tasks[child].id for child in children)
        self._happen(event(Scheduler.wait_for, self.tasks[name].id, ids))

    def rest(self, *names: str, stay: float = 0.0) -> None:
        """Report that actors have no calls; each stays for `stay` seconds at least."""
        for name in names:
            until = self.now + stay
            self._happen(event(Scheduler.rest, self.tasks[name].id, until))

    def stir(self, name: str) -> None:
        """Report that an actor has a call again."""
        self._happen(event(Scheduler.stir, self.tasks[name].id))

    def bring_back(self, name: str) -> None:
        """Report that an evicted actor has a call."""
        self._happen(event(Scheduler.bring_back, self.tasks[name].id))

    def revoked(self, whom: str | int) -> None:
        """Let a worker report which of its revoked tasks had not begun."""
        worker = self.workers[self.worker_of(whom)]
        self._happen(worker.know_revoked())

    def skip(self, name: str, *, is_late: bool = False) -> None:
        """Answer a task; at the same moment, the worker finds its next task revoked.

        Args:
            name: the task.
            is_late: the scheduler knows the revoked tasks before the worker's report.
        """
        worker = self._answer(name)
        assert worker.void, f"nothing behind {name!r} was taken back"
        skipped = event(Scheduler.task_skipped, worker.skip().id, worker.id)
        self._happen()
        if is_late:
            self._happen(worker.know_revoked())
        self._happen(skipped)

    def stop(self, whom: str | int) -> None:
        """Stop a worker, as by SIGSTOP: it begins no further task."""
        self.workers[self.worker_of(whom)].is_stopped = True

    def cancel(self, name: str) -> None:
        """Cancel a task by its owner."""
        task = self.tasks[name]
        task.is_cancelled = task.news is None
        self._happen(event(Scheduler.cancel, task.id))

    def die(self, whom: str | int) -> None:
        """End a worker's process; named as in `start`."""
        self._happen(self.workers[self.worker_of(whom)].gone(self.settles))

    def spoil(self, whom: str | int) -> None:
        """Make a worker exit after its current task."""
        worker = self.workers[self.worker_of(whom)]
        worker.is_ending = True
        worker.drop_queue()
        self._happen(event(Scheduler.worker_spoilt, worker.id))

    def lease(self, name: str, *, num_cpus: float = 0, **options: Any) -> None:
        """Request a lease by a new name, as `submit` does for a task."""
        options |= {"max_calls": 1, "max_retries": 0, "is_endless": True}
        self.submit(name, num_cpus=num_cpus, is_lease=True, **options)

    def give_back(self, name: str, *, settles: bool = False) -> None:
        """Give a lease back: its processes have ended."""
        self._happen(event(Scheduler.lease_returned, self.leases[name], settles))

    def tell(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[effects.Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Send any other event: `w.tell(Scheduler.worker_spoilt, worker)`."""
        self._happen(event(step, *args, **kwargs))

    def announce_stop(self, client: int | None = None) -> None:
        """Announce that a program stops, or the node."""
        program = None if client is None else ClientId(client)
        self._happen(event(Scheduler.announce_stop, program))

    def close(self, at_once: bool = False) -> None:
        """Close the node, in order or by force."""
        self._happen(event(Scheduler.close, at_once))

    def advance(self, seconds: float) -> None:
        """Move the clock; wake the scheduler at each of its deadlines."""
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
        self._coming.extend(event(Scheduler.supply, task) for task in expecting)
        self._go_on()
        while True:
            while running := [w.task for w in self.workers.values() if w.task]:
                self.finish(running[0].spec.name)
            if self._end_one_holder():
                continue
            if evicted := self.evicted:
                self.cancel(min(evicted))
                continue
            moment, timers = self.scheduler.deadline(), self.scheduler.timers
            if moment is None:
                return
            if self.scheduler.stalls_at and len(timers) == 1 and self.waiting:
                return  # the rest waits for a device that is set aside
            self._wake(moment)

    def _end_one_holder(self) -> bool:
        """Give a lease back, or remove a placement group; False if there is none."""
        for name in [*self.leases, *self.placement_groups]:
            self.cancel(name)
            if name in self.leases:
                self.give_back(name)
            return True
        return False

    # State for tests to read.

    @property
    def running(self) -> set[str]:
        """Tasks that a worker has begun and not answered."""
        return {w.task.spec.name for w in self.workers.values() if w.task}

    def _in_state(self, state: TaskState) -> set[str]:
        return {r.spec.name for r in self.scheduler.tasks.values() if r.state is state}

    @property
    def queued(self) -> set[str]:
        """Tasks that were sent ahead to a busy worker."""
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
    def evicted(self) -> set[str]:
        """Actors that have left so that others could start."""
        return self._in_state(TaskState.EVICTED)

    @property
    def waiting(self) -> set[str]:
        """Tasks that hold nothing yet."""
        return self._in_state(TaskState.WAITING)

    @property
    def unsettled(self) -> list[WorkerId]:
        """Exited workers whose devices were not yet observed free."""
        settling = WorkerState.SETTLING
        return [
            holder.id for holder in self.scheduler.holders if holder.state is settling
        ]

    @property
    def told(self) -> dict[str, str]:
        """The outcomes reported to owners, by task."""
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
        """Return the GPUs that a task got when it was last sent to a worker."""
        return list(self.tasks[name].gpus)

    def worker_of(self, whom: str | int) -> WorkerId:
        """Return the worker of a task; a worker's id is returned unchanged."""
        if isinstance(whom, int):
            assert whom in self.workers, f"there is no worker {whom}"
            return WorkerId(whom)
        record = self.scheduler.tasks.get(self.tasks[whom].id)
        worker = record.worker if record else None
        assert worker is not None, f"{whom!r} has no worker"
        return worker.id

    def check(self) -> None:
        """Assert that the scheduler's state is consistent and agrees with `World`."""
        self.scheduler.check()
        holders = {*self.leases.values(), *self.placement_groups.values()}
        known_workers = {holder.id for holder in self.scheduler.holders}
        assert known_workers == {*self.workers, *holders, *self.unsettled}
        states = (
            *(TaskState.QUEUED, TaskState.RUNNING, TaskState.BLOCKED),
            TaskState.STOPPING,
        )
        known = set().union(*map(self._in_state, states))
        seen = [t for w in self.workers.values() for t in (*w.sent, *w.void)]
        names = {task.spec.name for task in seen} | self.leases.keys()
        names |= self.placement_groups.keys()
        assert known == names, (known, names)
        assert len(seen) + len(holders) == len(names), "a task was sent to two workers"
        for task in self._by_id:
            is_over = task.is_forgotten or task.news == "settled"
            assert is_over == (task.id not in self.scheduler.tasks), task

    # Carrying out effects.

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
        while self._coming or self._leaving:
            if not self._coming:
                # A process that was told to leave answers after what has happened.
                name = self._leaving.popleft()
                if name in self.running:
                    self._answer(name)
                continue
            step, args, kwargs = self._coming.popleft()
            if step is Scheduler.worker_started:
                self.workers[args[0]].has_started = True
            elif step is Scheduler.revoked and args[0] in self.workers:
                self.workers[args[0]].forget_void(args[1])
            elif step is Scheduler.task_skipped:
                self.workers[args[1]].drop(self._by_id[args[0]])
            elif step is Scheduler.worker_gone:
                # A worker that is killed while it exits has two such events.
                self.workers.pop(args[0], None)
            for effect in step(self.scheduler, self.now, *args, **kwargs):
                self.effects.append(effect)
                self._apply(effect)
            self.check()

    def _apply(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Spawn(worker, environment, _):
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
            case effects.Unclaim(worker):
                assert worker in self.workers, effect
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
                if record := node.tasks.get(task):  # else its timeout has just ended it
                    warning = stall_warning(node, record, self.now)
                    self.warnings.append((record.spec.name, warning))
            case effects.Evict(task):
                if self.exits:
                    self._leaving.append(self._by_id[task].spec.name)
            case effects.Evicted(task):
                assert self._by_id[task].spec.name in self.evicted, effect
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


def _other(spec: TaskSpec, num_cpus: float = 0, num_gpus: float = 0) -> Shape:
    """Return the shape of another request of a task."""
    devices = {GPU: device_quantity("num_gpus", num_gpus)}
    request = Request.of(_amounts({CPU: num_cpus}), devices)
    return Shape(request, spec.shape.environment)


def _amounts(quantities: Mapping[str, float]) -> dict[str, int]:
    return {name: quantity(name, value) for name, value in quantities.items()}


def _bytes(gpu_memory: int | str) -> int:
    is_share = gpu_memory == "share"
    return BY_SHARE if is_share else parse_size("gpu_memory", gpu_memory)
