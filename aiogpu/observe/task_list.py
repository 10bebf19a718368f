"""Pages of a list of tasks: waiting, running or ended; searched and sorted by the node.

There may be a million waiting tasks. The node takes them in pieces, with other work
between two pieces, and an answer contains one page only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

from aiogpu.core.records import TaskRecord

MOST_ROWS: Final = 100
"""Rows of a page."""
DEEPEST: Final = 1000
"""Tasks that can be paged through in an order other than the natural order, since the
node keeps as many candidates; a search narrows the list."""
PIECE: Final = 256
"""Tasks that are examined at once: about 0.2 ms."""
WAITING: Final = "waiting"
RUNNING: Final = "running"
ENDED: Final = "ended"
FAILED: Final = "failed"
STATES: Final = (WAITING, RUNNING, ENDED, FAILED)
"""What is listed. `FAILED`: the ended tasks that failed, and failed calls of actors."""


class Candidate(NamedTuple):
    """A task that a list may contain. Times are in seconds of the loop's clock.

    Attributes:
        task: its number; for a failed call, the number of the actor.
        name: its name.
        client: the number of its program.
        state: its state, or its outcome.
        since: when it was submitted.
        began: when its code began; None if that is unknown or has not happened.
        ended: when it ended; None for a living task.
        error: the type of its exception, "" for none.
        message: the first line of the exception's message.
        record: the scheduler's record of a living task.
    """

    task: int
    name: str
    client: int
    state: str
    since: float
    began: float | None = None
    ended: float | None = None
    error: str = ""
    message: str = ""
    record: TaskRecord | None = None


Key = Callable[[Candidate], Any]
SORTS: Final[dict[str, Key | None]] = {
    "": None,
    "newest": lambda task: -task.task,
    "name": lambda task: task.name,
    "waited": lambda task: task.since - (task.began or task.ended or 0.0),
    "ran": lambda task: (task.began or 0.0) - (task.ended or 0.0),
}
"""The orders. "": living tasks by number, ended tasks with the latest first. "newest":
the highest number first. "waited" and "ran": the longest first."""


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """A question for one page of a list of tasks.

    Attributes:
        state: one of `STATES`.
        text: list only tasks with this text in their name, error or message, or with
            this number; "" for all. Upper and lower case are the same.
        sort: one of `SORTS`.
        start: the number of tasks before the page.
        count: the number of tasks on the page, at most `MOST_ROWS`.

    Raises:
        ValueError: a field has another value.
    """

    state: str = WAITING
    text: str = ""
    sort: str = ""
    start: int = 0
    count: int = 50

    def __post_init__(self) -> None:
        is_right = (
            self.state in STATES
            and self.sort in SORTS
            and isinstance(self.text, str)
            and type(self.start) is type(self.count) is int
            and self.start >= 0
            and 0 < self.count <= MOST_ROWS
        )
        if not is_right:
            raise ValueError(f"a list of tasks was asked for by {self!r}")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task of a list.

    Attributes:
        task: its number; for a failed call, the number of the actor.
        name: its name.
        client: the number of its program.
        state: its state, or its outcome.
        waited: seconds from its submission until its code began, or until now, or
            until its end if its code never began.
        ran: seconds that its code has run; None if it has not begun.
        ended: seconds since its end; None for a living task.
        reason: why its code does not run, or its error; "" for neither.
        pid: process id of its worker; 0 for none, and for an ended task.
    """

    task: int
    name: str
    client: int
    state: str
    waited: float
    ran: float | None = None
    ended: float | None = None
    reason: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class TaskPage:
    """One page of a list of tasks.

    Attributes:
        rows: the tasks.
        total: the number of tasks of the whole list.
    """

    rows: tuple[TaskRow, ...]
    total: int


class TaskSearch:
    """Finds the tasks of one page among pieces of all tasks.

    Args:
        query: the question.
        total: the number of tasks with the state, if it is known; the search can then
            end with the page.
    """

    def __init__(self, query: TaskQuery, total: int | None = None) -> None:
        self._query = query
        self._key = SORTS[query.sort]
        self._needle = query.text.strip().casefold()
        self._known = None if self._needle or self._key is not None else total
        self._found = 0
        self._end = query.start + query.count
        if self._key is not None:
            self._end = min(self._end, DEEPEST)
        self._kept: list[tuple[Any, Candidate]] = []

    def __repr__(self) -> str:
        return f"<TaskSearch {self._found} found>"

    @property
    def total(self) -> int:
        """The number of tasks of the whole list, as far as it was examined."""
        return self._found if self._known is None else self._known

    @property
    def is_done(self) -> bool:
        """True if no further task can change the page."""
        return self._known is not None and self._found >= self._end

    def take(self, piece: Iterable[Candidate]) -> None:
        """Examine some tasks, which come in the natural order."""
        key, start, needle = self._key, self._query.start, self._needle
        for task in piece:
            if needle and not self._matches(task):
                continue
            self._found += 1
            if key is not None:
                self._kept.append((key(task), task))
            elif start < self._found <= self._end:
                self._kept.append((None, task))
        if key is not None and len(self._kept) > 2 * self._end:
            self._drop()

    def _matches(self, task: Candidate) -> bool:
        needle = self._needle
        return (
            needle in task.name.casefold()
            or needle == str(task.task)
            or needle in task.error.casefold()
            or needle in task.message.casefold()
        )

    def _drop(self) -> None:
        self._kept.sort(key=itemgetter(0))  # stable: equal tasks stay in order
        del self._kept[self._end :]

    def page(self) -> Sequence[Candidate]:
        """Return the tasks of the page."""
        if self._key is None:
            return [task for _, task in self._kept]
        self._drop()
        return [task for _, task in self._kept[self._query.start :]]


def living(
    records: Iterable[TaskRecord], began: Callable[[TaskRecord], float | None]
) -> Iterator[Candidate]:
    """Yield unfinished tasks.

    Args:
        records: their records.
        began: returns when the code of a task began; None if it has not.
    """
    for record in records:
        yield Candidate(
            record.id,
            record.spec.name,
            record.client,
            record.state.value,
            record.since,
            began(record),
            record=record,
        )


def row_of(task: Candidate, now: float, reason: str, pid: int) -> TaskRow:
    """Return the row of a task at a time."""
    end = now if task.ended is None else task.ended
    return TaskRow(
        task=task.task,
        name=task.name,
        client=task.client,
        state=task.state,
        waited=max((task.began or end) - task.since, 0.0),
        ran=None if task.began is None else max(end - task.began, 0.0),
        ended=None if task.ended is None else max(now - task.ended, 0.0),
        reason=reason or ": ".join(filter(None, (task.error, task.message))),
        pid=pid,
    )
