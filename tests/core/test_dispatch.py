"""How a worker gets its next task: hand-over, sending ahead, revocation."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from aiogpu.core import effects
from aiogpu.core.effects import (
    Ahead,
    Assign,
    Fail,
    Interrupt,
    Kill,
    Revoke,
    Settle,
    Spawn,
)
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import DEEPEST, Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import Memory
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.dispatch import refill
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, kinds, submit

pytestmark = pytest.mark.usefixtures("few")

SHORT = 1e-5


def backlog(count: int, *, took: float = SHORT, cpus: float = 1, **options) -> World:
    """A node where t0 has run and t1 runs, of `count` submitted tasks."""
    w = World(cpus=cpus, took=took)
    submit_numbered(w, count, **options)
    w.finish("t0")
    return w


def submit_numbered(w: World, count: int, **options) -> None:
    """Submit `count` tasks named t0, t1, ..."""
    submit(w, [f"t{n}" for n in range(len(w.tasks), len(w.tasks) + count)], **options)


def names(*numbers: int) -> set[str]:
    """Return the names of numbered tasks."""
    return {f"t{number}" for number in numbers}


@pytest.mark.parametrize(
    ("count", "took", "options", "queued"),
    [
        (100, 0.0, {}, 0),
        (10, SHORT, {}, 4),
        (100, 0.1, {}, 0),
        (4 * DEEPEST, SHORT, {}, DEEPEST),
        (4 * DEEPEST, 1e-3, {}, 2),
        (20, SHORT, {"max_calls": 50}, 0),
        (2, SHORT, {}, 0),
    ],
    ids=["unknown", "half", "long", "short", "longer", "counts calls", "the last"],
)
def test_short_tasks_are_sent_ahead(count, took, options, queued):
    w = backlog(count, took=took, **options)
    assert (w.running, w.queued) == (names(1), names(*range(2, 2 + queued)))


def test_queue_is_refilled_when_half_is_done():
    w = backlog(4 * DEEPEST)
    lengths = []
    for number in range(1, 80):
        w.finish(f"t{number}")
        lengths.append(len(w.queued))
    assert min(lengths) == DEEPEST // 2 + 1
    assert max(lengths) == DEEPEST
    assert lengths.count(DEEPEST) == 2


def test_older_task_with_another_need_does_not_stop_handover():
    w = World(cpus=2, gpus=1, took=1e-5).play("submit training gpus=1")
    w.submit("next-training", num_gpus=1)
    submit_numbered(w, 20)
    w.play("finish t2 t3")
    assert w.queued, "the CPU's lease goes on; it would not help the one before"
    w.play("finish training; running has next-training")


# Bursts of submissions and results have the same effect as single ones.


ONE = WorkerId(1)


SHAPE = Shape(Request.of({CPU: UNIT}, {}))


def a_spec(**options) -> TaskSpec:
    """Make the spec of a short function on one CPU."""
    spec = TaskSpec("f", SHAPE, **options)
    spec.pace.note(1e-5)
    return spec


class Desk:
    """A scheduler that gets tasks and results in bursts, or one by one.

    Attributes:
        sent: by worker, what it was sent and has not ended, in order.
        settled: what has ended, in order.
        lost: what was begun and can be tried no more.
    """

    def __init__(
        self,
        *,
        in_rows: bool = True,
        cpus: int = 1,
        programs: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.scheduler = Scheduler(Ledger({CPU: cpus * UNIT}))
        self.sent: dict[WorkerId, list[TaskId]] = {}
        self.settled: list[TaskId] = []
        self.lost: list[TaskId] = []
        self.now = 0.0
        self._in_rows = in_rows
        self._last = 0
        for number in range(1, programs + 1):
            self.tell(Scheduler.join, ClientId(number), 1.0, limits or Limits())

    def tell(self, step, *args, **kwargs) -> None:
        """Tell the scheduler, and do what it says."""
        self.apply(step(self.scheduler, self.now, *args, **kwargs))

    def apply(self, effects) -> None:
        """Do what the scheduler says."""
        for effect in effects:
            match effect:
                case Spawn(worker):
                    self.sent[worker] = []
                    self.tell(Scheduler.worker_started, worker)
                case Assign(task, worker):
                    self.sent[worker].append(task)
                case Ahead(worker, tasks):
                    self.sent[worker] += tasks
                case Settle(task):
                    self.settled.append(task)
                case Fail(task):
                    self.lost.append(task)
                case Kill(worker):
                    began = (self.sent.pop(worker) or [None])[0]
                    self.tell(Scheduler.worker_gone, worker, began)

    def submit(self, count: int, spec: TaskSpec, client: ClientId = OWN) -> None:
        """Submit tasks."""
        while count:
            first = TaskId(self._last + 1)
            row = (self.now, first, count, spec, client)
            taken = 1
            if self._in_rows and self.scheduler.submit_many(*row):
                taken = count
            else:
                told = self.scheduler.submit(self.now, first, spec, client=client)
                self.apply(told)
            self._last += taken
            count -= taken

    def end(self, worker: WorkerId, count: int) -> int:
        """Finish tasks of a worker; return how many `finish_many` ended."""
        ended, self.sent[worker] = self.sent[worker][:count], self.sent[worker][count:]
        done = 0
        if self._in_rows:
            done = len(self.finish_many(worker, [(task, 1e-5) for task in ended]))
        for task in ended[done:]:
            self.tell(Scheduler.finish, task, worker, took=1e-5)
        return done

    def run_dry(self) -> None:
        """Run all tasks to their end; each owner gets one result."""
        while self.scheduler.tasks:
            before = len(self.settled)
            for worker in list(self.sent):
                if worker in self.sent:
                    self.end(worker, len(self.sent[worker]))
            if len(self.settled) == before:
                moment = self.scheduler.deadline()
                assert moment is not None, "what is left is never to run"
                self.now = max(self.now, moment)
                self.tell(Scheduler.wake)
        assert sorted(self.settled + self.lost) == [*range(1, self._last + 1)]

    def finish_many(self, worker: WorkerId, ended) -> list[TaskId]:
        """Report a burst of results; return the ended tasks."""
        records = self.scheduler.finish_many(self.now, worker, ended)
        self.settled += [record.id for record in records]
        self.apply(self.scheduler.effects)
        return [record.id for record in records]

    def picture(self) -> object:
        """Return everything observable, and the internal records."""
        scheduler = self.scheduler
        scheduler.check()
        clients = scheduler.clients or ()
        return (
            sorted(self.settled),
            self.sent,
            sorted((task.id, task.began) for task in scheduler.tasks.values()),
            [(record.id, record.since) for record in scheduler.ready.in_turn()],
            [
                (client.id, client.unfinished, client.held, client.virtual_time)
                for client in clients
            ],
        )


@pytest.mark.parametrize("programs", [0, 1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_burst_equals_single_reports(seed: int, programs: int):
    chance = Random(seed)
    specs = [a_spec(), a_spec(), a_spec(priority=1), a_spec(timeout=60.0)]
    desks = [
        Desk(in_rows=in_rows, cpus=2, programs=programs) for in_rows in (True, False)
    ]
    in_a_row = 0
    for _ in range(120):
        client = ClientId(chance.randint(1, programs)) if programs else OWN
        which, count = chance.choice(specs), chance.randint(1, 40)
        submits, passes = chance.random() < 0.4, chance.choice([0.0, SLICE / 3])
        worker, cancelled = WorkerId(chance.randint(1, 2)), chance.random()
        for desk in desks:
            desk.now += passes
            if submits:
                desk.submit(count, which, client)
            elif worker in desk.sent:
                in_a_row += desk.end(worker, count)
            if desk.scheduler.tasks and cancelled < 0.1:
                waiting = list(desk.scheduler.ready.in_turn())
                if waiting:
                    middle = waiting[len(waiting) // 2].id
                    desk.tell(Scheduler.cancel, middle)
        assert desks[0].picture() == desks[1].picture()
    assert in_a_row > 100


def test_submit_many_queues_only_behind_the_same_shape():
    desk = Desk()
    assert not desk.scheduler.accepts_many(a_spec())
    assert not desk.scheduler.submit_many(0.0, TaskId(1), 3, a_spec())
    desk.submit(2, a_spec())
    assert desk.scheduler.accepts_many(a_spec())
    assert not desk.scheduler.submit_many(0.0, TaskId(3), 3, a_spec(timeout=1.0))
    assert desk.scheduler.submit_many(0.0, TaskId(3), 3, a_spec())
    desk.tell(Scheduler.close)
    assert not desk.scheduler.submit_many(0.0, TaskId(6), 3, a_spec())


@pytest.mark.parametrize("programs", [0, 1])
def test_a_burst_behind_a_reservation_equals_single_tasks(programs: int):
    """Resources are kept for one of the first tasks; the last of a queue never fit."""
    desks = [
        Desk(in_rows=in_rows, cpus=2, programs=programs) for in_rows in (True, False)
    ]
    one, client = a_spec(), ClientId(programs)
    two = replace(one, shape=Shape(Request.of({CPU: 2 * UNIT}, {})))
    for desk in desks:
        desk.submit(1, one, client)
        desk.submit(2, two, client)
        desk.submit(2, one, client)
        desk.now += desk.scheduler.config.reserve_after
        desk.submit(1, a_spec(priority=-1), client)
        desk.end(WorkerId(2), 1)
        assert desk.scheduler.reservation is not None
        for spec in (one, two, one, a_spec(priority=1), a_spec(priority=1)):
            desk.submit(20, spec, client)
    assert desks[0].picture() == desks[1].picture()
    for desk in desks:
        desk.run_dry()
    assert desks[0].settled == desks[1].settled


@pytest.mark.parametrize(
    "limits", [Limits(max_waiting=5), Limits(max_share={CPU: 1.0})]
)
def test_submit_many_refuses_programs_with_limits(limits: Limits):
    desk, client = Desk(programs=1, limits=limits), ClientId(1)
    desk.submit(2, a_spec(), client)
    assert len(desk.scheduler.ready) == 1
    assert not desk.scheduler.submit_many(0.0, TaskId(3), 2, a_spec(), client)


def a_worker_with_some_ahead(**options) -> Desk:
    """A desk whose only worker runs a task and has others in its queue."""
    desk = Desk(**options)
    desk.submit(8, a_spec(), ClientId(1) if "programs" in options else OWN)
    desk.end(ONE, 1)
    assert len(desk.sent[ONE]) > 2
    return desk


def took(*tasks: int) -> list[tuple[TaskId, float]]:
    return [(TaskId(task), 1e-5) for task in tasks]


def test_finish_many_stops_at_a_special_task():
    desk = a_worker_with_some_ahead()
    first, second, third, *_ = desk.sent[ONE]
    assert desk.finish_many(WorkerId(9), took(first)) == []
    assert desk.finish_many(ONE, took(second, first)) == []
    desk.scheduler.exclusive.is_wanted = True
    assert desk.finish_many(ONE, took(first)) == []
    desk.scheduler.exclusive.is_wanted = False
    assert desk.finish_many(ONE, [(first, 0.0)]) == [first], "nobody knows how long"
    sent = list(desk.sent[ONE])[1:]
    assert desk.finish_many(ONE, took(*sent, 99))[: len(sent) - 1] == sent[:-1]
    desk = a_worker_with_some_ahead()
    first, second, third, *_ = desk.sent[ONE]
    desk.tell(Scheduler.cancel, third)
    assert desk.finish_many(ONE, took(first, second)) == [first]
    desk.tell(Scheduler.cancel, second)
    assert desk.finish_many(ONE, took(second)) == []
    desk = a_worker_with_some_ahead()
    desk.scheduler.workers.get(ONE).is_killed = True
    assert desk.finish_many(ONE, took(desk.sent[ONE][0])) == []


@pytest.mark.parametrize("whose", [0, 2, None])
def test_sending_a_task_ahead_ends_its_reservation(whose: int | None):
    desk = Desk()
    desk.submit(20, a_spec())
    scheduler = desk.scheduler
    worker, waiting = scheduler.workers.get(ONE), list(scheduler.ready.in_turn())
    kept = SimpleNamespace(record=None if whose is None else waiting[whose])
    scheduler.reservation = kept
    (lanes,) = scheduler.ready.by_shape.values()
    ahead: list[TaskId] = []
    refill(scheduler, worker, lanes, ahead)
    assert ahead == [record.id for record in waiting[: len(ahead)]]
    assert len(ahead) > 4
    assert scheduler.reservation is (kept if whose is None else None)


# Workers without progress: rules of revocation.

LONG = 1 / 64


PATIENCE = SchedulerConfig(
    long_task=LONG, unresponsive_after=1.0, cancel_grace=2.0, interrupt_every=0.5
)


def queue_behind(count: int = 10, **options) -> World:
    """A world where one worker runs t1, with t2, t3, ... in its queue."""
    w = World(cpus=1, took=SHORT, config=PATIENCE, **options)
    submit(w, [f"t{n}" for n in range(count)], max_retries=0)
    w.play("finish t0; running = t1; queued has t2")
    return w


def settled_once(w: World, *numbers: int) -> bool:
    """Return True if each task has run once and was settled."""
    tasks = [w.tasks[f"t{number}"] for number in numbers]
    return {(task.news, task.runs) for task in tasks} == {("settled", 1)}


def test_queue_behind_a_long_task_is_revoked():
    w = queue_behind().play(f"advance {LONG / 2}")
    assert w.queued
    w.play(f"advance {LONG / 2}; queued =")
    assert (w.running, w.waiting) == ({"t1"}, {f"t{number}" for number in range(2, 10)})
    w.play("finish t1; running = t2")


def test_no_task_is_queued_behind_a_long_function():
    w = queue_behind(100).play(f"advance {LONG}")
    assert w.tasks["t1"].spec.pace.depth == 0
    w.play("let took=1.0; finish t1; running = t2; queued =")
    w.took = SHORT
    for number in range(2, 30):
        w.finish(f"t{number}")
    assert w.queued


def test_worker_without_a_queue_is_not_watched():
    w = queue_behind(4)
    for number in range(1, 4):
        w.finish(f"t{number}")
    w.advance(60)
    assert w.effects == []
    assert w.deadline is None
    w.play("submit long; advance 3600; running = long; killed =; deadline = None")


def test_queue_behind_a_cancelled_task_is_revoked():
    w = queue_behind(revokes=False).play("cancel t1")
    assert kinds(w) == [Interrupt, Revoke]
    w.play("revoked 1; queued =; finish t1; running = t2")


def test_kill_spares_the_queued_tasks():
    """The kill waits until the queue has been taken back."""
    w = queue_behind(revokes=False).play("""
        cancel t1; advance 2.5; killed =
        revoked 1; advance 0.1; killed = 1; running = t2; run_dry
    """)
    assert settled_once(w, *range(2, 10))


def test_queue_behind_a_blocked_task_is_revoked():
    queue_behind().play("""
        submit child parent=t1; wait_for t1 child; queued =; blocked = t1
        running = child t1
    """)


def test_cancelled_task_queued_on_a_dead_worker_is_forgotten():
    queue_behind(revokes=False).play("cancel t3; die 1; forgotten has t3; running = t2")


def test_cancelled_queued_tasks_never_begin():
    """One revocation serves both."""
    w = queue_behind(revokes=False).play("cancel t3")
    assert kinds(w) == [Revoke]
    w.cancel("t2")
    assert w.effects == []
    w.play("forgotten =; revoked 1; forgotten = t2 t3; running = t1; run_dry")
    assert w.tasks["t2"].runs == w.tasks["t3"].runs == 0
    assert settled_once(w, 1, *range(4, 10))


def test_queued_task_is_cancelled_as_it_begins():
    w = queue_behind(revokes=False).play("finish t1; running = t2; cancel t3")
    w.workers[1].void.popleft()
    w.workers[1].sent.append(w.tasks["t3"])
    w.play("finish t2; running = t3")
    assert Interrupt not in kinds(w)
    w.revoked(1)
    assert kinds(w)[0] is Interrupt
    w.play("finish t3; forgotten has t3; told lacks t3; run_dry")
    assert settled_once(w, *range(4, 10))


@pytest.mark.parametrize("is_late", [False, True])
def test_task_revoked_at_its_turn_is_skipped(is_late):
    """The worker's report comes before or after `revoked`."""
    w = queue_behind(revokes=False).play(f"advance {LONG}")
    assert kinds(w) == [Revoke]
    w.skip("t1", is_late=is_late)
    w.run_dry()
    assert settled_once(w, *range(10))


