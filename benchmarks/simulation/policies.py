"""The policies with which aiogpu's policy is compared: first fit, and Ray's.

No policy here reserves GPUs for a large task: a task that does not fit is overtaken by
tasks of other sizes. Nodes have eight GPUs, and a task's GPUs are on one node. Within a
node a part of a GPU goes to the fullest GPU with room, whole GPUs are the lowest free
ones, as in Ray. More than eight GPUs are several free nodes at once (in Ray: a
placement group).

Ray's policy is its `HybridSchedulingPolicy` with the defaults: nodes with room are
ordered by their utilisation (of CPUs; GPUs do not count, and below a half all are
equal) and then by id, and one of the first fifth is chosen at random, except that the
program's own node (here the first) is taken wherever none is better. It is modelled
better than Ray in two ways. Ray sends a task to a node where the free parts of several
GPUs add up to the request, and the task waits there; here a node has room if one GPU
has. And what the nodes know of each other is never out of date here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from random import Random
from typing import Final, Protocol

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.trace import Trace

GPUS_PER_NODE: Final = 8
CPUS_PER_NODE: Final = 96
"""As in common servers; a task takes one."""
SPREAD_THRESHOLD: Final = 0.5
TOP_K_FRACTION: Final = 0.2
"""Ray's `scheduler_spread_threshold` and `scheduler_top_k_fraction`."""

Entry = tuple[float, int]
"""A node's score, the lower the better, and its index."""


class Policy(Protocol):
    """Decide which task starts when, and on which GPUs.

    Attributes:
        name: in the table.
        free: free units of each GPU; only read from outside.
    """

    @property
    def name(self) -> str: ...
    @property
    def free(self) -> Sequence[int]: ...

    def submit(self, task: int, size: int, now: float) -> Sequence[int]:
        """Submit a task of a size class; return the tasks that start."""

    def end(self, task: int, now: float) -> Sequence[int]:
        """End a task; return the tasks that start."""


class Queued:
    """One FIFO queue for each size; a task that does not fit blocks only its own.

    Attributes:
        left: free units of each GPU.
        held: for each running task, the units on each GPU, and the GPUs.
    """

    def __init__(self, trace: Trace, gpus: int) -> None:
        self.amounts = [each.amount for each in trace.classes]
        self.left = [UNIT] * gpus
        self.free: Sequence[int] = self.left
        self.held: dict[int, tuple[int, list[int]]] = {}
        self._waiting: list[deque[int]] = [deque() for _ in trace.classes]

    def place(self, task: int, size: int) -> bool:
        """Start the task if it fits."""
        raise NotImplementedError

    def release(self, part: int, gpus: Sequence[int]) -> None:
        """Free this number of units on each of these GPUs."""
        raise NotImplementedError

    def submit(self, task: int, size: int, _now: float) -> list[int]:
        """Start the task if it fits and no task of its size waits; else enqueue it."""
        waiting = self._waiting[size]
        if not waiting and self.place(task, size):
            return [task]
        waiting.append(task)
        return []

    def end(self, task: int, _now: float) -> list[int]:
        """End a task; start the tasks that fit now, in the order of submission."""
        self.release(*self.held.pop(task))
        started: list[int] = []
        blocked: set[int] = set()
        while heads := [
            (waiting[0], size)
            for size, waiting in enumerate(self._waiting)
            if waiting and size not in blocked
        ]:
            task, size = min(heads)
            if self.place(task, size):
                self._waiting[size].popleft()
                started.append(task)
            else:
                blocked.add(size)
        return started


