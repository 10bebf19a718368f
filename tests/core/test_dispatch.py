"""How a worker comes to its next task, what it is sent ahead, and tasks in bursts."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from aiogpu.core.effects import Ahead, Assign, Fail, Kill, Settle, Spawn
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import DEEPEST, Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.dispatch import refill
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, submit

SHORT = 1e-5


def backlog(count: int, *, took: float = SHORT, cpus: float = 1, **options) -> World:
    """A node on which t0 has run, t1 runs, and so many in all were submitted."""
    w = World(cpus=cpus, took=took)
    submit_numbered(w, count, **options)
    w.finish("t0")
    return w


def submit_numbered(w: World, count: int, **options) -> None:
    """Submit so many more: t0, t1, ..."""
    submit(w, [f"t{n}" for n in range(len(w.tasks), len(w.tasks) + count)], **options)


def names(*numbers: int) -> set[str]:
    """The tasks of these numbers."""
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
def test_as_many_are_sent_ahead_as_are_done_in_a_moment(count, took, options, queued):
    w = backlog(count, took=took, **options)
    assert (w.running, w.queued) == (names(1), names(*range(2, 2 + queued)))


def test_more_is_sent_when_half_of_it_is_done():
    w = backlog(4 * DEEPEST)
    lengths = []
    for number in range(1, 80):
        w.finish(f"t{number}")
        lengths.append(len(w.queued))
    assert min(lengths) == DEEPEST // 2 + 1
    assert max(lengths) == DEEPEST
    assert lengths.count(DEEPEST) == 2


# Tasks that are submitted and ended in bursts fare as they would one by one.


ONE = WorkerId(1)


SHAPE = Shape(Request.of({CPU: UNIT}, {}))


def a_spec(**options) -> TaskSpec:
    """A short function that asks for a CPU."""
    spec = TaskSpec("f", SHAPE, **options)
    spec.pace.note(1e-5)
    return spec


class Desk:
    """A scheduler that is told of tasks in rows, or of each by itself.

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
        """Submit so many tasks."""
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
        """A worker ends so many; gives how many of them ended in a row."""
        ended, self.sent[worker] = self.sent[worker][:count], self.sent[worker][count:]
        done = 0
        if self._in_rows:
            done = len(self.finish_many(worker, [(task, 1e-5) for task in ended]))
        for task in ended[done:]:
            self.tell(Scheduler.finish, task, worker, took=1e-5)
        return done

    def run_dry(self) -> None:
        """Have all end that was submitted; each is told of once."""
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
        """Tell of a row; gives what has ended."""
        records = self.scheduler.finish_many(self.now, worker, ended)
        self.settled += [record.id for record in records]
        self.apply(self.scheduler.effects)
        return [record.id for record in records]

    def picture(self) -> object:
        """All that can be seen from outside, and what the books say."""
        scheduler = self.scheduler
        scheduler.check()
        clients = scheduler.clients or ()
        return (
            sorted(self.settled),
            self.sent,
            sorted((task.id, task.began) for task in scheduler.tasks.values()),
            [(record.id, record.since) for record in scheduler.ready.in_turn()],
            [(one.id, one.unfinished, one.held, one.virtual_time) for one in clients],
        )


@pytest.mark.parametrize("programs", [0, 1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_burst_is_as_if_each_were_reported_by_itself(seed: int, programs: int):
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


def test_a_row_waits_only_behind_others_like_it():
    desk = Desk()
    assert not desk.scheduler.submit_many(0.0, TaskId(1), 3, a_spec())
    desk.submit(2, a_spec())
    assert not desk.scheduler.submit_many(0.0, TaskId(3), 3, a_spec(timeout=1.0))
    assert desk.scheduler.submit_many(0.0, TaskId(3), 3, a_spec())
    desk.scheduler.reservation = object()  # type: ignore[assignment]
    assert not desk.scheduler.submit_many(0.0, TaskId(6), 3, a_spec())
    desk.scheduler.reservation = None
    desk.tell(Scheduler.close)
    assert not desk.scheduler.submit_many(0.0, TaskId(6), 3, a_spec())


@pytest.mark.parametrize(
    "limits", [Limits(max_waiting=5), Limits(max_share={CPU: 1.0})]
)
def test_of_a_program_with_limits_each_task_is_looked_at(limits: Limits):
    desk, client = Desk(programs=1, limits=limits), ClientId(1)
    desk.submit(2, a_spec(), client)
    assert len(desk.scheduler.ready) == 1
    assert not desk.scheduler.submit_many(0.0, TaskId(3), 2, a_spec(), client)


def a_worker_with_some_ahead(**options) -> Desk:
    """Its only worker runs one task and has been sent others of its kind."""
    desk = Desk(**options)
    desk.submit(8, a_spec(), ClientId(1) if "programs" in options else OWN)
    desk.end(ONE, 1)
    assert len(desk.sent[ONE]) > 2
    return desk


def took(*tasks: int) -> list[tuple[TaskId, float]]:
    return [(TaskId(task), 1e-5) for task in tasks]


def test_a_burst_ends_where_the_next_task_is_not_an_ordinary_one():
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
def test_what_was_kept_for_one_that_is_sent_ahead_is_kept_no_more(whose: int | None):
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