def test_skipped_cancelled_tasks_are_forgotten():
    w = queue_behind(revokes=False).play("""
        cancel t2 t3; skip t1; forgotten = t2
        revoked 1; forgotten = t2 t3; running = t4; run_dry
    """)
    assert w.tasks["t2"].runs == w.tasks["t3"].runs == 0


def test_worker_that_skipped_all_tasks_becomes_idle():
    w = queue_behind(4, revokes=False).play("cancel t3 t2; skip t1; forgotten = t2 t3")
    assert w.scheduler.workers.idle == 1
    w.submit("next")
    assert w.worker_of("next") == 1


def test_skipped_task_is_requeued_from_the_middle_of_a_queue():
    w = queue_behind()
    t3 = w.tasks["t3"].id
    w.scheduler.task_skipped(w.now, t3, w.worker_of("t1"))
    w.scheduler.check()
    w.play("waiting has t3; queued has t2")


def test_task_of_an_unresponsive_worker_runs_elsewhere_once():
    """As after SIGSTOP: the worker does not begin the task."""
    w = World(cpus=1, config=PATIENCE).play("""
        submit a; finish a; stop 1; submit b max_retries=0; running =
        advance 0.75; killed =; advance 1.25; killed = 1; running = b
        finish b; told = a:settled b:settled
    """)
    assert w.tasks["b"].runs == 1


