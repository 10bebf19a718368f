"""Host memory: when the guard checks it, and which task the guard ends."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import MEMORY, UNIT
from aiogpu.core.records import Memory, WorkerState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.linux.procfs import Usage
from aiogpu.runtime import memory_monitor
from aiogpu.runtime.memory_monitor import (
    LATEST,
    PATIENCE,
    RATE,
    SOONEST,
    MemoryGuard,
    Running,
    Weighed,
    choose_victim,
    pause_for,
)
from tests.unit.runtime.fakes import HandLoop

MIB = 1 << 20
LIMIT = 1000 * MIB


def weighed(
    worker: int, used: int, asked: int = 0, *, is_idle: bool = False
) -> Weighed:
    running = Running(WorkerId(worker), worker + 100, asked * MIB, is_idle)
    return Weighed(running, used * MIB)


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
        ([weighed(1, 900), weighed(2, 100, is_idle=True)], 2),
        ([weighed(1, 900), weighed(2, 10, is_idle=True)], 1),
        ([weighed(1, 100, is_idle=True), weighed(2, 200, is_idle=True)], 2),
    ],
)
def test_victim_is_the_best_worker_to_end(
    workers: list[Weighed], victim: int | None
) -> None:
    chosen = choose_victim(workers, LIMIT)
    assert (chosen.running.worker if chosen else None) == victim


@pytest.mark.parametrize(
    ("room", "pause"),
    [
        *[(-5, SOONEST), (0, SOONEST), (RATE // 10, 0.05), (RATE, 0.5)],
        (100 * RATE, LATEST),
    ],
)
def test_next_check_comes_before_memory_can_run_out(room: int, pause: float) -> None:
    assert pause_for(room) == pytest.approx(pause)


class FakeBounds:
    """Memory with a use that the test sets."""

    def __init__(self) -> None:
        self.used = 100
        self.of_worker: dict[int, int] = {}

    def tightest(self) -> Usage:
        return Usage("machine", self.used * MIB, LIMIT)

    def used_by(self, pids: tuple[int, ...]) -> int:
        return sum(self.of_worker.get(pid, 0) for pid in pids) * MIB

    def has(self, pid: int) -> bool:
        return pid in self.of_worker


@dataclass
class FakeWorker:
    """A worker with a task that requested `asked` bytes of memory."""

    id: int
    asked: int
    state: WorkerState = WorkerState.BUSY
    binding: object = None

    @property
    def lease(self) -> SimpleNamespace:
        scalars = ((MEMORY, self.asked * UNIT),)
        return SimpleNamespace(request=SimpleNamespace(scalars=scalars))


class FakeMachine:
    def __init__(self) -> None:
        self.loop, self.bounds = HandLoop(), FakeBounds()
        self.workers: list[FakeWorker] = []
        self.live: dict[int, SimpleNamespace] = {}
        self.ended: list[tuple[int, int, int]] = []
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
        self.ended.append((worker, used, limit))

    def start(self, worker: int, used: int, asked: int = 0) -> None:
        self.workers.append(FakeWorker(worker, asked * MIB))
        self.live[worker] = SimpleNamespace(pid=worker + 100)
        self.bounds.of_worker[worker + 100] = used
        self.watch.wake()


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


def test_guard_checks_only_while_tasks_run(machine: FakeMachine) -> None:
    assert machine.loop.due is None
    machine.start(1, 10)
    machine.start(2, 10)
    assert machine.loop.step() == pytest.approx(SOONEST)
    assert machine.watch.usage is not None
    assert machine.watch.cost > 0
    assert machine.loop.step() == pytest.approx(pause_for(850 * MIB))
    machine.workers.clear()
    machine.loop.step()
    assert machine.loop.due is None
    machine.start(3, 10)
    machine.watch.close()
    assert machine.loop.due is None
    machine.watch.close()


def test_victim_that_does_not_end_protects_others_for_a_time(
    machine: FakeMachine,
) -> None:
    machine.start(1, 300)
    machine.bounds.used = 990
    machine.loop.step()
    started = machine.loop.now
    while len(machine.ended) == 1:
        machine.loop.step()
    assert machine.loop.now - started == pytest.approx(PATIENCE, abs=2 * SOONEST)
    assert [worker for worker, _, _ in machine.ended] == [1, 1]


COST = 50e-6
"""Seconds to measure the memory of one worker."""


@pytest.fixture
def crowded(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """A machine with a thousand workers; to measure one takes COST seconds."""
    now = [0.0]

    def used_by(pids: tuple[int, ...]) -> int:
        now[0] += COST
        return FakeBounds.used_by(machine.bounds, pids)

    monkeypatch.setattr(memory_monitor.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machine.bounds, "used_by", used_by)
    for worker in range(1000):
        machine.start(worker, 20 + worker)
    machine.bounds.used = 2000
    return machine


@pytest.mark.parametrize("changed", ["task", "memory", "weight"])
def test_no_task_is_ended_when_the_reason_vanishes_during_the_check(
    crowded: FakeMachine, changed: str
) -> None:
    crowded.loop.step()
    if changed == "task":
        crowded.workers[999].asked = 1
    elif changed == "memory":
        crowded.bounds.used = 100
    else:
        for pid in crowded.bounds.of_worker:
            crowded.bounds.of_worker[pid] = 1
        crowded.bounds.of_worker[100] = 900
    crowded.loop.step()
    while crowded.watch._unweighed:
        crowded.loop.step()
    assert crowded.ended == []
