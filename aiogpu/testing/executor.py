"""Carries out on paper what a scheduler says, and tells it what comes of that."""

from __future__ import annotations

from collections import deque

from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.model.units import GPU
from aiogpu.core.records import binding_of
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.status import Holdings
from aiogpu.observe.why import stall_in_words, why_waiting
from aiogpu.testing.clock import HandClock
from aiogpu.testing.observer import Onlooker
from aiogpu.testing.simulated import Event, News, PaperWorker, told


class Stage(Onlooker):
    """Paper workers that do as they are told, as soon as they are told.

    Attributes:
        clock: the time.
        starts: whether a forked worker connects at once.
        exits: whether a worker that is killed, retired or done is gone at once.
        revokes: whether what is taken back is known at once.
        settles: whether the devices of a worker that has gone must be seen free.
        effects: what the scheduler answered to the last call, in order.
        retired, killed: ids of workers that were told to exit, or killed, in order.
        warnings: the tasks whose programs were warned, each with the text, in order.
    """

    def __init__(self, scheduler: Scheduler, clock: HandClock) -> None:
        super().__init__(scheduler)
        self.clock = clock
        self.starts = self.exits = self.revokes = True
        self.settles = False
        self.effects: list[effects.Effect] = []
        self.retired: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self.warnings: list[tuple[str, str]] = []
        self._coming: deque[Event] = deque()

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
        self._coming.append(told(Scheduler.wake))
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
                holdings = Holdings(node.holders, {}, self.now)
                if record := node.tasks.get(task):  # else its time was up just then
                    why = why_waiting(node, record, holdings)
                    self.warnings.append((why.name, stall_in_words(why)))
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

    def _fork(self, worker: WorkerId, environment: Environment) -> None:
        self.workers[worker] = PaperWorker(worker, environment)
        if self.starts:
            self._coming.append(told(Scheduler.worker_started, worker))

    def _revoke(self, worker: PaperWorker, number: int) -> None:
        worker.revoke(number)
        if self.revokes:
            self._coming.append(worker.know_revoked())

    def _forget(self, id_: TaskId) -> None:
        task = self._by_id[id_]
        assert not task.is_forgotten, id_
        task.is_forgotten = True
        self.leases.pop(task.spec.name, None)
        self.placement_groups.pop(task.spec.name, None)

    def _tell(self, id_: TaskId, news: News, reason: str = "") -> None:
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

    def _send_ahead(self, worker: PaperWorker, tasks: list[TaskId]) -> None:
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

    def _leave(self, worker: PaperWorker) -> None:
        worker.is_ending = True
        if self.exits:
            self._coming.append(worker.gone(self.settles))
