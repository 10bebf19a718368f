"""The table of slots: which are free, and which index may be given again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aiogpu.memory.page import SLOTS
from aiogpu.runtime.slots import SPARE_SLOTS, Slots
from aiogpu.wire.messages import Close
from tests.runtime.paper import PaperConsole, PaperPeer, PaperZygote


@pytest.fixture
async def slots(tmp_path: Path) -> AsyncIterator[Slots]:
    zygote, console = PaperZygote(), PaperConsole()
    slots = Slots(asyncio.get_running_loop(), zygote, console, str(tmp_path))  # type: ignore[arg-type]
    slots.zygote = zygote  # type: ignore[attr-defined]
    yield slots
    for slot in slots:
        slot.output.close()
    assert os.listdir(tmp_path) == []


async def test_a_free_slot_is_taken_before_one_is_made(slots: Slots) -> None:
    first, second = slots.take(), slots.take()
    assert (first.index, second.index, len(slots)) == (0, 1, 2)
    slots.put_back(first)
    assert slots.take() is first
    assert slots.take().index == 2


async def test_an_index_is_given_again_only_when_its_pipes_are_closed(
    slots: Slots,
) -> None:
    lost = slots.take()
    slots.forget(lost)
    assert not slots.holds(lost)
    assert slots.get(lost.index) is None
    assert slots.take().index == 1, "its names may still be there"
    lost.output.close()
    slots.reuse_index(lost)
    successor = slots.take()
    assert successor.index == lost.index
    assert not slots.holds(lost)


async def test_a_slot_that_was_withdrawn_is_not_taken(slots: Slots) -> None:
    slot = slots.take()
    slots.put_back(slot)
    slots.withdraw(slot)
    assert slots.take() is not slot


async def test_only_so_many_keepers_are_kept_without_a_worker(slots: Slots) -> None:
    taken = [slots.take() for _ in range(SPARE_SLOTS + 1)]
    peers = []
    for slot in taken:
        slot.keeper = peer = PaperPeer()  # type: ignore[assignment]
        peers.append(peer)
        slots.put_back(slot)
    assert [peer.sent for peer in peers] == [[]] * SPARE_SLOTS + [[Close()]]
    slots.close_free()
    assert all(peer.sent == [Close()] for peer in peers)


async def test_a_keeper_whose_zygote_has_died_gets_no_new_work(slots: Slots) -> None:
    slot = slots.take()
    slot.keeper = peer = PaperPeer()  # type: ignore[assignment]
    slot.generation -= 1
    slots.put_back(slot)
    assert peer.sent == [Close()]
    assert slots.take() is not slot


async def test_there_is_an_end_of_slots(slots: Slots) -> None:
    slots._next_index = SLOTS
    with pytest.raises(OSError, match=str(SLOTS)):
        slots.take()
