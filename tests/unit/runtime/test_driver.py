"""The driver with a paper pool: when it takes something back, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

from aiogpu.core.effects import Effect, Revoke
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import TaskTimeoutError
from aiogpu.runtime.driver import Driver
from aiogpu.wire.codec import LARGE
from tests.unit.runtime import funcs


class PaperOrders:
    """Tells nobody, and notes what it was to tell."""

    def __init__(self) -> None:
        self.revoked: list[int] = []
        self.reaches = True

    def assign(self, *_: object) -> None: ...

    def is_reached(self, _worker: int) -> bool:
        return self.reaches

    def revoke(self, worker: int, _below: int) -> None:
        self.revoked.append(worker)

    def begun(self, _worker: int) -> int:
        return 0


class Office:
    """A driver whose one worker has been sent a task and begins nothing."""

    def __init__(self, payload: bytes, scheduler: Scheduler | None = None) -> None:
        self.commands = PaperOrders()
        pool = SimpleNamespace(
            commands=self.commands,
            spawn=lambda _worker: None,
        )
        self.scheduler = scheduler or Scheduler(Ledger({CPU: UNIT}))
        self.driver = Driver(
            asyncio.get_running_loop(),
            self.scheduler,
            SimpleNamespace(bind=lambda *_: None),  # type: ignore[arg-type]
            lambda *_: None,
            lambda _: pool,  # type: ignore[arg-type, return-value]
        )
        if isinstance(scheduler, OneAtATime):
            scheduler.driver = self.driver
        receiver = SimpleNamespace()
        self.driver.submit(funcs.call().func, payload, receiver)  # type: ignore[arg-type]
        self.driver.on_started(1)

    async def look(self) -> None:
        """The worker is looked at when it has had its time."""
        record = self.scheduler.workers.get(WorkerId(1))
        assert record is not None
        assert record.task is not None
        record.is_revoking, record.revocations = True, 1
        self.driver.revoke(Revoke(WorkerId(1), 1))
        async with asyncio.timeout(60):
            while record.is_revoking:
                await asyncio.sleep(0)


async def test_what_was_not_begun_is_taken_back() -> None:
    office = Office(b"x")
    await office.look()
    assert office.commands.revoked == [1]


@pytest.mark.parametrize("is_large", [True, False])
async def test_what_may_not_have_arrived_is_left_where_it_is(is_large: bool) -> None:
    """A large task, or a program that holds its loop, gives no healthy worker up."""
    office = Office(bytes(LARGE) if is_large else b"x")
    office.commands.reaches = is_large
    await office.look()
    assert office.commands.revoked == []
    record = office.scheduler.workers.get(WorkerId(1))
    assert record is not None
    assert record.task is not None, "it still has its task"


async def test_there_is_a_way_for_every_effect() -> None:
    driver = Office(b"x").driver
    assert set(driver.handlers) == set(get_args(Effect))
    assert driver.holders == {}


class OneAtATime(Scheduler):
    """Is told of nothing while the effects of what it was told are carried out."""

    driver: Driver

    def __init__(self) -> None:
        super().__init__(Ledger({CPU: UNIT}))
        self.is_deciding = False
        self.told: list[str] = []


def _heard(name: str) -> Callable[..., Sequence[Effect]]:
    step = getattr(Scheduler, name)

    def method(self: OneAtATime, *args: object) -> Sequence[Effect]:
        assert self.driver.is_busy, "the driver has said that it is at work"
        assert not self.is_deciding, "it is not asked amid a decision"
        self.is_deciding = True
        self.told.append(name)
        wanted: Sequence[Effect] = step(self, *args)
        self.is_deciding = False
        return wanted

    return method


class Meddler:
    """Submits, cancels and submits again as it is told of its task."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.told: list[object] = []
        self.during: list[str] = []

    def settle(self, error: Exception) -> None:
        driver, scheduler = self.office.driver, self.office.scheduler
        assert isinstance(scheduler, OneAtATime)
        self.told.append(type(error))
        before = len(scheduler.told)
        receiver = SimpleNamespace(settle=self.told.append)
        func = funcs.call().func
        first = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        second = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        assert second == first + 1
        driver.cancel(first)
        self.during = scheduler.told[before:]


async def test_what_happens_amid_an_event_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which it happened; nothing is decided amid a decision."""
    # The driver calls what `Scheduler` has by these names.
    for name, method in {n: _heard(n) for n in ("wake", "submit", "cancel")}.items():
        monkeypatch.setattr(Scheduler, name, method)
    scheduler = OneAtATime()
    office = Office(b"x", scheduler)
    driver = office.driver
    meddler = Meddler(office)
    func = replace(funcs.call().func, spec=replace(funcs.call().func.spec, timeout=9))
    task = driver.submit(func, b"x", meddler)  # type: ignore[arg-type]
    scheduler.told.clear()
    record = scheduler.tasks[TaskId(task)]
    scheduler.timers.set(0.0, AlarmKind.EXPIRE, record.id)
    driver.feed(Scheduler.wake)
    assert meddler.told == [TaskTimeoutError]
    assert meddler.during == [], "it is told nothing while it is at work"
    assert scheduler.told == ["wake", "submit", "submit", "cancel"]
    assert not driver.is_busy
    assert sorted(scheduler.tasks) == [1, task + 2], "the last one waits"
