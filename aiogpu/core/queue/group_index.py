"""Finds the first of many groups of one program whose requests may fit.

Groups whose requests ask for the same resources form a family. A family is a tree: each
node knows the least amounts and the earliest turn below it, so a search passes over all
groups that ask for too much. If requests differ in one resource, a search costs the
logarithm of the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, Generic, Protocol, TypeVar

from aiogpu.core.model.request import Request
from aiogpu.core.records import Precedence, TaskRecord
from aiogpu.core.resources.room import Amounts, amounts_of, kind_of


class Group(Protocol):
    """What the index needs of a group (`queue.ready.Group`)."""

    request: Request
    stuck: TaskRecord | None
    reserve_at: float

    def first(self) -> tuple[Precedence, TaskRecord, Any] | None:
        """Return the group's first task with its turn."""


G = TypeVar("G", bound=Group)

Fits = Callable[[Precedence, Amounts], bool]
"""Returns False if nothing with this turn or a later one, and these amounts or larger
ones, is sought."""

Node = tuple[Precedence, Amounts] | None
"""The earliest turn and the least amounts of the groups below; None if there are none.
"""

SMALLEST: Final = 16
"""The leaves of the smallest tree."""


class Family(Generic[G]):
    """The groups of one program whose requests ask for the same resources.

    A binary tree in a list: the nodes below node *n* are 2*n* and 2*n* + 1. The leaves
    are sorted by amounts, except those that were added since the tree was built.

    Attributes:
        request: the request of one of the groups.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._slots: dict[G, int] = {}
        self._groups: list[tuple[G, Amounts]] = []
        self._nodes: list[Node] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._slots)

    def set(self, group: G, turn: Precedence) -> None:
        """Add a group, or change its turn."""
        if group not in self._slots:
            if len(self._groups) == self._size:
                self._rebuild()
            self._slots[group] = len(self._groups)
            self._groups.append((group, amounts_of(group.request)))
        slot = self._slots[group]
        self._change(slot, (turn, self._groups[slot][1]))

    def hide(self, group: G) -> None:
        """Pass over a group until its turn is set."""
        self._change(self._slots[group], None)

    def discard(self, group: G) -> None:
        """Remove a group."""
        self.hide(group)
        del self._slots[group]

    def _rebuild(self) -> None:
        """Sort the leaves, and make room for as many others."""
        kept = [
            (*self._groups[slot], self._nodes[self._size + slot])
            for slot in self._slots.values()
        ]
        kept.sort(key=lambda each: each[1])
        self._size = SMALLEST
        while self._size < 2 * len(kept):
            self._size *= 2
        self._slots = {group: slot for slot, (group, _, _) in enumerate(kept)}
        self._groups = [(group, amounts) for group, amounts, _ in kept]
        self._nodes = [None] * (2 * self._size)
        for slot, (_, _, node) in enumerate(kept, start=self._size):
            self._nodes[slot] = node
        for place in range(self._size - 1, 0, -1):
            self._nodes[place] = self._below(place)

    def _change(self, slot: int, node: Node) -> None:
        place = self._size + slot
        self._nodes[place] = node
        while place := place >> 1:
            node = self._below(place)
            if self._nodes[place] == node:
                break
            self._nodes[place] = node

    def _below(self, place: int) -> Node:
        left, right = self._nodes[2 * place], self._nodes[2 * place + 1]
        if left is None or right is None:
            return left or right
        return min(left[0], right[0]), tuple(map(min, left[1], right[1]))

    def first(self, fits: Fits) -> tuple[Precedence, G] | None:
        """Return the group with the earliest turn that is sought, with its turn."""
        while (found := self._search(fits)) is not None:
            turn, group = found
            first = group.first()
            if first is None:
                self.hide(group)
            elif first[0] == turn:
                return found
            else:  # its first task has left the queue
                self.set(group, first[0])
        return None

    def _search(self, fits: Fits) -> tuple[Precedence, G] | None:
        nodes = self._nodes
        heap: list[tuple[Precedence, int]] = []
        places = [1]
        while True:
            for place in places:
                node = nodes[place]
                if node is not None and fits(*node):
                    heappush(heap, (node[0], place))
            if not heap:
                return None
            turn, place = heappop(heap)
            if place >= self._size:
                return turn, self._groups[place - self._size][0]
            places = [2 * place, 2 * place + 1]


class GroupIndex(Generic[G]):
    """The groups of one program: by family, and by when resources may be reserved.

    Attributes:
        families: the families, by `kind_of` their requests.
        fresh: groups whose first task may have changed, not filed yet (`file`).
        postponed: groups for which no resources could be reserved; their next turn
            comes after that of all other groups that are due.
        has_children: a task with a parent may be among the groups.
    """

    def __init__(self) -> None:
        self.families: dict[Hashable, Family[G]] = {}
        self.fresh: list[G] = []
        self.postponed: list[G] = []
        self.has_children = False
        self._pending: list[tuple[float, int, G]] = []
        self._due: list[tuple[Precedence, int, G]] = []
        self._count = count()

    def note(self, group: G, turn: Precedence, *, has_child: bool) -> None:
        """Note that a group is new, or has a new queue of tasks.

        Args:
            group: the group.
            turn: the turn of its first task, or an earlier turn.
            has_child: a task with a parent may be among the new tasks.
        """
        key = kind_of(group.request)
        family = self.families.get(key)
        if family is None:
            family = self.families[key] = Family(group.request)
        family.set(group, turn)
        self.fresh.append(group)
        if has_child:
            self.has_children = True

    def discard(self, group: G) -> None:
        """Remove an empty group."""
        key = kind_of(group.request)
        family = self.families[key]
        family.discard(group)
        if not family:
            del self.families[key]

    def hide(self, group: G) -> None:
        """Pass over a group until it is shown again."""
        self.families[kind_of(group.request)].hide(group)

    def show(self, groups: Iterable[G]) -> None:
        """Let searches find groups again that were hidden, unless they are empty."""
        shown = [(group, group.first()) for group in groups]
        for group, turn in [(group, first[0]) for group, first in shown if first]:
            self.families[kind_of(group.request)].set(group, turn)

    def first(self, fits_in: Callable[[Request], Fits]) -> tuple[Precedence, G] | None:
        """Return the group with the earliest turn that is sought, with its turn.

        Args:
            fits_in: returns, for a request of a family, what is sought in the family.
        """
        found = [family.first(fits_in(family.request)) for family in self._families()]
        return min(filter(None, found), key=lambda each: each[0], default=None)

    def _families(self) -> list[Family[G]]:
        return list(self.families.values())

    def file(self, group: G, turn: Precedence, now: float) -> None:
        """File a group by the time from which resources are reserved for it."""
        if group.reserve_at <= now:
            heappush(self._due, (turn, next(self._count), group))
        else:
            heappush(self._pending, (group.reserve_at, next(self._count), group))

    @property
    def has_due(self) -> bool:
        """True if the time of some group to reserve resources may have come."""
        return bool(self._due)

    def pop_pending(self, now: float) -> Iterator[G]:
        """Yield the groups whose time to reserve resources has come."""
        pending = self._pending
        while pending and pending[0][0] <= now:
            reserve_at, _, group = heappop(pending)
            if group.reserve_at == reserve_at:
                yield group

    def pop_due(self, now: float, before: Precedence | None) -> G | None:
        """Remove and return the first due group, if its turn is `before` a turn."""
        due = self._due
        while due and (before is None or due[0][0] < before):
            turn, _, group = heappop(due)
            first = group.first()
            is_current = first is not None and first[:2] == (turn, group.stuck)
            if is_current and group.reserve_at <= now:
                return group
        return None
