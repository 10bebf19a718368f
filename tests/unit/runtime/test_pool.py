"""Slots and workers: which zygote uses which slot, and how workers end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.directories import NodeDirectory
from aiogpu.runtime.output import Output
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.death import Death, NoCapacityError
from aiogpu.runtime.workers.message_router import InlinePoller
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import MARGIN, SITES_KEPT, LiveWorker, Slot, Slots
from aiogpu.wire.connection import KEEPER, WORKER
from aiogpu.wire.connection import ZYGOTE as ZYGOTE_ROLE
from aiogpu.wire.messages import Close, Define, End, Ended, Forget, Fork, Forked, Hello
from tests.support.waits import until
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
    directory = NodeDirectory(str(tmp_path))
    slots = Slots(loop, console, directory, most)  # type: ignore[arg-type]
    yield slots
    for slot in slots:
        slot.output.close()
    assert os.listdir(tmp_path) == []


ZYGOTE: Any = FakeZygote()


async def test_slot_serves_only_its_own_zygote(slots: Slots) -> None:
    other: Any = FakeZygote()
    mine, another = slots.take(ZYGOTE), slots.take(other)
    assert other.kept == [another.index]
    assert not slots.is_busy(other)
    worker: Any = SimpleNamespace(peer=None, funcs=set())
    another.worker = worker
    assert slots.is_busy(other), "the worker starts"
    worker.peer = object()
    assert not slots.is_busy(other), "the worker is idle"
    worker.funcs.add(1)
    assert slots.is_busy(other)
    assert not slots.is_busy(ZYGOTE)
    another.worker = None
    slots.put_back(mine)
    slots.put_back(another)
    slots.close_free(other)
    assert slots.take(other) is not another, "its keeper is closed"
    assert slots.take(ZYGOTE) is mine
    slots.forget(another)
    assert other.released == [another.index]
    another.output.close()


@pytest.mark.parametrize("slots", [2], indirect=True)
async def test_free_slot_of_another_zygote_closes_if_slots_run_out(
    slots: Slots,
) -> None:
    other: Any = FakeZygote()
    mine, another = slots.take(ZYGOTE), slots.take(other)
    another.keeper = peer = FakePeer()  # type: ignore[assignment]
    slots.put_back(another)
    with pytest.raises(NoCapacityError, match="2 of 2 slots are taken"):
        slots.take(ZYGOTE)
    assert peer.sent == [Close()]
    with pytest.raises(NoCapacityError):
        slots.take(other)
    slots.forget(another)
    another.output.close()
    slots.reuse_index(another)
    assert slots.take(ZYGOTE).index == another.index
    assert slots.holds(mine)


async def test_slots_leave_descriptors_for_their_connections(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "descriptor", 100)
    first = slots.take(ZYGOTE)
    # Descriptors up to 100 are open; two slots will open connections.
    enough = limit = 101 + 4 + MARGIN
    monkeypatch.setattr("aiogpu.runtime.workers.slots.soft_limit", lambda: limit)
    limit = enough - 1
    with pytest.raises(NoCapacityError, match=rf"{limit} open descriptors"):
        slots.take(ZYGOTE)
    limit = enough
    second = slots.take(ZYGOTE)
    assert second.index == 1, "the index of the failed request"
    limit = enough + 1
    with pytest.raises(NoCapacityError):
        slots.take(ZYGOTE)
    first.keeper = FakePeer()  # type: ignore[assignment]
    assert slots.take(ZYGOTE).index == 2


def test_worker_forgets_all_functions_when_there_are_too_many() -> None:
    worker = LiveWorker(1, cast("Slot", None), cast("asyncio.Handle", None))
    function = fakes.function()
    for _ in range(SITES_KEPT):
        assert [type(m) for m in worker.introduce(fakes.func(function))] == [Define]
    last = fakes.func(function)
    forget, define = worker.introduce(last)
    assert forget == Forget()
    assert isinstance(define, Define)
    assert define.payload == b"pickled", "the pickled function was forgotten as well"
    assert (worker.funcs, worker.functions) == ({last.id}, {function.id})


class FakeNode:
    """A pool with fake peers that is its own fake driver; it records events."""

    def __init__(self, directory: Path, most: int = SLOTS) -> None:
        self.console = FakeConsole()
        self.signals: list[tuple[int, int]] = []
        self.events: list[tuple[object, ...]] = []
        self.workers: dict[int, LiveWorker] = {}
        self.burst = InlinePoller(self.workers, list)
        self.requests = None
        loop, console = asyncio.get_running_loop(), self.console
        self.pool = Pool(
            loop,
            FakeZygotes,  # type: ignore[arg-type]
            console,  # type: ignore[arg-type]
            FakeStore(),  # type: ignore[arg-type]
            Slots(loop, console, NodeDirectory(str(directory)), most),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda pid, number: self.signals.append((pid, number)),
        )
        self.zygotes: FakeZygotes = self.pool.zygotes  # type: ignore[assignment]
        # Ignore processes that the kernel killed before the test.
        self.pool.autopsy.begin()

    def on_started(self, worker: int) -> None:
        self.events.append(("started", worker))

    def on_gone(self, worker: int, death: Death, is_left: bool = False) -> None:
        assert not is_left, worker
        self.events.append(("gone", worker, death))

    def greet(self, role: str, identity: int, pid: int = 0) -> FakePeer:
        peer = FakePeer()
        hello = Hello(1, role, identity, pid)
        recipient = self.pool.on_hello(peer, hello)  # type: ignore[arg-type]
        if recipient is not None:
            peer.on_messages, peer.on_lost, _ = recipient
        return peer

    def keeper(self, slot: int = 0) -> FakePeer:
        return self.greet(KEEPER, slot)

    def worker(self, identity: int = 1) -> FakePeer:
        return self.greet(WORKER, identity, 1000 + identity)

    def start(self, identity: int = 1) -> tuple[FakePeer, FakePeer]:
        """Start a worker in a new slot, up to its greeting."""
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


async def test_unknown_peers_are_cut_off(node: FakeNode) -> None:
    assert node.worker(9).calls == ["abort"]
    assert node.keeper(9).calls == ["abort"]
    node.start()
    assert node.worker(1).calls == ["abort"], "a worker with this id exists"
    assert node.keeper(0).calls == ["abort"]
    assert node.events == []
    zygote = node.greet(ZYGOTE_ROLE, 0)
    assert node.zygotes.peers == [zygote]


async def test_many_ends_are_spread_over_turns(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.workers.pool.MANY", 2)
    monkeypatch.setattr(node.pool._departures, "_seconds", 0.0)
    keepers = [node.start(number)[0] for number in (1, 2, 3)]
    for number, keeper in enumerate(keepers, start=1):
        node.pool.workers[number].peer = None
        keeper.on_messages([Ended(number, 9)])
    assert node.events == [], "no time was left in this turn"
    # The last of the three dies with its keeper meanwhile.
    node.pool.on_lost_slot(2)
    assert [event[:2] for event in node.events] == [("gone", 3)]
    monkeypatch.setattr(node.pool._departures, "_seconds", 60.0)
    await until(lambda: len(node.events) == 3)
    assert [event[:2] for event in node.events[1:]] == [("gone", 1), ("gone", 2)]


async def test_late_end_of_keeper_does_not_affect_its_successor(node: FakeNode) -> None:
    first, _ = node.start(1)
    node.pool.on_lost_slot(0)
    second, _ = node.start(2)
    assert node.zygotes.kept == [0, 0]
    node.zygotes.die()
    first.on_lost()
    assert node.events == []
    assert set(node.pool.workers) == {2}
    second.on_lost()
    death = Death(1002, int(signal.SIGKILL), (), known=cause.KEEPER_DIED)
    assert node.events == [("gone", 2, death)]


async def test_worker_that_does_not_connect_in_time_is_gone(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", 0.0)
    node.pool.spawn(1)
    await until(lambda: node.events)
    death = Death(reason="it did not connect within 0 s", known=cause.NOT_STARTED)
    assert node.events == [("gone", 1, death)]
    keeper = node.keeper(0)
    assert keeper.taken() == []
    node.pool.spawn(2)
    assert keeper.taken() == [Fork(2)], "a late keeper serves the next worker"
    await until(lambda: keeper.sent)
    assert keeper.taken() == [End(2)]
    keeper.on_messages([Ended(2, 9)])
    assert node.events[1:] == [("gone", 2, death._replace(status=9))]
