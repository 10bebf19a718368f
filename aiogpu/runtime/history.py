"""The last tasks that have ended: when, where and how, with tracebacks of failures.

One ring serves the lists of ended tasks, `why()`, the failures in `status()`, the
timeline and the metrics. Each ended task costs one tuple, and tasks that end together
share one row; all other work is done on request.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from array import array

    from aiogpu.core.model.request import Request, TaskSpec
    from aiogpu.core.records import TaskRecord, WorkerRecord
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.observe.status import EndedTask
    from aiogpu.observe.task_list import Candidate
    from aiogpu.observe.trace import Span

MOST: Final = 10_000
"""Most tasks in the history."""
ROOM: Final = 64 << 20
"""Most bytes of failure texts; beyond that, the oldest entries are dropped."""
LONGEST: Final = 200
"""Characters kept of the first line of a message."""
LONGEST_TRACE: Final = 16 << 10
"""Characters kept of a traceback: half from its start, half from its end."""
LISTED: Final = 100
"""Most failures in a status."""
FINISHED: Final = "finished"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
DIED: Final = "died"
RETRIED: Final = "retried"
RUNNING: Final = "running"

Place = tuple[int, int, tuple[tuple[str, int], ...]]
"""A worker: its id, its process id, and its devices, each a kind and an index."""


class FailureReason(NamedTuple):
    """The reason why a task has no result.

    Attributes:
        error: the type of the exception.
        message: the first line of its text.
        traceback: the traceback as text; "" for none.
    """

    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: str, message: str, traceback: str = "") -> FailureReason:
        """Make a failure, with texts cut to the lengths that are kept."""
        first = message.strip().partition("\n")[0][:LONGEST].rstrip()
        if len(traceback) > LONGEST_TRACE:
            half = LONGEST_TRACE // 2
            omitted = len(traceback) - 2 * half
            gap = f"\n... {omitted} characters are left out ...\n"
            traceback = f"{traceback[:half]}{gap}{traceback[-half:]}"
        return cls(error, first, traceback)

    @property
    def size(self) -> int:
        """Bytes of memory that the texts take."""
        return sum(map(sys.getsizeof, self))


class Attempt(NamedTuple):
    """One attempt at a task, or a failed call of an actor.

    Attributes:
        task: the number of the task, or of the actor.
        spec: the spec of the task, or the name of the call.
        client: the number of the program.
        place: the worker; None if no code ran.
        since: loop time of the submission.
        ended: loop time of the end.
        took: microseconds that the code ran.
        outcome: how the attempt ended.
        failure: why there is no result; None for a result, and for an attempt that was
            followed by another attempt.
    """

    task: int
    spec: TaskSpec | str
    client: int
    place: Place | None
    since: float
    ended: float
    took: int
    outcome: str
    failure: FailureReason | None = None

    @property
    def name(self) -> str:
        """The name of the task, or of the call."""
        return self.spec if isinstance(self.spec, str) else self.spec.name

    @property
    def request(self) -> Request | None:
        """The request of the task; None for a call."""
        return None if isinstance(self.spec, str) else self.spec.shape.request

    @property
    def is_attempt(self) -> bool:
        """True if another attempt followed."""
        is_last = self.failure is not None or self.outcome in (FINISHED, CANCELLED)
        return not is_last

    @property
    def seconds(self) -> float:
        """Seconds that the code ran."""
        return self.took * 1e-6


class _Row(NamedTuple):
    """Finished tasks of one program that followed each other on one worker.

    Arrays of numbers, not objects: old objects are in no CPU cache when they are freed,
    and the garbage collector would scan them. Specs are shared with other tasks.
    """

    client: int
    place: Place | None
    now: float
    tasks: array[int]
    specs: tuple[TaskSpec, ...]
    since: array[float]
    took: array[int]

    def entries(self) -> Iterator[tuple[Any, ...]]:
        """Yield a tuple for each task, last task first."""
        client, place, now, *columns = self
        for task, spec, since, took in zip(*map(reversed, columns), strict=True):
            yield task, spec, client, place, since, now, took, FINISHED


class Site:
    """A worker that runs tasks.

    Attributes:
        place: the worker's ids and devices; None if nothing is known.
        began: loop time at which the worker got its task or ended the task before.
    """

    __slots__ = ("began", "place")

    def __init__(self, place: Place | None, began: float = 0.0) -> None:
        self.place = place
        self.began = began

    def __repr__(self) -> str:
        return f"<Site {self.place}>"


class _Sites(dict[int, Site]):
    """The workers by id; unknown workers get an empty `Site`."""

    def __missing__(self, worker: int) -> Site:
        return Site(None)


class History:
    """The ring of ended tasks. Times are in seconds of the loop's clock.

    Attributes:
        finished: the number of tasks that have ended with a result.
        sites: the workers that run tasks, by id.
        ring: rows, and tuples with the fields of `Attempt`; the latest last.
    """

    def __init__(self, most: int = MOST, room: int = ROOM) -> None:
        self.finished = 0
        self.sites: dict[int, Site] = _Sites()
        self.ring: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._most = most
        self._room = room
        self._others: Counter[str] = Counter()
        # Upper bounds, since the ring drops its oldest entries by itself.
        self._in_rows = 0
        self._size = 0

    def __repr__(self) -> str:
        return f"<History of {len(self.ring)} entries>"

    @property
    def outcomes(self) -> Mapping[str, int]:
        """The number of attempts that have ended, by outcome."""
        finished = self.finished + self._others[FINISHED]
        return {**self._others, FINISHED: finished} if finished else {**self._others}

    def occupy(self, worker: int, pid: int, lease: Lease) -> None:
        """Note a worker that gets its first task, with its devices for life."""
        devices = tuple(
            (kind, index)
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=False
            )
            for index, _ in shares
        )
        self.sites[worker] = Site((worker, pid, devices))

    # Additions. `Results.settle` adds finished tasks without calling a method.

    def add(
        self,
        task: int,
        spec: TaskSpec,
        client: int,
        site: Site,
        since: float,
        now: float,
        outcome: str,
        failure: FailureReason | None = None,
    ) -> None:
        """Add a task that has ended without a result."""
        took = round((now - site.began) * 1e6) if site.place else 0
        site.began = now
        self._keep(task, spec, client, site.place, since, now, took, outcome, failure)
        self._others[outcome] += 1

    def add_call(
        self, actor: int, name: str, client: int, now: float, failure: FailureReason
    ) -> None:
        """Add a failed call of an actor."""
        self._keep(actor, name, client, None, now, now, 0, FAILED, failure)

    def add_row(
        self,
        worker: int,
        records: Sequence[TaskRecord],
        took: Sequence[int],
        now: float,
    ) -> None:
        """Add tasks of one program that have finished together on a worker.

        Args:
            worker: the worker.
            records: the tasks.
            took: microseconds that each task ran.
            now: the loop time.
        """
        from array import array

        site, first = self.sites[worker], records[0]
        site.began = now
        self.finished += len(records)
        self.ring.append(
            _Row(
                client=first.client,
                place=site.place,
                now=now,
                tasks=array("q", [record.id for record in records]),
                specs=tuple([record.spec for record in records]),
                since=array("d", [record.since for record in records]),
                took=array("q", took),
            )
        )
        self._in_rows += len(records)
        if self._in_rows > 2 * self._most:
            self._trim()

    def _keep(self, *entry: Any) -> None:
        self.ring.append(entry)
        if entry[-1] is not None:
            self._size += entry[-1].size
            if self._size > self._room:
                self._trim()

    def _trim(self) -> None:
        """Drop the oldest entries beyond the limits.

        Since this reads all entries, it also frees an eighth of the room, and so is
        not needed again soon.
        """
        kept: deque[tuple[Any, ...]] = deque(maxlen=self._most)
        tasks = in_rows = size = 0
        for item in reversed(self.ring):
            if type(item) is _Row:
                in_rows += len(item.tasks)
                tasks += len(item.tasks)
            else:
                tasks += 1
                size += item[-1].size if type(item[-1]) is FailureReason else 0
            if kept and size > self._room * 7 // 8:
                break
            kept.appendleft(item)
            if tasks >= self._most:
                break
        self.ring, self._in_rows, self._size = kept, in_rows, size

    # Queries

    def entries(self) -> Iterator[Attempt]:
        """Yield all entries, the latest first."""
        rows = (
            item.entries() if type(item) is _Row else (item,)
            for item in reversed(self.ring)
        )
        for fields in islice(chain.from_iterable(rows), self._most):
            yield Attempt(*fields)

    def candidates(self, only_failed: bool = False) -> Iterator[Candidate]:
        """Yield the ended tasks and the failed calls, latest first.

        The history may change meanwhile: what was there at the first step is yielded.
        """
        from aiogpu.observe.task_list import Candidate

        rows = (
            item.entries() if type(item) is _Row else (item,)
            for item in [*reversed(self.ring)]
        )
        for fields in islice(chain.from_iterable(rows), self._most):
            entry = Attempt(*fields)
            failure = entry.failure or FailureReason("", "")
            has_failed = entry.outcome in (FAILED, DIED)
            if entry.is_attempt or (only_failed and not has_failed):
                continue
            began = None if entry.place is None else entry.ended - entry.seconds
            yield Candidate(
                task=entry.task,
                name=entry.name,
                client=entry.client,
                state=FAILED if has_failed else entry.outcome,
                since=entry.since,
                began=began,
                ended=entry.ended,
                error=failure.error,
                message=failure.message,
            )

    def find(self, task: int, now: float) -> EndedTask | None:
        """Return the last attempt of an ended task or actor; None if unknown."""
        for item in reversed(self.ring):
            if type(item) is _Row:
                if task not in item.tasks:
                    continue
                row = next(row for row in item.entries() if row[0] == task)
                return _ended(Attempt(*row), now)
            entry = Attempt(*item)
            is_final = entry.request is not None and not entry.is_attempt
            if entry.task == task and is_final:
                return _ended(entry, now, with_traceback=True)
        return None

    def failed_calls(self, actor: int, now: float) -> tuple[EndedTask, ...]:
        """Return the last failed call of each method of an actor, latest first."""
        last: dict[str, Attempt] = {}
        for item in reversed(self.ring):
            if type(item) is not _Row and item[0] == actor and isinstance(item[1], str):
                last.setdefault(item[1], Attempt(*item))
        return tuple(_ended(entry, now, with_traceback=True) for entry in last.values())

    def ended(self, now: float) -> tuple[EndedTask, ...]:
        """Return the ended tasks and the failed calls, latest first."""
        entries = self.entries()
        return tuple(_ended(entry, now) for entry in entries if not entry.is_attempt)

    def failures(self, now: float) -> tuple[EndedTask, ...]:
        """Return the last failures of tasks and calls, latest first."""
        single = (item for item in reversed(self.ring) if type(item) is not _Row)
        failed = (Attempt(*item) for item in single if type(item[-1]) is FailureReason)
        shown = (entry for entry in failed if entry.outcome != CANCELLED)
        return tuple(_ended(entry, now) for entry in islice(shown, LISTED))

    def spans(
        self, workers: Iterable[WorkerRecord], now: float, epoch: float, most: int = 0
    ) -> list[Span]:
        """Return the ended and the running attempts, in the order of their start.

        Args:
            workers: the live workers.
            now: the loop time.
            epoch: the difference between the time since the epoch and the loop time.
            most: look at so many of the last ended attempts; 0 for all.
        """
        last = islice(self.entries(), most or None)
        entries = [entry for entry in last if entry.place is not None]
        for worker in workers:
            record, site = worker.task, self.sites[worker.id]
            if record is not None and site.place is not None:
                took, place = round((now - site.began) * 1e6), site.place
                ids = record.id, record.spec, record.client
                entries.append(Attempt(*ids, place, record.since, now, took, RUNNING))
        spans = [_span(entry, *entry.place, epoch) for entry in entries if entry.place]
        return sorted(spans, key=lambda span: span.started)


def _span(
    entry: Attempt,
    worker: int,
    pid: int,
    devices: tuple[tuple[str, int], ...],
    epoch: float,
) -> Span:
    from aiogpu.observe.trace import Span

    queued, ended = entry.since + epoch, entry.ended + epoch
    times = queued, max(queued, ended - entry.seconds), ended
    ids = entry.task, entry.name, entry.client
    return Span(*ids, worker, pid, devices, *times, entry.outcome)


def _ended(entry: Attempt, now: float, with_traceback: bool = False) -> EndedTask:
    from aiogpu.observe.status import EndedTask

    failure = entry.failure or FailureReason("", "")
    worker, pid, devices = entry.place or (None, 0, ())
    ran = None if entry.place is None else entry.seconds
    return EndedTask(
        task=entry.task,
        name=entry.name,
        error=failure.error,
        message=failure.message,
        seconds=max(now - entry.ended, 0.0),
        client=entry.client,
        state=FAILED if entry.outcome == DIED else entry.outcome,
        waited=max(entry.ended - entry.since - (ran or 0.0), 0.0),
        ran=ran,
        worker=worker,
        pid=pid,
        devices=devices,
        request={} if entry.request is None else entry.request.as_numbers(),
        traceback=failure.traceback if with_traceback else "",
        is_call=isinstance(entry.spec, str),
    )