WORKER = WorkerId(1)


def a_short_spec():
    spec = TaskSpec("f", Shape(Request.of({CPU: UNIT}, {}, None)), max_retries=0)
    spec.pace.note(1e-5)
    return spec


def one_runs_and_one_is_ahead():
    """A scheduler with one worker that runs task 2, with task 3 behind it."""
    scheduler, spec = Scheduler(Ledger({CPU: UNIT})), a_short_spec()
    for number in range(1, 5):
        scheduler.submit(0.0, TaskId(number), spec)
    scheduler.worker_started(0.0, WORKER)
    scheduler.finish(0.0, TaskId(1), WORKER, took=1e-5)
    scheduler.cancel(0.0, TaskId(4))
    worker = scheduler.workers.get(WORKER)
    assert [record.id for record in (worker.task, *worker.queue)] == [2, 3]
    return scheduler


def kinds_of(wanted):
    return [type(effect) for effect in wanted]


def test_cancelled_task_that_began_early_is_interrupted():
    scheduler = one_runs_and_one_is_ahead()
    scheduler.wake(0.02)
    scheduler.cancel(0.02, TaskId(3))
    scheduler.revoked(0.021, WORKER, 1, TaskId(3))
    late = scheduler.finish(0.0211, TaskId(2), WORKER, took=0.02)
    assert kinds_of(late) == [effects.Settle, effects.Interrupt]


