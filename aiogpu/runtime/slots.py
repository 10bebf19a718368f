"""The node's slots: made when they are wanted, reused, forgotten with their keepers.

A slot's index is its place on the control page and in the names of its pipes, so
one that may still have a keeper is not given to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from aiogpu.memory.page import SLOTS
from aiogpu.runtime.console import Console
from aiogpu.runtime.output import Output
from aiogpu.runtime.slot import Slot
from aiogpu.runtime.zygote import Zygote
from aiogpu.wire.messages import Close
from aiogpu.wire.setup import output_path

SPARE_SLOTS: Final = 16
"""Keepers without a worker that are kept for the next one."""


class Slots:
    """All slots, and which of them have a keeper but no worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        directory: str,
    ) -> None:
        self._loop = loop
        self._console = console
        self._directory = directory
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._next_index = 0
        self._free_indices: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        """Over all slots as they are now; they may be forgotten meanwhile."""
        return iter(list(self._slots.values()))

    def get(self, index: int) -> Slot | None:
        """The slot of that index, None without one."""
        return self._slots.get(index)

    def holds(self, slot: Slot) -> bool:
        """Whether this very slot has not been forgotten."""
        return self._slots.get(slot.index) is slot

    def is_busy(self, zygote: Zygote) -> bool:
        """Whether a worker is in a slot of this zygote."""
        return any(
            slot.zygote is zygote and slot.worker is not None
            for slot in self._slots.values()
        )

    def take(self, zygote: Zygote) -> Slot:
        """A free slot of this zygote, or a new one.

        Raises:
            OSError: none can be made.
        """
        for slot in reversed(self._free):
            if slot.zygote is zygote:
                self._free.remove(slot)
                return slot
        return self.add(zygote)

    def add(self, zygote: Zygote) -> Slot:
        """Make a slot and ask the zygote for its keeper.

        Raises:
            OSError: its pipes cannot be made, or there are too many slots.
        """
        if self._free_indices:
            index = self._free_indices.pop()
        elif self._next_index < SLOTS:
            index = self._next_index
            self._next_index += 1
        else:
            raise OSError(f"a node runs at most {SLOTS} workers at a time")
        out, err = (output_path(self._directory, index, stream) for stream in (1, 2))
        try:
            output = Output(self._loop, self._console, (out, err))
        except OSError:
            self._free_indices.append(index)
            raise
        slot = self._slots[index] = Slot(index, zygote, output)
        zygote.keep(index)
        return slot

    def put_back(self, slot: Slot) -> None:
        """Keep a slot whose worker has ended for the next one, or close its keeper."""
        if len(self._free) < SPARE_SLOTS and slot.zygote.takes_work:
            self._free.append(slot)
        elif slot.keeper is not None:
            slot.keeper.send(Close())

    def withdraw(self, slot: Slot) -> None:
        """Give this slot to no worker any more."""
        if slot in self._free:
            self._free.remove(slot)

    def close_free(self, zygote: Zygote) -> None:
        """Close the keepers of this zygote that have no worker.

        It serves no more. If it has died, nobody would adopt what they leave.
        """
        idle = [slot for slot in self._free if slot.zygote is zygote]
        self._free = [slot for slot in self._free if slot.zygote is not zygote]
        for slot in idle:
            if slot.keeper is not None:
                slot.keeper.send(Close())

    def forget(self, slot: Slot) -> None:
        """Remove a slot from all books; its index stays taken."""
        del self._slots[slot.index]
        self.withdraw(slot)
        slot.zygote.release(slot.index)

    def reuse_index(self, slot: Slot) -> None:
        """A forgotten slot's pipes are closed: another may have its index."""
        self._free_indices.append(slot.index)
