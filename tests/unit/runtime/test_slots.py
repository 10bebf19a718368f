"""The table of slots: which are free, and which index may be given again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.output import Output
from aiogpu.runtime.workers.death import NoCapacityError
from aiogpu.runtime.workers.slots import MARGIN, SPARE_SLOTS, Slots
from aiogpu.wire.messages import Close
from tests.unit.runtime.paper import PaperConsole, PaperPeer, PaperZygote


@pytest.fixture
async def slots(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Slots]:
    console, most = PaperConsole(), getattr(request, "param", SLOTS)
    loop = asyncio.get_running_loop()
    slots = Slots(loop, console, str(tmp_path), most)  # type: ignore[arg-type]
    yield slots
    for slot in slots:
        slot.output.close()
    assert os.listdir(tmp_path) == []


ZYGOTE: Any = PaperZygote()


async def test_a_free_slot_is_taken_before_one_is_made(slots: Slots) -> None:
    first, second = slots.take(ZYGOTE), slots.take(ZYGOTE)
    assert (first.index, second.index, len(slots)) == (0, 1, 2)
    slots.put_back(first)
    assert slots.take(ZYGOTE) is first
    assert slots.take(ZYGOTE).index == 2


async def test_an_index_is_given_again_only_when_its_pipes_are_closed(
    slots: Slots,
) -> None:
    lost = slots.take(ZYGOTE)
    slots.forget(lost)
    assert not slots.holds(lost)
    assert slots.get(lost.index) is None
    assert slots.take(ZYGOTE).index == 1, "its names may still be there"
    lost.output.close()
    slots.reuse_index(lost)
    successor = slots.take(ZYGOTE)
    assert successor.index == lost.index
    assert not slots.holds(lost)


async def test_a_slot_that_was_withdrawn_is_not_taken(slots: Slots) -> None:
    slot = slots.take(ZYGOTE)
    slots.put_back(slot)
    slots.withdraw(slot)
    assert slots.take(ZYGOTE) is not slot


async def test_only_so_many_keepers_are_kept_without_a_worker(slots: Slots) -> None:
    taken = [slots.take(ZYGOTE) for _ in range(SPARE_SLOTS + 1)]
    peers = []
    for slot in taken:
        slot.keeper = peer = PaperPeer()  # type: ignore[assignment]
        peers.append(peer)
        slots.put_back(slot)
    assert [peer.sent for peer in peers] == [[]] * SPARE_SLOTS + [[Close()]]
    slots.close_free(ZYGOTE)
    assert all(peer.sent == [Close()] for peer in peers)


async def test_a_keeper_whose_zygote_has_died_gets_no_new_work(slots: Slots) -> None:
    slot = slots.take(ZYGOTE)
    slot.keeper = peer = PaperPeer()  # type: ignore[assignment]
    slot.zygote = dead = PaperZygote()  # type: ignore[assignment]
    dead.takes_work = False
    slots.put_back(slot)
    assert peer.sent == [Close()]
    assert slots.take(ZYGOTE) is not slot


async def test_a_slot_serves_its_own_zygote_alone(slots: Slots) -> None:
    other: Any = PaperZygote()
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


async def test_there_is_an_end_of_slots(slots: Slots) -> None:
    assert slots.most_workers == SLOTS - SPARE_SLOTS
    slots._next_index = SLOTS
    with pytest.raises(NoCapacityError):
        slots.take(ZYGOTE)


@pytest.mark.parametrize(
    ("most", "workers"), [(1, 1), (2, 1), (3, 2), (10, 7), (100, 84), (4096, 4080)]
)
def test_some_slots_are_for_keepers_without_a_worker(most: int, workers: int) -> None:
    slots = Slots(None, None, "", most)  # type: ignore[arg-type]
    assert (slots.most, slots.most_workers) == (most, workers)


@pytest.mark.parametrize("slots", [2], indirect=True)
async def test_the_last_free_slot_of_another_zygote_is_closed(slots: Slots) -> None:
    other: Any = PaperZygote()
    mine, another = slots.take(ZYGOTE), slots.take(other)
    another.keeper = peer = PaperPeer()  # type: ignore[assignment]
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
    first.keeper = PaperPeer()  # type: ignore[assignment]
    assert slots.take(ZYGOTE).index == 2


async def test_other_errors_are_told_as_they_are(slots: Slots) -> None:
    slots._directory = "/dev/null"
    with pytest.raises(NotADirectoryError):
        slots.take(ZYGOTE)


async def test_all_are_waited_for_while_some_go(slots: Slots) -> None:
    taken = [slots.take(ZYGOTE) for _ in range(3)]
    waiting = asyncio.ensure_future(slots.gone(20.0))
    for slot in taken:
        await asyncio.sleep(0)
        assert not waiting.done()
        slots.forget(slot)
        slot.output.close()
    async with asyncio.timeout(5):
        await waiting
    await slots.gone(20.0)


async def test_those_that_stay_are_not_waited_for(slots: Slots) -> None:
    slot = slots.take(ZYGOTE)
    async with asyncio.timeout(20):
        await slots.gone(0.0)
    slots.forget(slot)
    slot.output.close()
