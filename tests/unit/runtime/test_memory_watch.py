"""When the guard looks, whom it names, and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import MEMORY, UNIT
from aiogpu.core.records import Memory, WorkerState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.linux.procfs import Usage
from aiogpu.runtime.memory_monitor import (
    DEAREST,
    LATEST,
    PATIENCE,
    RATE,
    SLICE,
    SOONEST,
    MemoryGuard,
    Running,
    Weighed,
    choose_victim,
    pause_for,
)

MIB = 1 << 20
LIMIT = 1000 * MIB


def weighed(worker: int, used: int, asked: int = 0) -> Weighed:
    return Weighed(Running(WorkerId(worker), worker + 100, asked * MIB), used * MIB)


@pytest.mark.parametrize(
    ("workers", "victim"),
    [
        ([], None),
        ([weighed(1, 10)], None),
        ([weighed(1, 100)], 1),
        ([weighed(1, 100), weighed(2, 200)], 2),
        ([weighed(1, 100), weighed(2, 200, asked=150)], 1),
        ([weighed(1, 300, asked=400), weighed(2, 20)], 2),
        ([weighed(1, 300, asked=400), weighed(2, 200, asked=210)], 2),
        ([weighed(1, 300, asked=200), weighed(2, 100)], 1),
        ([weighed(1, 100), weighed(3, 100), weighed(2, 100)], 3),
        ([weighed(1, 10), weighed(2, 900, asked=900)], 2),
    ],
)
def test_whose_end_helps_most(workers: list[Weighed], victim: int | None) -> None:
    chosen = choose_victim(workers, LIMIT)
    assert (chosen.running.worker if chosen else None) == victim


@pytest.mark.parametrize(
    ("room", "pause"),
    [
        (-5, SOONEST),
        (0, SOONEST),
        (RATE // 10, 0.05),
        (RATE, 0.5),
        (100 * RATE, LATEST),
    ],
)
def test_the_next_look_comes_before_the_room_is_filled(room: int, pause: float) -> None:
    assert pause_for(room) == pytest.approx(pause)


class PaperLoop:
    """A loop's clock, and what is to be called when."""

    def __init__(self) -> None:
        self.now = 50.0
        self.due: list[tuple[float, PaperTimer]] = []

    def time(self) -> float:
        return self.now

    def call_later(
        self, delay: float, action: Callable[..., object], *arguments: object
    ) -> PaperTimer:
        timer = PaperTimer(self, partial(action, *arguments))
        self.due.append((self.now + delay, timer))
        return timer

    def run(self) -> float:
        """Call what is due next; gives the seconds that were waited for it."""
        when, timer = min(self.due, key=lambda each: each[0])
        self.due.remove((when, timer))
        waited, self.now = when - self.now, when
        timer.action()  # type: ignore[operator]
        return waited


class PaperTimer:
    def __init__(self, loop: PaperLoop, action: object) -> None:
        self.loop, self.action = loop, action

    def cancel(self) -> None:
        self.loop.due = [each for each in self.loop.due if each[1] is not self]


class PaperBounds:
    """Memory whose use is set by the test."""

    def __init__(self) -> None:
        self.used = 100
        self.of_worker: dict[int, int] = {}
        self.weighings = 0

    def tightest(self) -> Usage:
        return Usage("machine", self.used * MIB, LIMIT)

    def used_by(self, pids: tuple[int, ...]) -> int:
        self.weighings += 1
        return sum(self.of_worker.get(pid, 0) for pid in pids) * MIB

    def has(self, pid: int) -> bool:
        return pid in self.of_worker


@dataclass
class PaperWorker:
    """A worker with a task that has asked for so much memory."""

    id: int
    asked: int
    state: WorkerState = WorkerState.BUSY

    @property
    def lease(self) -> SimpleNamespace:
        scalars = ((MEMORY, self.asked * UNIT),)
        return SimpleNamespace(request=SimpleNamespace(scalars=scalars))


class House:
    def __init__(self) -> None:
        self.loop, self.bounds = PaperLoop(), PaperBounds()
        self.workers: list[PaperWorker] = []
        self.live: dict[int, SimpleNamespace] = {}
        self.told: list[tuple[int, int, int]] = []
        self.watch = MemoryGuard(
            self.loop,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.live,  # type: ignore[arg-type]
            self.feed,
            self.bounds,  # type: ignore[arg-type]
        )

    def feed(self, step: object, *args: object) -> None:
        worker, memory = args
        assert (step, memory) == (Scheduler.kill_for_memory, Memory.HOST)
        assert isinstance(worker, int)
        _, used, limit = self.watch._ended[worker]
        self.told.append((worker, used, limit))

    def start(self, worker: int, used: int, asked: int = 0) -> None:
        self.workers.append(PaperWorker(worker, asked * MIB))
        self.live[worker] = SimpleNamespace(pid=worker + 100)
        self.bounds.of_worker[worker + 100] = used
        self.watch.wake()


@pytest.fixture
def house() -> House:
    return House()


