"""Finds waits that can never end, and explains them.

Tasks that wait for children keep what they hold, all but CPUs. Suppose that everything
else ends and gives back what it holds. A task that then still waits for a child that
does not fit waits for ever. Workers count as well where their number is bounded. This
is the banker's algorithm (Dijkstra, EWD 108) turned round.
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
from aiogpu.core.scheduler.state import SchedulerState, with_expected


def find_deadlocks(node: SchedulerState) -> list[tuple[TaskRecord, str]]:
    """The tasks whose wait has to fail so that all others can end, each with why."""
    state = TaskState.BLOCKED
    blocked = {id_: one for id_, one in node.blocked.items() if one.state is state}
    node.blocked = dict(blocked)
    most = node.worker_limit.most
    if len(blocked) < most and not any(map(_keeps_something, blocked.values())):
        return []
    found: dict[TaskId, tuple[TaskRecord, str]] = {}
    while stuck := _reduce(node, blocked, found):
        # The one that was started last has the least to lose. Who waits for it may
        # wait for others as well.
        child = max(stuck, key=lambda record: record.id)
        if len(blocked) < most:
            limit = node.clients.why_limited(child) if node.clients else ""
            found[child.id] = child, _explain(child, blocked.values()) + limit
        else:
            found[child.id] = child, _explain_full(child, most)
    return list(found.values())


def _reduce(
    node: SchedulerState, blocked: dict[TaskId, TaskRecord], failed: Container[TaskId]
) -> list[TaskRecord]:
    """Let all end that can; give the tasks that are waited for and do not fit."""

    def awaited(record: TaskRecord) -> Iterator[TaskRecord]:
        waits_for = record.kin.waits_for if record.kin else {}
        children = with_expected(node, iter(waits_for.values()))
        return (child for child in children if child.id not in failed)

    rest = _Rest(node, blocked.values())
    moved = True
    while moved and blocked:
        moved = False
        for record in list(blocked.values()):
            if all(_can_end(child, blocked, rest) for child in awaited(record)):
                del blocked[record.id]
                rest.give_back(record)
                moved = True
    return [
        child
        for record in blocked.values()
        for child in awaited(record)
        if child.state is TaskState.WAITING and not rest.fits(child)
    ]


def _can_end(child: TaskRecord, blocked: dict[TaskId, TaskRecord], rest: _Rest) -> bool:
    if child.state is TaskState.WAITING:
        return rest.fits(child)
    return child.id not in blocked


def _lease(record: TaskRecord) -> Lease:
    assert record.worker is not None, record
    assert record.worker.lease is not None, record.worker
    return record.worker.lease


def _keeps_something(record: TaskRecord) -> bool:
    request = _lease(record).request
    return bool(request.devices) or any(name != CPU for name, _ in request.scalars)


class _Rest:
    """The resources that are free once all but some waiting tasks have ended."""

    def __init__(self, node: SchedulerState, holders: Iterable[TaskRecord]) -> None:
        self._ledger = node.ledger
        self._workers = node.worker_limit.most
        self._copies: dict[int, Ledger] = {}
        self._known: dict[Request, bool] = {}
        self._clients = node.clients
        self._held: dict[ClientId, Counter[str]] = defaultdict(Counter)
        for record in holders:
            self._move(record, -1)

    def give_back(self, record: TaskRecord) -> None:
        self._known.clear()
        self._move(record, 1)

    def _copy_of(self, ledger: Ledger) -> Ledger:
        """A ledger of which only those that wait hold something."""
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
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = self._try(request)
        return known

    def _is_allowed(self, id_: ClientId, request: Request) -> bool:
        """Return whether a program may have that beside what those that wait hold."""
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
    """The chain from the first that waits to the one that cannot run."""
    chain: list[TaskRecord] = []
    record = _waiter(child)
    while record is not None and record not in chain:
        chain.insert(0, record)
        record = _waiter(record)
    # Nobody waits for one by itself whose result another expects.
    following = [*chain[1:], child] if chain else []
    told = [
        f"{one.spec.name} holds {_lease(one).request} and waits for {other.spec.name}"
        for one, other in zip(chain, following, strict=True)
    ]
    others = [
        f"{one.spec.name} holds {_lease(one).request} and waits as well"
        for one in blocked
        if one not in chain
    ]
    return (
        f"{child.spec.name} asks for {child.spec.shape.request}, and those that wait "
        f"hold it: {'; '.join(told + others)}"
    )


def _explain_full(child: TaskRecord, most: int) -> str:
    """All workers that there can be have tasks that wait."""
    waiter = _waiter(child)
    waits = f", as {waiter.spec.name} does for {child.spec.name}" if waiter else ""
    return (
        f"{child.spec.name} needs a worker process, of which this node can have {most} "
        f"at a time, and each of these has a task that waits{waits}; `aiogpu doctor` "
        f"says what bounds them"
    )
