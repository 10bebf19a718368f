"""The last tasks that have ended: when, where and how, and the tracebacks of failures.

One ring serves lists of ended tasks, `why()` of them, the failures in `status()`, the
timeline and the metrics. The end of a task costs one tuple, and many that end together
cost one row; everything else is done when somebody asks. What is kept is bounded by the
ring's length, and looked at more closely only when much has been added.
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
    from aiogpu.observe.trace import Span

MOST: Final = 10_000
"""Tasks that are kept."""
ROOM: Final = 64 << 20
"""Bytes of the texts of their failures, after which the oldest tasks are dropped."""
LONGEST: Final = 200
"""Characters of a message that are kept, which are of its first line."""
LONGEST_TRACE: Final = 16 << 10
"""Characters of a traceback that are kept: half from its begin, half from its end."""
LISTED: Final = 100
"""Failures in a status."""
FINISHED: Final = "finished"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
DIED: Final = "died"
RETRIED: Final = "retried"
RUNNING: Final = "running"

Place = tuple[int, int, tuple[tuple[str, int], ...]]
"""A worker: its id, its process id, and its devices, each a kind and an index."""


class Failure(NamedTuple):
    """Why a task has no result.

    Attributes:
        error: the exception's type.
        message: the first line of its text.
        traceback: as text; "" without one.
    """

    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: str, message: str, traceback: str = "") -> Failure:
        """Cut it to what is kept."""
        first = message.strip().partition("\n")[0][:LONGEST].rstrip()
        if len(traceback) > LONGEST_TRACE:
            half = LONGEST_TRACE // 2
            left_out = len(traceback) - 2 * half
            told = f"\n... {left_out} characters are left out ...\n"
            traceback = f"{traceback[:half]}{told}{traceback[-half:]}"
        return cls(error, first, traceback)

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return sum(map(sys.getsizeof, self))


class Entry(NamedTuple):
    """One attempt at a task, or a call of an actor that has failed.

    Attributes:
        task: the number of the task, or of the actor.
        spec: of the task; of a call its name.
        client: the number of its program.
        place: its worker; None if no code of it ran.
        since: when it was submitted, by the loop's clock.
        ended: when it ended.
        took: microseconds that its code ran.
        outcome: how it ended.
        failure: why it has no result; None for a result, and for an attempt that was
            followed by another.
    """

    task: int
    spec: TaskSpec | str
    client: int
    place: Place | None
    since: float
    ended: float
    took: int
    outcome: str
    failure: Failure | None = None

    @property
    def name(self) -> str:
        """The name of the task, or of the call."""
        return self.spec if isinstance(self.spec, str) else self.spec.name

    @property
    def request(self) -> Request | None:
        """What the task asked for; None for a call."""
        return None if isinstance(self.spec, str) else self.spec.shape.request

    @property
    def is_attempt(self) -> bool:
        """Whether another attempt followed."""
        is_last = self.failure is not None or self.outcome in (FINISHED, CANCELLED)
        return not is_last

    @property
    def seconds(self) -> float:
        """For how long its code ran."""
        return self.took * 1e-6


class _Row(NamedTuple):
    """Consecutive tasks of one program on one worker that have finished.

    Arrays of numbers, not objects: objects that old are in no CPU cache when they are
    freed, and the garbage collector would scan them. Specifications are shared.
    """

    client: int
    place: Place | None
    now: float
    tasks: array[int]
    specs: tuple[TaskSpec, ...]
    since: array[float]
    took: array[int]

    def entries(self) -> Iterator[tuple[Any, ...]]:
        """One for each task, the last one first."""
        client, place, now, *columns = self
        for task, spec, since, took in zip(*map(reversed, columns), strict=True):
            yield task, spec, client, place, since, now, took, FINISHED


class Site:
    """A worker that runs tasks.

    Attributes:
        place: who it is; None where nothing is known.
        began: when it was given what it runs, or ended what ran before.
    """

    __slots__ = ("began", "place")

    def __init__(self, place: Place | None, began: float = 0.0) -> None:
        self.place = place
        self.began = began

    def __repr__(self) -> str:
        return f"<Site {self.place}>"


class _Sites(dict[int, Site]):
    """The workers by id."""

    def __missing__(self, worker: int) -> Site:
        return Site(None)


class History:
    """The ring. Times are in seconds of the loop's clock.

    Attributes:
        finished: the number of tasks that have ended with a result.
        sites: the workers that run tasks, by id.
        ring: what is kept, the latest last: rows, and tuples as `Entry` names them.
    """

    def __init__(self, most: int = MOST, room: int = ROOM) -> None:
        self.finished = 0
        self.sites: dict[int, Site] = _Sites()
        self.ring: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._most = most
        self._room = room
        self._others: Counter[str] = Counter()
        # At least what the ring has, as it drops the oldest unseen.
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
        """A worker is given a task for the first time; its devices are its for life."""
        devices = tuple(
            (kind, index)
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=False
            )
            for index, _ in shares
        )
        self.sites[worker] = Site((worker, pid, devices))

    # What has ended. `Results.settle` adds a task that has finished by itself.

    def add(
        self,
        task: int,
        spec: TaskSpec,
        client: int,
        site: Site,
        since: float,
        now: float,
        outcome: str,
        failure: Failure | None = None,
    ) -> None:
        """Add a task that has ended in another way than with a result."""
        took = round((now - site.began) * 1e6) if site.place else 0
        site.began = now
        self._keep(task, spec, client, site.place, since, now, took, outcome, failure)
        self._others[outcome] += 1

    def add_call(
        self, actor: int, name: str, client: int, now: float, failure: Failure
    ) -> None:
        """Add a call of an actor that has failed."""
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
            took: microseconds that each ran.
            now: the time.
        """
        from array import array

        site, first = self.sites[worker], records[0]
        site.began = now
        self.finished += len(records)
        self.ring.append(
            _Row(
                *(first.client, site.place, now),
                array("q", [record.id for record in records]),
                tuple([record.spec for record in records]),
                array("d", [record.since for record in records]),
                array("q", took),
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
        """Drop the oldest, so that few enough are left and there is room for more.

        It looks at all entries, and so leaves an eighth of the room free.
        """
        kept: deque[tuple[Any, ...]] = deque(maxlen=self._most)
        tasks = in_rows = size = 0
        for one in reversed(self.ring):
            if type(one) is _Row:
                in_rows += len(one.tasks)
                tasks += len(one.tasks)
            else:
                tasks += 1
                size += one[-1].size if type(one[-1]) is Failure else 0
            if kept and size > self._room * 7 // 8:
                break
            kept.appendleft(one)
            if tasks >= self._most:
                break
        self.ring, self._in_rows, self._size = kept, in_rows, size

    # What is asked.

    def entries(self) -> Iterator[Entry]:
        """All that is kept, the latest first."""
        rows = (
            one.entries() if type(one) is _Row else (one,)
            for one in reversed(self.ring)
        )
        for one in islice(chain.from_iterable(rows), self._most):
            yield Entry(*one)

    def find(self, task: int, now: float) -> EndedTask | None:
        """Return what is known of a task or an actor that has ended."""
        for one in reversed(self.ring):
            if type(one) is _Row:
                if task not in one.tasks:
                    continue
                found = [Entry(*each) for each in one.entries() if each[0] == task]
                return _ended(found[0], now)
            entry = Entry(*one)
            if one[0] == task and entry.request is not None and not entry.is_attempt:
                return _ended(entry, now, with_traceback=True)
        return None

    def failed_calls(self, actor: int, now: float) -> tuple[EndedTask, ...]:
        """The last call of each method of an actor that has failed, latest first."""
        last: dict[str, Entry] = {}
        for one in reversed(self.ring):
            if type(one) is not _Row and one[0] == actor and isinstance(one[1], str):
                last.setdefault(one[1], Entry(*one))
        return tuple(_ended(one, now, with_traceback=True) for one in last.values())

    def ended(self, now: float) -> tuple[EndedTask, ...]:
        """The tasks that have ended, and the calls that have failed, latest first."""
        return tuple(_ended(one, now) for one in self.entries() if not one.is_attempt)

    def failures(self, now: float) -> tuple[EndedTask, ...]:
        """The last that have failed, the latest first."""
        alone = (one for one in reversed(self.ring) if type(one) is not _Row)
        failed = (Entry(*one) for one in alone if type(one[-1]) is Failure)
        return tuple(
            _ended(one, now)
            for one in islice(
                (one for one in failed if one.outcome != CANCELLED), LISTED
            )
        )

    def spans(
        self, workers: Iterable[WorkerRecord], now: float, epoch: float
    ) -> list[Span]:
        """The attempts that are kept or running, in the order of their begin.

        Args:
            workers: the live workers.
            now: the time.
            epoch: the difference between time since the epoch and this clock.
        """
        told = [one for one in self.entries() if one.place is not None]
        for worker in workers:
            record, site = worker.task, self.sites[worker.id]
            if record is not None and site.place is not None:
                spec, took = record.spec, round((now - site.began) * 1e6)
                whose = record.id, spec, record.client
                told.append(Entry(*whose, site.place, record.since, now, took, RUNNING))
        spans = [_span(one, *one.place, epoch) for one in told if one.place]
        return sorted(spans, key=lambda span: span.started)


def _span(
    entry: Entry,
    worker: int,
    pid: int,
    devices: tuple[tuple[str, int], ...],
    epoch: float,
) -> Span:
    from aiogpu.observe.trace import Span

    queued, ended = entry.since + epoch, entry.ended + epoch
    times = queued, max(queued, ended - entry.seconds), ended
    whose = entry.task, entry.name, entry.client
    return Span(*whose, worker, pid, devices, *times, entry.outcome)


def _ended(entry: Entry, now: float, with_traceback: bool = False) -> EndedTask:
    from aiogpu.observe.status import EndedTask

    failure = entry.failure or Failure("", "")
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
