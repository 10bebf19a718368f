"""A scheduler with paper workers, paper GPUs and a clock that is moved by hand.

A test tells `World` what happens, in the words of a story, and reads what came of
it. `World` does what the scheduler asks for, with no process and no wait, and after
every step holds the scheduler to its promises: its own `check()`, and what only an
onlooker can see (a worker never changes its devices, an owner is told once).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, Literal, ParamSpec

from aiogpu.core.effects import Effect
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId
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
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.placement_group import why_infeasible
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import InfeasibleError
from aiogpu.testing.clock import HandClock
from aiogpu.testing.executor import Stage
from aiogpu.testing.simulated import PaperTask, PaperWorker, told

P = ParamSpec("P")


class World(Stage):
    """A node on paper: `w.submit("a"); w.finish("a"); assert w.told["a"]`.

    A forked worker starts, one that is to end goes, and what is to be taken back is
    back, at once. A test that wants to be there in between says `starts=False`,
    `exits=False` or `revokes=False`, and calls `start()`, `die()` or `revoked()`.

    Attributes:
        clock: the time. Move it by `advance`, which wakes the scheduler on the way.
        took: seconds that each task says it took.
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
        ledger = Ledger(scalars, [DeviceSet(GPU, devices)])
        super().__init__(Scheduler(ledger, config), clock or HandClock())
        self.starts = starts
        self.exits = exits
        self.revokes = revokes
        self.took = took
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
            *(cancel_grace, is_detached, is_endless, retries_oom, pace, is_lease),
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
        task = PaperTask(TaskId(len(self._by_id)), spec)
        self.tasks[spec.name] = task
        self._by_id.append(task)
        self._happen(told(Scheduler.submit, task.id, spec, parent, needs, client))

    def join(
        self, client: int, weight: float = 1.0, limits: Limits | None = None
    ) -> None:
        """A program joins the node, or has other terms from now on."""
        self._happen(told(Scheduler.join, ClientId(client), weight, limits or Limits()))

    def fall_behind(self, client: int, is_behind: bool = True) -> None:
        """A program does not read what it is sent, or has caught up."""
        self._happen(told(Scheduler.set_behind, ClientId(client), is_behind))

    def leave(self, client: int) -> None:
        """A program submits nothing any more."""
        self._happen(told(Scheduler.leave, ClientId(client)))

    def supply(self, name: str) -> None:
        """All arguments of a task are there that were not."""
        self._happen(told(Scheduler.supply, self.tasks[name].id))

    def start(self, whom: str | int) -> None:
        """A forked worker connects; named by its id or by the task it is for."""
        self._happen(told(Scheduler.worker_started, self.worker_of(whom)))

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
    ) -> PaperWorker:
        task = self.tasks[name]
        worker = self.workers[self.worker_of(name)]
        assert worker.task is task, f"{name!r} does not run on a worker"
        worker.answer()
        finished = told(Scheduler.finish, task.id, worker.id, retry, self.took, ran_out)
        self._coming.append(finished)
        if worker.is_ending:
            self._leave(worker)
        else:
            worker.begin()
        return worker

    def wait_for(self, name: str, *children: str) -> None:
        """A task's code waits for others, or for none any more."""
        ids = tuple(self.tasks[child].id for child in children)
        self._happen(told(Scheduler.wait_for, self.tasks[name].id, ids))

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
        skipped = told(Scheduler.task_skipped, worker.skip().id, worker.id)
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
        self._happen(told(Scheduler.cancel, task.id))

    def die(self, whom: str | int) -> None:
        """A worker's process ends; named as in `start`."""
        self._happen(self.workers[self.worker_of(whom)].gone(self.settles))

    def spoil(self, whom: str | int) -> None:
        """A worker will end by itself after the task that it runs."""
        worker = self.workers[self.worker_of(whom)]
        worker.is_ending = True
        worker.drop_queue()
        self._happen(told(Scheduler.worker_spoilt, worker.id))

    def lease(
        self,
        name: str,
        *,
        num_cpus: float = 0,
        num_gpus: float = 0,
        gpu_memory: int | str = 0,
        priority: int = 0,
        client: int = 0,
    ) -> None:
        """Ask for a lease by a new name, as `submit` does for a task."""
        self.submit(
            name,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            gpu_memory=gpu_memory,
            priority=priority,
            client=client,
            max_calls=1,
            max_retries=0,
            is_endless=True,
            is_lease=True,
        )

    def give_back(self, name: str, *, settles: bool = False) -> None:
        """All that a lease was granted for has ended."""
        self._happen(told(Scheduler.lease_returned, self.leases[name], settles))

    def tell(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Something else happens: `w.tell(Scheduler.device_sick, "GPU", 0, "XID")`."""
        self._happen(told(step, *args, **kwargs))

    def close(self, at_once: bool = False) -> None:
        """The node shuts down, in order or by force."""
        self._happen(told(Scheduler.close, at_once))

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
            self._coming.append(told(Scheduler.devices_free, unsettled))
        for worker in self.workers.values():
            worker.is_stopped = False
            worker.begin()
            while worker.revoking:
                self._coming.append(worker.know_revoked())
            if not worker.has_started:
                self._coming.append(told(Scheduler.worker_started, worker.id))
            elif worker.is_ending and worker.task is None:
                self._leave(worker)
        expecting = self.scheduler.expecting
        self._coming.extend(told(Scheduler.supply, one) for one in expecting)
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


def _amounts(quantities: Mapping[str, float]) -> dict[str, int]:
    return {name: quantity(name, value) for name, value in quantities.items()}


def _bytes(gpu_memory: int | str) -> int:
    is_share = gpu_memory == "share"
    return BY_SHARE if is_share else parse_size("gpu_memory", gpu_memory)
