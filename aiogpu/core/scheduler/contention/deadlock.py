"""Finds waits that can never end, and explains them.

A task that waits for children keeps its devices and resources, but not its CPUs.
Suppose that all other tasks end and free their leases. If a child still does not fit,
its parent waits for ever. Workers count as a resource if their number is limited. This
is the banker's algorithm (Dijkstra, EWD 108) in reverse.

A search is cheap unless a task waits for resources that blocked tasks hold. Then it
looks at each awaited task once. A deadlock does not end by itself, so `DeadlockSearch`
may put a search off: searches never cost more than a few steps for each event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Request
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import try_on
from aiogpu.core.scheduler.state import SchedulerState, awaited_results

FAILED_AT_ONCE: Final = 256
"""The most tasks that one search fails, so that the loop can do other things."""

_BLOCKED: Final = TaskState.BLOCKED
_WAITING: Final = TaskState.WAITING


def find_deadlocks(
    node: SchedulerState, requeued: TaskRecord | None = None
) -> list[tuple[TaskRecord, str]]:
    """Return the tasks that must fail so that all others can end, with reasons.

    Args:
        node: the scheduler's state; `search.steps` becomes the cost of this search.
        requeued: a task that is not in the queue but counts as waiting.
    """
    node.search.steps = len(node.blocked)
    for id_ in [id_ for id_, r in node.blocked.items() if r.state is not _BLOCKED]:
        del node.blocked[id_]
    most, blocked = node.worker_limit.most, dict(node.blocked)
    if len(blocked) < most and not any(map(_keeps_something, blocked.values())):
        return []
    free = _FreeResources(node, blocked.values())
    if free.fits_all(requeued):
        return []
    waits, is_full = _Waits(node, blocked, free), len(blocked) >= most
    failed: list[tuple[TaskRecord, str]] = []
    while (child := waits.find_stuck()) and len(failed) < FAILED_AT_ONCE:
        if is_full:
            failed.append((child, _explain_full(child, most)))
        else:
            limit = node.clients.why_limited(child) if node.clients else ""
            failed.append((child, _explain(child, blocked.values()) + limit))
        waits.fail(child)
    return failed


class _Waits:
    """The blocked tasks that have not been found able to end.

    A task that can end stays so, because the free resources only grow. So each blocked
    task goes through the tasks that it waits for once, and pauses at the first that
    cannot end yet.
    """

    def __init__(
        self,
        node: SchedulerState,
        blocked: dict[TaskId, TaskRecord],
        free: _FreeResources,
    ) -> None:
        self._node = node
        self._blocked = blocked
        self._free = free
        self._failed: set[TaskId] = set()
        self._awaited = {id_: self._closure(task) for id_, task in blocked.items()}
        self._paused: dict[TaskId, list[TaskRecord]] = {}
        self._stuck: dict[tuple[ClientId, Request], dict[TaskId, TaskRecord]] = {}
        self._ready = list(blocked.values())

    def _closure(self, record: TaskRecord) -> Iterator[TaskRecord]:
        """Yield the tasks that a task waits for, also through arguments, each once."""
        assert record.kin is not None, record
        stack, seen = list(record.kin.waits_for.values()), set[TaskId]()
        while stack:
            child = stack.pop()
            if child.state is TaskState.EXPECTING and child.id not in seen:
                seen.add(child.id)
                stack += awaited_results(self._node, child)
            yield child

    def find_stuck(self) -> TaskRecord | None:
        """Let all tasks end that can; return a task that can never start, if any.

        The task that was submitted last has done the least work. The task that waits
        for it may wait for others as well, so the search goes on.
        """
        while self._ready:
            record = self._ready.pop()
            obstacle = self._next_obstacle(record)
            if obstacle is None:
                self._end(record)
                continue
            self._paused.setdefault(obstacle.id, []).append(record)
            if obstacle.state is _WAITING:
                key = obstacle.client, obstacle.spec.shape.request
                self._stuck.setdefault(key, {})[obstacle.id] = obstacle
        return max(
            (task for tasks in self._stuck.values() for task in tasks.values()),
            key=lambda record: record.id,
            default=None,
        )

    def fail(self, child: TaskRecord) -> None:
        """Go on as if a stuck task had failed."""
        self._failed.add(child.id)
        key = child.client, child.spec.shape.request
        del self._stuck[key][child.id]
        if not self._stuck[key]:
            del self._stuck[key]
        self._ready += self._paused.pop(child.id)

    def _next_obstacle(self, record: TaskRecord) -> TaskRecord | None:
        blocked, free, steps = self._blocked, self._free, 0
        try:
            for child in self._awaited[record.id]:
                steps += 1
                if child.state is _WAITING:
                    if not free.fits(child) and child.id not in self._failed:
                        return child
                elif child.id in blocked:
                    return child
        finally:
            self._node.search.steps += steps
        return None

    def _end(self, record: TaskRecord) -> None:
        del self._blocked[record.id]
        self._ready += self._paused.pop(record.id, ())
        if not self._free.give_back(record):
            return
        for key, tasks in list(self._stuck.items()):
            if self._free.fits(next(iter(tasks.values()))):
                del self._stuck[key]
                for id_ in tasks:
                    self._ready += self._paused.pop(id_)


def _lease(record: TaskRecord) -> Lease:
    assert record.worker is not None, record
    assert record.worker.lease is not None, record.worker
    return record.worker.lease


def _keeps_something(record: TaskRecord) -> bool:
    request = _lease(record).request
    return bool(request.devices) or any(name != CPU for name, _ in request.scalars)


class _FreeResources:
    """The resources that are free while only the given blocked tasks hold leases."""

    def __init__(self, node: SchedulerState, holders: Iterable[TaskRecord]) -> None:
        self._node = node
        self._ledger = node.ledger
        self._workers = node.worker_limit.most
        self._copies: dict[int, Ledger] = {}
        self._fits: dict[Request, bool] = {}
        self._clients = node.clients
        self._held: dict[ClientId, Counter[str]] = defaultdict(Counter)
        for record in holders:
            self._move(record, -1)

    def give_back(self, record: TaskRecord) -> bool:
        """Free the lease of a task; False if this can help no other task."""
        keeps_something = _keeps_something(record)
        if keeps_something:
            self._fits.clear()
        self._move(record, 1)
        return keeps_something or self._workers == 1

    def fits_all(self, requeued: TaskRecord | None) -> bool:
        """Return True if each waiting task would fit."""
        records = [] if requeued is None else [requeued]
        for groups in self._node.ready.of_client.values():
            self._node.search.steps += len(groups)
            firsts = (group.first() for group in groups.values())
            records += [first[1] for first in firsts if first is not None]
        return all(map(self.fits, records))

    def _copy_of(self, ledger: Ledger) -> Ledger:
        """Return a copy of a ledger in which only blocked tasks hold leases."""
        copy = self._copies.get(id(ledger))
        if copy is None:
            copy = self._copies[id(ledger)] = ledger.emptied()
        return copy

    def _move(self, record: TaskRecord, sign: int) -> None:
        lease = _lease(record)
        self._workers += sign
        if self._clients is not None:
            for name, parts in self._clients.amounts_of(lease.request):
                if name != CPU:
                    self._held[record.client][name] -= sign * parts
        copy = self._copy_of(lease.home)
        copy.suppose(lease, is_held=sign < 0)

    def fits(self, record: TaskRecord) -> bool:
        request = record.spec.shape.request
        if self._workers <= 0 or not self._is_allowed(record.client, request):
            return False
        fits = self._fits.get(request)
        if fits is None:
            fits = self._fits[request] = self._try(request)
        return fits

    def _is_allowed(self, id_: ClientId, request: Request) -> bool:
        """Return True if the limits of a program allow a request."""
        if self._clients is None:
            return True
        client = self._clients.of(id_)
        return not any(self._clients.beyond(client, request, self._held[id_]))

    def _try(self, request: Request) -> bool:
        return any(
            try_on(self._copy_of(home), choice)
            for choice in (request, *request.alternatives)
            for home in self._ledger.homes(choice)
        )


def _waiter(record: TaskRecord) -> TaskRecord | None:
    return record.kin.awaited_by if record.kin else None


def _explain(child: TaskRecord, blocked: Iterable[TaskRecord]) -> str:
    """Describe the chain of waiting tasks that ends with a child that cannot run."""
    chain: list[TaskRecord] = []
    record = _waiter(child)
    while record is not None and record not in chain:
        chain.insert(0, record)
        record = _waiter(record)
    # The chain is empty if the child is awaited only as an argument of another task.
    following = [*chain[1:], child] if chain else []
    links = [
        f"{record.spec.name} holds {_lease(record).request} and waits for "
        f"{awaited.spec.name}"
        for record, awaited in zip(chain, following, strict=True)
    ]
    others = [
        f"{record.spec.name} holds {_lease(record).request} and waits as well"
        for record in blocked
        if record not in chain
    ]
    return (
        f"{child.spec.name} asks for {child.spec.shape.request}, which waiting tasks "
        f"hold: {'; '.join(links + others)}"
    )


def _explain_full(child: TaskRecord, most: int) -> str:
    """Explain that each possible worker has a task that waits."""
    waiter = _waiter(child)
    example = f" ({waiter.spec.name} waits for {child.spec.name})" if waiter else ""
    return (
        f"{child.spec.name} needs a worker process, but this node can have only {most} "
        f"at a time, and each runs a task that waits{example}; `aiogpu doctor` says "
        f"what limits their number"
    )
