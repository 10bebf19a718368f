"""Why a task is where it is: what it waits for, who holds that, whose turn it is.

Looks and changes nothing. It costs as much as there are workers, and next to nothing
for each task that waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Final

from aiogpu.core.client_status import NOBODY, Program, name_of
from aiogpu.core.expecting import awaited_results
from aiogpu.core.explain import explain
from aiogpu.core.holding import Holdings
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.outage import OutageStatus, find_outage
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.reservation import Reservation, reserve
from aiogpu.core.shortage import (
    ReservationStatus,
    Shortage,
    awaited_gang,
    describe,
    find_bound,
    find_lacks,
    find_shortages,
)
from aiogpu.core.wording import SHOWN

LOOKED_AT: Final = 100
"""Tasks in the order of turns among which a task's rivals are looked for."""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a task waits, or what it does instead. `str()` tells it in words.

    Attributes:
        name: the task's name.
        task: its number; 0 while its node is opening.
        state: "opening" (the node is), "waiting", "starting" (its worker is being
            forked), "queued" (sent ahead to a worker that runs another), "running",
            "blocked" (it waits for tasks that it has started), "delayed" (it has
            failed and is tried again soon), "expecting" (results of others are its
            arguments, and not there yet), "sent" (to a cluster that does not tell
            whether it runs), "stopping" or "ended".
        seconds: since it was submitted; None where the node was not asked.
        request: what it asks for, `{"CPU": 1.0, "GPU": 0.5}`.
        position: its place among those of its program that wait for the same, 1 for
            the first;
            beyond some thousands, those that left before it may still count. None
            unless it waits.
        of: how many of its program wait for the same.
        rivals: names of other programs whose tasks go before it, at most eight.
        rival_count: how many such programs there are.
        limit: what its program holds of what it may, if that is why it waits:
            "2 of at most 2 GPU".
        reasons: for a waiting task, one for each resource that is short.
        reservation: what is kept for it, since it has waited long; or for another,
            where that is why it waits.
        is_held_endlessly: whether it waits for what others hold without end; then
            nothing is kept for it, however long it waits.
        bound: how many workers there are, if it lacks nothing else and there may be no
            more of them; `aiogpu doctor` says what bounds them. 0 otherwise.
        is_held_up: whether it waits so that another can run alone, for which memory
            ran out before.
        worker: id of its worker, None without one.
        pid: process id of its worker or, of a lease, of the program that has asked for
            it; 0 without one or while it starts.
        runs_for: seconds since its code began; None where that is not known.
        behind: names of the tasks that go before it on its worker, the one that
            runs first; at most eight.
        children: names of the tasks that it waits for, or whose results it expects;
            at most eight.
        count: how many there are of `behind` or of `children`.
        is_ahead: whether it is a stream that waits for its consumer, since it is as far
            ahead as it may be.
        outcome: how it has ended, in words: "it was cancelled"; None before.
        where: the conditions on its GPUs in words, while it waits for some.
        is_lease: whether it is a lease, which processes hold that are no workers.
        placement: name of the placement in which it is to run, while that waits.
        notes: what else a cluster tells, a line each.
        outage: why no worker can be started for it, if that is why it waits.
    """

    name: str
    task: int
    state: str
    seconds: float | None = None
    request: Mapping[str, float] = field(default_factory=dict)
    position: int | None = None
    of: int = 0
    reasons: tuple[Shortage, ...] = ()
    reservation: ReservationStatus | None = None
    is_held_endlessly: bool = False
    bound: int = 0
    is_held_up: bool = False
    worker: int | None = None
    pid: int = 0
    runs_for: float | None = None
    behind: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    count: int = 0
    is_ahead: bool = False
    outcome: str | None = None
    where: str = ""
    rivals: tuple[str, ...] = ()
    rival_count: int = 0
    limit: str = ""
    is_lease: bool = False
    placement: str = ""
    notes: tuple[str, ...] = ()
    outage: OutageStatus | None = None

    def __str__(self) -> str:
        return explain(self)


def why(
    node: Node,
    record: TaskRecord,
    pids: Mapping[int, int],
    now: float,
    programs: Mapping[int, Program] = NOBODY,
) -> Why:
    """Say why a task that has not ended is where it is.

    Args:
        node: the node that has it.
        record: the task.
        pids: process ids of the live workers.
        now: the moment for which it is said.
        programs: who the clients of the node are, by their numbers.
    """
    if record.state is TaskState.DELAYED:
        return Why(
            name=record.spec.name,
            task=record.id,
            state=record.state.value,
            seconds=now - record.since,
            request=record.spec.shape.request.as_numbers(),
        )
    if record.state is TaskState.EXPECTING:
        return _expecting(node, record, now)
    if record.worker is None:
        waiting = why_waiting(node, record, Holdings(node.holders, pids, now))
        return (
            waiting if node.clients is None else _among(node, record, programs, waiting)
        )
    return _on_worker(record, record.worker, Holdings((), pids, now))


def _expecting(node: Node, record: TaskRecord, now: float) -> Why:
    needs = awaited_results(node, record)
    return Why(
        name=record.spec.name,
        task=record.id,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        children=_names(needs),
        count=len(needs),
        placement=awaited_gang(node, record),
    )


def why_waiting(node: Node, record: TaskRecord, holdings: Holdings) -> Why:
    """The same of a task that stands in the queue; says nothing of other programs."""
    bucket = node.ready.bucket_of(record)
    reasons = tuple(find_shortages(node, record, holdings))
    outage = find_outage(node, record.spec.shape.environment, holdings.now)
    bound = 0 if reasons else find_bound(node)
    # A device that is set aside comes back some time, though nobody knows when.
    is_endless = bool(reasons) and not any(
        device.aside for shortage in reasons for device in shortage.devices
    )
    return Why(
        name=record.spec.name,
        task=record.id,
        state=record.state.value,
        seconds=holdings.now - record.since,
        request=record.spec.shape.request.as_numbers(),
        where=str(record.spec.shape.request.where or ""),
        position=bucket.position(record) + 1,
        of=bucket.size,
        reasons=reasons,
        bound=bound,
        is_held_up=node.solitude.bars(record),
        reservation=describe(node, _concerning(node, record), holdings.now),
        is_held_endlessly=(is_endless and reserve(node, record, holdings.now) is None)
        or (bound > 0 and all(map(_is_endless, node.workers))),
        placement=awaited_gang(node, record),
        outage=None if record.spec.is_lease else outage,
    )


def _among(
    node: Node, record: TaskRecord, programs: Mapping[int, Program], why: Why
) -> Why:
    """The same where programs share the node: which of them go before it."""
    assert node.clients is not None, node
    first = islice(node.ready.in_turn(), LOOKED_AT)
    before = takewhile(lambda other: other is not record, first)
    rivals = dict.fromkeys(
        other.client for other in before if other.client != record.client
    )
    return replace(
        why,
        rivals=tuple(name_of(id_, programs) for id_ in islice(rivals, SHOWN)),
        rival_count=len(rivals),
        limit=node.clients.why_barred(record),
    )


def _is_endless(worker: WorkerRecord) -> bool:
    return worker.task is not None and worker.task.spec.is_endless


def _concerning(node: Node, record: TaskRecord) -> Reservation | None:
    """The reservation for this task, or for one that takes what this one lacks."""
    reservation = node.reservation
    if reservation is None or reservation.record is record:
        return reservation
    is_in_its_way = any(lack.is_claimed for lack in find_lacks(node, record))
    return reservation if is_in_its_way else None


def _on_worker(record: TaskRecord, worker: WorkerRecord, holdings: Holdings) -> Why:
    before = _before(record, worker)
    waits_for = record.kin.waits_for.values() if record.kin else ()
    is_begun = record is worker.task
    return Why(
        name=record.spec.name,
        task=record.id,
        state=record.state.value,
        seconds=holdings.now - record.since,
        request=record.spec.shape.request.as_numbers(),
        worker=None if record.spec.is_lease else worker.id,
        pid=holdings.pids.get(worker.id, 0),
        runs_for=holdings.seconds_of(worker) if is_begun else None,
        behind=_names(before),
        children=_names(waits_for),
        count=len(before) + len(waits_for),
        is_lease=record.spec.is_lease,
    )


def _before(record: TaskRecord, worker: WorkerRecord) -> list[TaskRecord]:
    """Those that go before a task on its worker, the one that runs first."""
    if record is worker.task or worker.task is None:
        return []
    ahead = takewhile(lambda other: other is not record, worker.queue)
    return [worker.task, *ahead]


def _names(records: Iterable[TaskRecord]) -> tuple[str, ...]:
    return tuple(record.spec.name for record in islice(records, SHOWN))
