"""Slots and workers: who gets which slot, and when a worker is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiogpu.core.model.request import Environment
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.output import Output
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.death import Death, NoCapacityError
from aiogpu.runtime.workers.message_router import InlinePoller
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import (
    MARGIN,
    SITES_KEPT,
    LiveWorker,
    Slot,
    Slots,
)
from aiogpu.wire.connection import KEEPER, WORKER
from aiogpu.wire.connection import ZYGOTE as ZYGOTE_ROLE
from aiogpu.wire.messages import (
    Close,
    Define,
    Done,
    End,
    Ended,
    Failed,
    Forget,
    Fork,
    Forked,
    Hello,
    Message,
    Skipped,
)
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import (
    FakeConsole,
    FakePeer,
    FakeStore,
    FakeZygote,
    FakeZygotes,
)

pytestmark = pytest.mark.either_loop


@pytest.fixture
async def slots(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Slots]:
    console, most = FakeConsole(), getattr(request, "param", SLOTS)
    loop = asyncio.get_running_loop()
    slots = Slots(loop, console, str(tmp_path), most)  # type: ignore[arg-type]
    yield slots
    for slot in slots:
        slot.output.close()
    assert os.listdir(tmp_path) == []


ZYGOTE: Any = FakeZygote()


async def test_a_slot_serves_its_own_zygote_alone(slots: Slots) -> None:
    other: Any = FakeZygote()
    mine, another = slots.take(ZYGOTE), slots.take(other)
    assert other.kept == [another.index]
    assert not slots.is_busy(other)
    worker: Any = SimpleNamespace(peer=None, funcs=set())
    another.worker = worker
    assert slots.is_busy(other), "it starts"
    worker.peer = object()
    assert not slots.is_busy(other), "it stands ready"
    worker.funcs.add(1)
    assert slots.is_busy(other)
    assert not slots.is_busy(ZYGOTE)
    another.worker = None
    slots.put_back(mine)
    slots.put_back(another)
    slots.close_free(other)
    assert slots.take(other) is not another, "its keeper was closed"
    assert slots.take(ZYGOTE) is mine
    slots.forget(another)
    assert other.released == [another.index]
    another.output.close()


@pytest.mark.parametrize("slots", [2], indirect=True)
async def test_the_last_free_slot_of_another_zygote_is_closed(slots: Slots) -> None:
    other: Any = FakeZygote()
    mine, another = slots.take(ZYGOTE), slots.take(other)
    another.keeper = peer = FakePeer()  # type: ignore[assignment]
    slots.put_back(another)
    with pytest.raises(NoCapacityError, match="2 slots of 2 are taken"):
        slots.take(ZYGOTE)
    assert peer.sent == [Close()]
    with pytest.raises(NoCapacityError):
        slots.take(other)
    slots.forget(another)
    another.output.close()
    slots.reuse_index(another)
    assert slots.take(ZYGOTE).index == another.index
    assert slots.holds(mine)


async def test_descriptors_are_left_for_connections_to_come(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "descriptor", 100)
    first = slots.take(ZYGOTE)
    # Up to number 100 all are taken; the connections of two slots are to come.
    enough = 101 + 4 + MARGIN
    monkeypatch.setattr("aiogpu.runtime.workers.slots.soft_limit", lambda: enough - 1)
    with pytest.raises(NoCapacityError, match=rf"{enough - 1} descriptors may"):
        slots.take(ZYGOTE)
    monkeypatch.setattr("aiogpu.runtime.workers.slots.soft_limit", lambda: enough)
    second = slots.take(ZYGOTE)
    assert second.index == 1, "the place of the one that failed"
    monkeypatch.setattr("aiogpu.runtime.workers.slots.soft_limit", lambda: enough + 1)
    with pytest.raises(NoCapacityError):
        slots.take(ZYGOTE)
    first.keeper = FakePeer()  # type: ignore[assignment]
    assert slots.take(ZYGOTE).index == 2


def live_worker() -> LiveWorker:
    return LiveWorker(1, cast("Slot", None), cast("asyncio.Handle", None))


def test_too_many_functions_are_forgotten_together() -> None:
    one = live_worker()
    function = fakes.function()
    for _ in range(SITES_KEPT):
        assert [type(m) for m in one.introduce(fakes.func(function))] == [Define]
    straw = fakes.func(function)
    forget, define = one.introduce(straw)
    assert forget == Forget()
    assert isinstance(define, Define)
    assert define.payload == b"pickled", "it has been forgotten as well"
    assert (one.funcs, one.functions) == ({straw.id}, {function.id})


def keeper_death(pid: int, last_output: tuple[str, ...] = ()) -> Death:
    """The death of a worker whose keeper has died."""
    return Death(pid, int(signal.SIGKILL), last_output, known=cause.KEEPER_DIED)


class FakeNode:
    """A pool between paper peers and a paper driver."""

    def __init__(self, directory: Path, most: int = SLOTS) -> None:
        self.console = FakeConsole()
        self.signals: list[tuple[int, int]] = []
        self.events: list[tuple[object, ...]] = []
        self.workers: dict[int, LiveWorker] = {}
        self.burst = InlinePoller(self.workers, list)
        self.requests = SimpleNamespace(on_message=self.on_nested)
        loop, console = asyncio.get_running_loop(), self.console
        self.pool = Pool(
            loop,
            FakeZygotes,  # type: ignore[arg-type]
            console,  # type: ignore[arg-type]
            FakeStore(),  # type: ignore[arg-type]
            Slots(loop, console, str(directory), most),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda pid, number: self.signals.append((pid, number)),
        )
        self.zygotes: FakeZygotes = self.pool.zygotes  # type: ignore[assignment]
        # Whatever the machine has killed before, these tests are not concerned.
        self.pool.autopsy.begin()

    def on_started(self, worker: int) -> None:
        self.events.append(("started", worker))

    def on_gone(self, worker: int, death: Death) -> None:
        self.events.append(("gone", worker, death))

    def on_outdated(self, environment: Environment) -> None:
        self.events.append(("outdated", environment))

    def on_done(self, worker: int, answers: list[Done]) -> None:
        for answer in answers:
            self.on_answer(worker, answer)

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        self.events.append((worker, answer))

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        self.events.append((worker, skipped))

    def on_nested(self, worker: LiveWorker, message: Message) -> None:
        self.events.append((worker.id, message))

    def delay(self, worker: LiveWorker, task: int, _delay: object) -> None:
        self.events.append(("behind", worker.id, task))

    def name_of(self, task: int) -> str:
        return f"train-{task}"

    def greet(self, role: str, identity: int, pid: int = 0) -> FakePeer:
        peer = FakePeer()
        hello = Hello(1, role, identity, pid)
        recipient = self.pool.greeted(peer, hello)  # type: ignore[arg-type]
        if recipient is not None:
            peer.on_messages, peer.on_lost, _ = recipient
        return peer

    def keeper(self, slot: int = 0) -> FakePeer:
        return self.greet(KEEPER, slot)

    def worker(self, identity: int = 1) -> FakePeer:
        return self.greet(WORKER, identity, 1000 + identity)

    def start(self, identity: int = 1) -> tuple[FakePeer, FakePeer]:
        """A worker in a new slot, from the wish to its greeting."""
        self.pool.spawn(identity)
        keeper = self.keeper(self.zygotes.kept[-1])
        keeper.on_messages([Forked(identity, 1000 + identity)])
        worker = self.worker(identity)
        self.events.clear()
        keeper.sent.clear()
        return keeper, worker


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode(tmp_path, SLOTS)
    yield node
    for slot in node.pool.slots:
        slot.keeper = None
    for worker in node.pool.workers.values():
        worker.peer = None
    await node.pool.close()
    assert os.listdir(tmp_path) == []


async def test_unknown_greetings_are_cut_off(node: FakeNode) -> None:
    assert node.worker(9).calls == ["abort"]
    assert node.keeper(9).calls == ["abort"]
    node.start()
    assert node.worker(1).calls == ["abort"], "there is one of that id"
    assert node.keeper(0).calls == ["abort"]
    assert node.events == []
    zygote = node.greet(ZYGOTE_ROLE, 0)
    assert node.zygotes.peers == [zygote]


async def test_a_late_end_of_a_keeper_does_not_touch_its_successor(
    node: FakeNode,
) -> None:
    first, _ = node.start(1)
    node.pool.on_lost_slot(0)
    second, _ = node.start(2)
    assert node.zygotes.kept == [0, 0]
    node.zygotes.die()
    first.on_lost()
    assert node.events == []
    assert set(node.pool.workers) == {2}
    second.on_lost()
    assert node.events == [("gone", 2, keeper_death(1002))]


async def test_a_worker_that_does_not_connect_in_time(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", 0.0)
    node.pool.spawn(1)
    async with asyncio.timeout(60):
        while not node.events:
            await asyncio.sleep(0)
    assert node.events == [
        (
            "gone",
            1,
            Death(reason="it did not connect within 0 s", known=cause.NOT_STARTED),
        )
    ]
    keeper = node.keeper(0)
    assert keeper.taken() == []
    node.pool.spawn(2)
    assert keeper.taken() == [Fork(2)], "a keeper that comes late is of use"
    async with asyncio.timeout(60):
        while not keeper.sent:
            await asyncio.sleep(0)
    assert keeper.taken() == [End(2)]
    keeper.on_messages([Ended(2, 9)])
    reason = "it did not connect within 0 s"
    assert node.events[1:] == [
        ("gone", 2, Death(0, 9, (), reason, known=cause.NOT_STARTED))
    ]
