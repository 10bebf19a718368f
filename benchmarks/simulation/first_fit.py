"""First fit over all GPUs: the lowest that have room, and nobody waits for another.

A part of a GPU goes to the first GPU with so much of it free; whole ones are the first
that are entirely free. Who does not fit is passed over by everybody of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.rule import Line
from benchmarks.simulation.trace import Trace


class FirstFit:
    """One node with all GPUs."""

    name = "first fit"

    def __init__(self, trace: Trace) -> None:
        self._amounts = [kind.amount for kind in trace.kinds]
        self._line = Line(len(trace.kinds))
        self._left = [UNIT] * trace.gpus
        self.free: Sequence[int] = self._left
        self._whole = trace.gpus
        self._held: dict[int, tuple[int, list[int]]] = {}
        # Heaps: the GPUs with room for a part, and some that have it no longer.
        parts = {min(amount, UNIT) for amount in self._amounts}
        self._with_room = {part: [*range(trace.gpus)] for part in parts}

    def submit(self, task: int, size: int, _: float) -> list[int]:
        """A task of a size has come; answer those that begin."""
        return self._line.add(task, size, self._place)

    def end(self, task: int, _: float) -> list[int]:
        """A task has ended; answer those that begin."""
        part, gpus = self._held.pop(task)
        for gpu in gpus:
            before, after = self._left[gpu], self._left[gpu] + part
            self._left[gpu] = after
            self._whole += after == UNIT
            for level, with_room in self._with_room.items():
                if before < level <= after:
                    heappush(with_room, gpu)
        return self._line.serve(self._place)

    def _place(self, task: int, size: int) -> bool:
        amount = self._amounts[size]
        if amount > self._whole * UNIT and amount >= UNIT:
            return False
        part = min(amount, UNIT)
        gpus: list[int] = []
        for _ in range(amount // part):
            gpu = self._first(part)
            if gpu is None:
                return False
            self._whole -= self._left[gpu] == UNIT
            self._left[gpu] -= part
            gpus.append(gpu)
        self._held[task] = part, gpus
        return True

    def _first(self, part: int) -> int | None:
        with_room, left = self._with_room[part], self._left
        while with_room and left[with_room[0]] < part:
            heappop(with_room)
        return with_room[0] if with_room else None
