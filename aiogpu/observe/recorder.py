"""Which tasks have run where and when: a ring of the last ones.

It is fed with the begin and the end of each task; all other work is done when somebody
asks.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.devices import Share
from aiogpu.core.resources.ledger import Lease

MOST: Final = 20_000
"""Spans that are kept."""
RUNNING: Final = "running"


class Span(NamedTuple):
    """One attempt at a task.

    Attributes:
        task: its number.
        name: its name.
        client: the number of its program, 0 for the node's own.
        worker: the worker that ran it.
        pid: the process of the worker, 0 if no longer known.
        devices: its devices, each a kind and an index: `("GPU", 0)`.
        queued: seconds since the epoch, when it was submitted.
        started: likewise, when it was sent to its worker or begun.
        ended: likewise, or the time of asking if it is running.
        outcome: "finished", "failed", "cancelled", "died", "retried" or "running".
    """

    task: int
    name: str
    client: int
    worker: int
    pid: int
    devices: tuple[tuple[str, int], ...]
    queued: float
    started: float
    ended: float
    outcome: str


_Held = tuple[tuple[tuple[str, int], ...], tuple[tuple[Share, ...], ...]]
"""The devices of a lease: `Request.devices` and `Lease.shares`. The lease itself is not
kept, because it refers to its worker, its program and everything that these have."""
_Ended = tuple[int, str, int, int, int, _Held | None, float, float, float, str]


class _Row(NamedTuple):
    """Consecutive tasks of one program on one worker.

    Arrays of numbers, not objects: objects that old are in no CPU cache when they are
    freed, and the garbage collector would scan them.
    """

    client: int
    worker: int
    pid: int
    held: _Held | None
    now: float
    outcome: str
    tasks: array[int]
    names: tuple[str, ...]
    since: array[float]
    took: array[float]

    def ended(self) -> Iterator[_Ended]:
        """One entry for each task."""
        client, worker, pid, held, now, outcome, *columns = self
        for task, name, since, took in zip(*columns, strict=True):
            whose = task, name, client, worker, pid
            yield *whose, held, since, now - took, now, outcome


class Recorder:
    """The ring. Times are in seconds of one clock.

    Attributes:
        outcomes: the number of attempts by outcome.
    """

    def __init__(self, most: int = MOST) -> None:
        self.outcomes: Counter[str] = Counter()
        self._most = most
        self._kept = 0
        self._spans: deque[_Ended | _Row] = deque()
        self._begun: dict[int, list[Any]] = {}

    def __repr__(self) -> str:
        return f"<Recorder {min(self._kept, self._most)} spans>"

    def begin(self, worker: int, pid: int, now: float) -> None:
        """A worker that was idle was sent a task."""
        self._begun[worker] = [now, pid]

    def end(
        self,
        worker: WorkerRecord,
        record: TaskRecord,
        outcome: str,
        now: float,
        took: float = 0.0,
    ) -> None:
        """A worker has answered, or died.

        Args:
            worker: the worker.
            record: the task that it ran.
            outcome: how the task ended.
            now: the time.
            took: seconds that its code ran, 0.0 if unknown.
        """
        number = worker.id
        known = self._begun.get(number) or [now, 0]
        begun = now - took if took else known[0]
        # A task that was sent ahead begins when the task before it ends.
        known[0] = now
        self.outcomes[outcome] += 1
        name, client, held = record.spec.name, record.client, _held(worker.lease)
        whose = record.id, name, client, number, known[1]
        self._keep((*whose, held, record.since, begun, now, outcome), 1)

    def end_row(
        self,
        worker: WorkerRecord,
        records: Sequence[TaskRecord],
        took: Sequence[float],
        outcome: str,
        now: float,
    ) -> None:
        """A worker has answered for several tasks of a program; otherwise as `end`."""
        known = self._begun.get(worker.id) or [now, 0]
        known[0] = now
        self.outcomes[outcome] += len(records)
        row = _Row(
            *(
                records[0].client,
                worker.id,
                known[1],
                _held(worker.lease),
                now,
                outcome,
            ),
            array("q", [record.id for record in records]),
            tuple([record.spec.name for record in records]),
            array("d", [record.since for record in records]),
            array("d", took),
        )
        self._keep(row, len(records))

    def _keep(self, ended: _Ended | _Row, count: int) -> None:
        spans = self._spans
        spans.append(ended)
        self._kept += count
        while self._kept - (size := _size_of(spans[0])) >= self._most:
            self._kept -= size
            spans.popleft()

    def forget(self, worker: int) -> None:
        """A worker has gone."""
        self._begun.pop(worker, None)

    def spans(
        self, workers: Iterable[WorkerRecord], now: float, epoch: float
    ) -> list[Span]:
        """The tasks that are kept or running, in the order of their begin.

        Args:
            workers: the live workers.
            now: the time.
            epoch: the difference between time since the epoch and this clock.
        """
        kept = chain.from_iterable(
            one.ended() if isinstance(one, _Row) else (one,) for one in self._spans
        )
        told = [*kept][-self._most :]
        for worker in workers:
            record = worker.task
            if record is None or worker.id not in self._begun:
                continue
            begun, pid = self._begun[worker.id]
            whose = record.id, record.spec.name, record.client, worker.id, pid
            held = _held(worker.lease)
            told.append((*whose, held, record.since, begun, now, RUNNING))
        spans = [_span(one, epoch) for one in told]
        return sorted(spans, key=lambda span: span.started)


def _size_of(ended: _Ended | _Row) -> int:
    return len(ended.tasks) if isinstance(ended, _Row) else 1


def _span(ended: _Ended, epoch: float) -> Span:
    task, name, client, worker, pid, held, queued, started, last, outcome = ended
    return Span(
        *(task, name, client, worker, pid, tuple(_devices(held))),
        *(queued + epoch, started + epoch, last + epoch, outcome),
    )


def _held(lease: Lease | None) -> _Held | None:
    if lease is None or not lease.shares:
        return None
    return lease.request.devices, lease.shares


def _devices(held: _Held | None) -> Iterator[tuple[str, int]]:
    if held is None:
        return
    for (kind, _), shares in zip(*held, strict=False):
        for index, _amount in shares:
            yield kind, index