class FirstFit(Queued):
    """First fit on one node with all GPUs: the lowest GPUs that have room."""

    name = "first fit"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, trace.gpus)
        self._whole = trace.gpus
        # Heaps of GPUs with room for a part; `_first` drops stale entries.
        parts = {min(amount, UNIT) for amount in self.amounts}
        self._with_room = {part: [*range(trace.gpus)] for part in parts}

    def release(self, part: int, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            before, after = self.left[gpu], self.left[gpu] + part
            self.left[gpu] = after
            self._whole += after == UNIT
            for level, with_room in self._with_room.items():
                if before < level <= after:
                    heappush(with_room, gpu)

    def place(self, task: int, size: int) -> bool:
        amount = self.amounts[size]
        if amount > self._whole * UNIT and amount >= UNIT:
            return False
        part = min(amount, UNIT)
        gpus: list[int] = []
        for _ in range(amount // part):
            gpu = self._first(part)
            if gpu is None:
                return False
            self._whole -= self.left[gpu] == UNIT
            self.left[gpu] -= part
            gpus.append(gpu)
        self.held[task] = part, gpus
        return True

    def _first(self, part: int) -> int | None:
        with_room = self._with_room[part]
        while with_room and self.left[with_room[0]] < part:
            heappop(with_room)
        return with_room[0] if with_room else None


class NodesFirstFit(Queued):
    """First fit on nodes of eight GPUs: the first node that has room."""

    name = f"first fit, nodes of {GPUS_PER_NODE}"

    def __init__(self, trace: Trace) -> None:
        count = trace.gpus // GPUS_PER_NODE
        super().__init__(trace, count * GPUS_PER_NODE)
        self._tasks = [0] * count
        self._entries: list[Entry] = [(0.0, node) for node in range(count)]
        # For each amount that is requested of a node, the nodes with room, in order.
        requested = {min(amount, GPUS_PER_NODE * UNIT) for amount in self.amounts}
        self._with_room = {amount: [*self._entries] for amount in requested}
        self._rooms = [(GPUS_PER_NODE, UNIT)] * count

    def release(self, part: int, gpus: Sequence[int]) -> None:
        self._change(gpus, part, -1)

    def place(self, task: int, size: int) -> bool:
        wanted = -(-self.amounts[size] // (GPUS_PER_NODE * UNIT))
        amount = min(self.amounts[size], GPUS_PER_NODE * UNIT)
        with_room = self._with_room[amount]
        if len(with_room) < wanted:
            return False
        nodes = [node for _, node in with_room[:wanted]]
        if wanted == 1:
            nodes = [self._choose(with_room)]
        part = min(amount, UNIT)
        gpus = [gpu for node in nodes for gpu in self._within(node, amount)]
        self._change(gpus, -part, 1)
        self.held[task] = part, gpus
        return True

    def _change(self, gpus: Sequence[int], units: int, tasks: int) -> None:
        for gpu in gpus:
            self.left[gpu] += units
        for node in {gpu // GPUS_PER_NODE for gpu in gpus}:
            self._tasks[node] += tasks
            self._update(node)

    def _choose(self, with_room: Sequence[Entry]) -> int:
        return with_room[0][1]

    def _score(self, node: int) -> float:
        return 0.0

    def _within(self, node: int, amount: int) -> list[int]:
        gpus = range(node * GPUS_PER_NODE, (node + 1) * GPUS_PER_NODE)
        if amount >= UNIT:
            whole = [gpu for gpu in gpus if self.left[gpu] == UNIT]
            return whole[: amount // UNIT]
        return [min((self.left[g], g) for g in gpus if self.left[g] >= amount)[1]]

    def _update(self, node: int) -> None:
        """Move a node to its place after a change of its free GPUs."""
        left = self.left[node * GPUS_PER_NODE : (node + 1) * GPUS_PER_NODE]
        room = left.count(UNIT), max(left)
        entry = self._score(node), node
        before, self._entries[node] = self._entries[node], entry
        had, self._rooms[node] = self._rooms[node], room
        for amount, with_room in self._with_room.items():
            was_there, is_there = _has_room(had, amount), _has_room(room, amount)
            if (was_there, before) == (is_there, entry):
                continue
            if was_there:
                del with_room[bisect_left(with_room, before)]
            if is_there:
                insort(with_room, entry)


def _has_room(room: tuple[int, int], amount: int) -> bool:
    whole, most = room
    return whole * UNIT >= amount if amount >= UNIT else most >= amount


class RayPolicy(NodesFirstFit):
    """Ray's choice among the nodes."""

    name = f"Ray's policy, nodes of {GPUS_PER_NODE}"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._random = Random(trace.gpus)
        self._top = max(1, int(TOP_K_FRACTION * (trace.gpus // GPUS_PER_NODE)))

    def _choose(self, with_room: Sequence[Entry]) -> int:
        own = self._entries[0]
        if with_room[0] == own:
            return 0
        return with_room[self._random.randrange(min(self._top, len(with_room)))][1]

    def _score(self, node: int) -> float:
        used = self._tasks[node] / CPUS_PER_NODE
        return used if used >= SPREAD_THRESHOLD else 0.0
