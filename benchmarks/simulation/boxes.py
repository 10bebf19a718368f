"""Boxes of eight GPUs: a task's GPUs are those of one box, as on a cluster of Ray.

Which box is the rule; within it a part of a GPU goes to the fullest GPU with room,
whole ones are the lowest that are entirely free, as in Ray. More than eight GPUs are
as many boxes, each entirely free, all at once (Ray: a placement group). Who does not
fit is passed over by everybody of another size.

Ray's rule is that of its `HybridSchedulingPolicy` with its defaults: of the boxes with
room, in the order of their utilisation (of CPUs, the GPUs do not count; below a half
all are equal) and then of their ids, one of the first fifth of all boxes by chance,
but the box of the program itself (here the first) wherever none is better.

It is made better than Ray in two ways. Ray sends a task to a box where the free parts
of several GPUs add up to what it asks for, and it waits there; here a box has room if
one GPU has. And what each box knows of the others is never out of date here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from random import Random
from typing import Final

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.rule import Line
from benchmarks.simulation.trace import Trace

GPUS: Final = 8
"""Of a box."""
CPUS: Final = 96
"""Of a box, as in common ones; a task takes one."""
SPREAD_ABOVE: Final = 0.5
TOP: Final = 0.2
"""Ray's defaults: `scheduler_spread_threshold`, `scheduler_top_k_fraction`."""

Entry = tuple[float, int]
"""A box with room: its score, the lower the better, and its number."""


class Boxes:
    """First fit: the first box that has room."""

    name = f"first fit, boxes of {GPUS}"

    def __init__(self, trace: Trace) -> None:
        count = trace.gpus // GPUS
        self._amounts = [kind.amount for kind in trace.kinds]
        self._line = Line(len(trace.kinds))
        self._left = [UNIT] * (count * GPUS)
        self.free: Sequence[int] = self._left
        self._tasks = [0] * count
        self._held: dict[int, tuple[int, list[int]]] = {}
        self._entries: list[Entry] = [(0.0, box) for box in range(count)]
        # For each amount that is asked of a box, those with room for it, in order.
        asked = {min(amount, GPUS * UNIT) for amount in self._amounts}
        self._with_room = {amount: [*self._entries] for amount in asked}
        self._rooms = [(GPUS, UNIT)] * count

    def submit(self, task: int, size: int, _: float) -> list[int]:
        """A task of a size has come; answer those that begin."""
        return self._line.add(task, size, self._place)

    def end(self, task: int, _: float) -> list[int]:
        """A task has ended; answer those that begin."""
        part, gpus = self._held.pop(task)
        for gpu in gpus:
            self._left[gpu] += part
        for box in {gpu // GPUS for gpu in gpus}:
            self._tasks[box] -= 1
            self._file(box)
        return self._line.serve(self._place)

    def _place(self, task: int, size: int) -> bool:
        amount = self._amounts[size]
        wanted = -(-amount // (GPUS * UNIT))
        amount = min(amount, GPUS * UNIT)
        with_room = self._with_room[amount]
        if len(with_room) < wanted:
            return False
        if wanted == 1:
            boxes = [self._choose(with_room)]
        else:
            boxes = [box for _, box in with_room[:wanted]]
        part = min(amount, UNIT)
        gpus: list[int] = []
        for box in boxes:
            gpus += self._within(box, amount)
        for gpu in gpus:
            self._left[gpu] -= part
        for box in boxes:
            self._tasks[box] += 1
            self._file(box)
        self._held[task] = part, gpus
        return True

    def _choose(self, with_room: Sequence[Entry]) -> int:
        return with_room[0][1]

    def _score(self, box: int) -> float:
        return 0.0

    def _within(self, box: int, amount: int) -> list[int]:
        gpus = range(box * GPUS, (box + 1) * GPUS)
        if amount >= UNIT:
            whole = [gpu for gpu in gpus if self._left[gpu] == UNIT]
            return whole[: amount // UNIT]
        return [min((self._left[g], g) for g in gpus if self._left[g] >= amount)[1]]

    def _file(self, box: int) -> None:
        """Something of a box was taken or given back."""
        left = self._left[box * GPUS : (box + 1) * GPUS]
        room = left.count(UNIT), max(left)
        entry = self._score(box), box
        before, self._entries[box] = self._entries[box], entry
        had, self._rooms[box] = self._rooms[box], room
        if had == room and before == entry:
            return
        for amount, with_room in self._with_room.items():
            is_there, was_there = _serves(room, amount), _serves(had, amount)
            if was_there and not (is_there and before == entry):
                del with_room[bisect_left(with_room, before)]
            if is_there and not (was_there and before == entry):
                insort(with_room, entry)


def _serves(room: tuple[int, int], amount: int) -> bool:
    whole, most = room
    return whole * UNIT >= amount if amount >= UNIT else most >= amount


class RayBoxes(Boxes):
    """Ray's choice among the boxes."""

    name = f"Ray's rule, boxes of {GPUS}"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._chance = Random(trace.gpus)
        self._top = max(1, int(TOP * (trace.gpus // GPUS)))

    def _choose(self, with_room: Sequence[Entry]) -> int:
        own = self._entries[0]
        if own[0] <= with_room[0][0] and with_room[0] == own:
            return 0
        return with_room[self._chance.randrange(min(self._top, len(with_room)))][1]

    def _score(self, box: int) -> float:
        used = self._tasks[box] / CPUS
        return used if used >= SPREAD_ABOVE else 0.0