def test_worker_killed_for_memory_gets_no_task():
    """Results sent before the kill arrive; then the worker only ends."""
    scheduler = one_runs_and_one_is_ahead()
    for number in (5, 6):
        scheduler.submit(0.0, TaskId(number), a_short_spec())
    killed = scheduler.kill_for_memory(0.0, WORKER, Memory.HOST)
    assert effects.Kill in kinds_of(killed)
    told = [
        *scheduler.finish(0.0, TaskId(2), WORKER, took=1e-5),
        *scheduler.finish(0.0, TaskId(3), WORKER, took=1e-5),
    ]
    assert not {effects.Ahead, effects.Assign} & {*kinds_of(told)}
    told = scheduler.worker_gone(0.0, WORKER, None)
    (spawned,) = [effect.worker for effect in told if type(effect) is effects.Spawn]
    (assigned,) = scheduler.worker_started(0.0, spawned)
    assert (type(assigned), assigned.task) == (effects.Assign, 5)


def test_worker_killed_for_memory_before_its_task_gets_no_task():
    scheduler = one_runs_and_one_is_ahead()
    scheduler.kill_for_memory(0.0, WORKER, Memory.HOST)
    (revoke,) = scheduler.cancel(0.0, TaskId(3))
    told = scheduler.revoked(0.0, WORKER, revoke.number, None)
    assert not {effects.Ahead, effects.Assign} & {*kinds_of(told)}
    assert not scheduler.workers.idle
    told = scheduler.worker_gone(0.0, WORKER, None)
    (spawned,) = [effect.worker for effect in told if type(effect) is effects.Spawn]
    (assigned,) = scheduler.worker_started(0.0, spawned)
    assert assigned.task == 2
