"""The node's workers, and which of them can take a task at once.

A worker that has been assigned devices or an environment keeps them for life
(CUDA reads its variable once), so idle workers are found by their binding. This
file does not know what tasks ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiogpu.core.ids import WorkerId
from aiogpu.core.lifecycle import WorkerState
from aiogpu.core.records import Binding, WorkerRecord, move_worker


class Workers:
    """All workers that are wanted, alive or still ending.

    Attributes:
        get: gives the worker of an id, None once it is gone.
        idle: how many wait for work.
    """

    def __init__(self) -> None:
        self._records: dict[WorkerId, WorkerRecord] = {}
        self.get: Callable[[WorkerId], WorkerRecord | None] = self._records.get
        self.idle = 0
        self._idle: dict[WorkerId, WorkerRecord] = {}
        self._idle_by_binding: dict[Binding | None, list[WorkerRecord]] = {}
        self._unclaimed: dict[WorkerId, WorkerRecord] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def __repr__(self) -> str:
        return f"<Workers {len(self)}: {self.idle} idle>"

    def create(self) -> WorkerRecord:
        """Record a worker that is to be forked."""
        self._last_id += 1
        record = WorkerRecord(WorkerId(self._last_id))
        self._records[record.id] = record
        return record

    def take_idle(self, binding: Binding | None) -> WorkerRecord | None:
        """Remove an idle worker with that binding, the most recently used one.

        None as a binding means a worker to which nothing was assigned yet.
        """
        stack = self._idle_by_binding.get(binding)
        if not stack:
            return None
        record = stack.pop()
        if not stack:
            del self._idle_by_binding[binding]
        del self._idle[record.id]
        self.idle -= 1
        return record

    def take_unclaimed(self) -> WorkerRecord | None:
        """Remove a starting worker whose task has gone, None without one."""
        return self._unclaimed.popitem()[1] if self._unclaimed else None

    def put_idle(self, record: WorkerRecord) -> None:
        """Move a worker to IDLE and remember that it can take work."""
        if record.state is WorkerState.STARTING:
            self._unclaimed.pop(record.id, None)
        move_worker(record, WorkerState.IDLE)
        self._idle[record.id] = record
        self.idle += 1
        stack = self._idle_by_binding.get(record.binding)
        if stack is None:
            self._idle_by_binding[record.binding] = [record]
        else:
            stack.append(record)

    def put_unclaimed(self, record: WorkerRecord) -> None:
        """Remember that a starting worker has no task."""
        self._unclaimed[record.id] = record

    def pop_longest_idle(self) -> WorkerRecord:
        """Remove the worker that has been idle longest.

        Raises:
            KeyError: none is idle.
        """
        for record in self._idle.values():
            self._leave_idle(record)
            return record
        raise KeyError("no worker is idle")

    def _leave_idle(self, record: WorkerRecord) -> None:
        del self._idle[record.id]
        self.idle -= 1
        stack = self._idle_by_binding[record.binding]
        stack.remove(record)
        if not stack:
            del self._idle_by_binding[record.binding]

    def remove(self, record: WorkerRecord) -> None:
        """Forget a worker whose process has ended; moves it to GONE."""
        if record.id in self._idle:
            self._leave_idle(record)
        self._unclaimed.pop(record.id, None)
        move_worker(record, WorkerState.GONE)
        del self._records[record.id]

    def check(self) -> None:
        """Assert that the indices agree with the records. Costs O(workers)."""
        for record in self._records.values():
            is_idle = record.state is WorkerState.IDLE
            assert is_idle == (record.id in self._idle), record
            if is_idle:
                assert record in self._idle_by_binding[record.binding], record
                assert record.task is None, record
                assert record.lease is None, record
            unclaimed = record.state is WorkerState.STARTING and record.task is None
            assert unclaimed == (record.id in self._unclaimed), record
        stacked = sum(len(stack) for stack in self._idle_by_binding.values())
        assert stacked == len(self._idle) == self.idle, self
        assert all(self._idle_by_binding.values()), self