def test_it_looks_only_while_something_runs(house: House) -> None:
    assert house.loop.due == []
    house.start(1, 10)
    house.start(2, 10)
    assert len(house.loop.due) == 1
    assert house.loop.run() == pytest.approx(SOONEST)
    assert house.watch.usage is not None
    assert house.watch.cost > 0
    assert house.loop.run() == pytest.approx(pause_for(850 * MIB))
    house.workers.clear()
    house.loop.run()
    assert house.loop.due == []
    house.start(3, 10)
    house.watch.close()
    assert house.loop.due == []
    house.watch.close()


def test_single_workers_are_weighed_only_beyond_the_limit(house: House) -> None:
    house.start(1, 100)
    house.bounds.used = 950
    house.loop.run()
    assert (house.bounds.weighings, house.told) == (0, [])
    house.bounds.used = 951
    assert house.loop.run() == pytest.approx(SOONEST)
    assert house.told == [(1, 100 * MIB, 950 * MIB)]


def test_a_victim_is_named_once_until_it_is_gone(house: House) -> None:
    house.start(1, 300)
    house.start(2, 500)
    house.bounds.used = 990
    for _ in range(5):
        house.loop.run()
    assert [worker for worker, _, _ in house.told] == [2]
    house.workers.pop()
    house.loop.run()
    assert len(house.told) == 1, "its process is there and has its memory"
    del house.bounds.of_worker[102]
    house.loop.run()
    assert [worker for worker, _, _ in house.told] == [2, 1]


def test_one_that_was_spared_shields_the_others_for_a_while_only(house: House) -> None:
    house.start(1, 300)
    house.bounds.used = 990
    house.loop.run()
    began = house.loop.now
    while len(house.told) == 1:
        house.loop.run()
    assert house.loop.now - began == pytest.approx(PATIENCE, abs=2 * SOONEST)
    assert [worker for worker, _, _ in house.told] == [1, 1]


def test_memory_that_others_use_ends_nobody(house: House) -> None:
    house.start(1, 5)
    house.bounds.used = 2000
    for _ in range(3):
        house.loop.run()
    assert house.told == []
    assert house.bounds.weighings == 3


def test_a_look_that_takes_long_is_followed_by_a_longer_pause(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def used_by(_: tuple[int, ...]) -> int:
        now[0] += 0.05
        return 0

    monkeypatch.setattr(
        "aiogpu.runtime.memory_monitor.time.perf_counter", lambda: now[0]
    )
    monkeypatch.setattr(house.bounds, "used_by", used_by)
    house.start(1, 5)
    house.bounds.used = 2000
    house.loop.run()
    assert house.watch.cost == pytest.approx(0.05)
    assert house.loop.run() == pytest.approx(0.05 * DEAREST)


COST = 50e-6
"""Seconds that a worker takes to be weighed."""


@pytest.fixture
def crowded(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    """A thousand workers, each of which takes a while to be weighed."""
    now = [0.0]

    def used_by(pids: tuple[int, ...]) -> int:
        now[0] += COST
        return PaperBounds.used_by(house.bounds, pids)

    monkeypatch.setattr(
        "aiogpu.runtime.memory_monitor.time.perf_counter", lambda: now[0]
    )
    monkeypatch.setattr(house.bounds, "used_by", used_by)
    for worker in range(1000):
        house.start(worker, 20 + worker)
    house.bounds.used = 2000
    return house


def turns_of(house: House) -> list[int]:
    """Run until the look is over; gives how many were weighed in each turn."""
    turns = []
    while not turns or house.watch._unweighed:
        before = house.bounds.weighings
        house.loop.run()
        turns.append(house.bounds.weighings - before)
    return turns


def test_many_are_weighed_in_many_turns(crowded: House) -> None:
    """They once held the loop for 50 ms, all at once."""
    turns = turns_of(crowded)
    assert sum(turns) == 1000 + 1, "who is to go is weighed again"
    assert max(turns) <= SLICE / COST + 1
    assert [worker for worker, _, _ in crowded.told] == [999]
    assert crowded.watch.cost == pytest.approx(1001 * COST)
    assert crowded.loop.run() == pytest.approx(1001 * COST * DEAREST)


@pytest.mark.parametrize("what", ["task", "memory", "weight"])
def test_what_has_become_needless_meanwhile(crowded: House, what: str) -> None:
    crowded.loop.run()
    if what == "task":
        crowded.workers[999].asked = 1
    elif what == "memory":
        crowded.bounds.used = 100
    else:
        for pid in crowded.bounds.of_worker:
            crowded.bounds.of_worker[pid] = 1
        crowded.bounds.of_worker[100] = 900
    turns_of(crowded)
    assert crowded.told == []


def test_it_can_be_closed_amid_a_look(crowded: House) -> None:
    crowded.loop.run()
    crowded.watch.close()
    assert crowded.loop.due == []
    crowded.watch.wake()
    turns_of(crowded)
    assert len(crowded.told) == 1
