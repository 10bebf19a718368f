"""Finds waits that can never end, and explains them.

A task that waits for children keeps its devices and resources, but not its CPUs.
Suppose that all other tasks end and free their leases. If a child still does not fit,
its parent waits for ever. Workers count as a resource if their number is limited. This
is the banker's algorithm (Dijkstra, EWD 108) in reverse.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Request
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import try_on
from aiogpu.core.scheduler.state import SchedulerState, with_dependencies


def find_deadlocks(node: SchedulerState) -> list[tuple[TaskRecord, str]]:
    """Return the tasks that must fail so that all others can end, with reasons."""
    state = TaskState.BLOCKED
    blocked = {id_: task for id_, task in node.blocked.items() if task.state is state}
    node.blocked = dict(blocked)
    most = node.worker_limit.most
    if len(blocked) < most and not any(map(_keeps_something, blocked.values())):
        return []
    failed: dict[TaskId, tuple[TaskRecord, str]] = {}
    while stuck := _reduce(node, blocked, failed):
        # The child that was submitted last has done the least work. Its parent may
        # wait for other children as well, so the search goes on.
        child = max(stuck, key=lambda record: record.id)
        if len(blocked) < most:
            limit = node.clients.why_limited(child) if node.clients else ""
            failed[child.id] = child, _explain(child, blocked.values()) + limit
        else:
            failed[child.id] = child, _explain_full(child, most)
    return list(failed.values())


def _reduce(
    node: SchedulerState, blocked: dict[TaskId, TaskRecord], failed: Container[TaskId]
) -> list[TaskRecord]:
    """Let all tasks end that can; return the awaited tasks that do not fit."""

    def awaited(record: TaskRecord) -> Iterator[TaskRecord]:
        waits_for = record.kin.waits_for if record.kin else {}
        children = with_dependencies(node, iter(waits_for.values()))
        return (child for child in children if child.id not in failed)

    free = _FreeResources(node, blocked.values())
    has_changed = True
    while has_changed and blocked:
        has_changed = False
        for record in list(blocked.values()):
            if all(_can_end(child, blocked, free) for child in awaited(record)):
                del blocked[record.id]
                free.give_back(record)
                has_changed = True
    return [
        child
        for record in blocked.values()
        for child in awaited(record)
        if child.state is TaskState.WAITING and not free.fits(child)
    ]


def _can_end(
    child: TaskRecord, blocked: dict[TaskId, TaskRecord], free: _FreeResources
) -> bool:
    if child.state is TaskState.WAITING:
        return free.fits(child)
    return child.id not in blocked


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
        self._ledger = node.ledger
        self._workers = node.worker_limit.most
        self._copies: dict[int, Ledger] = {}
        self._fits: dict[Request, bool] = {}
        self._clients = node.clients
        self._held: dict[ClientId, Counter[str]] = defaultdict(Counter)
        for record in holders:
            self._move(record, -1)

    def give_back(self, record: TaskRecord) -> None:
        self._fits.clear()
        self._move(record, 1)

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
        homes = self._ledger.homes(request)
        return any(try_on(self._copy_of(home), request) for home in homes)


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
