"""The node's workers, and which of them can take a task at once.

A worker that has been assigned devices keeps them for life (CUDA reads its variable
once), as it does its environment. So idle workers are found by their binding. One
that has an environment but was assigned nothing yet is clean: it may become anything.
This file does not know what tasks ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiogpu.core.ids import WorkerId
from aiogpu.core.lifecycle import WorkerState
from aiogpu.core.records import Binding, WorkerRecord, move_worker
from aiogpu.core.specs import Environment
from aiogpu.core.warmth import Warmth


class Workers:
    """All workers that are wanted, alive or still ending.

    Attributes:
        get: gives the worker of an id, None once it is gone.
        idle: how many wait for work.
        warmth: which devices idle workers are bound to.
    """

    def __init__(self) -> None:
        self._records: dict[WorkerId, WorkerRecord] = {}
        self.get: Callable[[WorkerId], WorkerRecord | None] = self._records.get
        self.idle = 0
        self.warmth = Warmth()
        self._bound: dict[WorkerId, WorkerRecord] = {}
        self._by_binding: dict[Binding, list[WorkerRecord]] = {}
        self._clean: dict[Environment, dict[WorkerId, WorkerRecord]] = {}
        self._unclaimed: dict[Environment, dict[WorkerId, WorkerRecord]] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def __repr__(self) -> str:
        return f"<Workers {len(self)}: {self.idle} idle>"

    def create(self, environment: Environment) -> WorkerRecord:
        """Record a worker that is to be forked."""
        self._last_id += 1
        record = WorkerRecord(WorkerId(self._last_id), environment)
        self._records[record.id] = record
        return record

    def stand_in(self) -> WorkerRecord:
        """A record with an id of its own, which counts as no worker of the node."""
        self._last_id += 1
        return WorkerRecord(WorkerId(self._last_id), state=WorkerState.BUSY)

    def take_bound(self, binding: Binding) -> WorkerRecord | None:
        """Remove an idle worker with that binding, the most recently used one."""
        stack = self._by_binding.get(binding)
        if not stack:
            return None
        record = stack[-1]
        self._leave_idle(record)
        return record

    def has_bound(self, binding: Binding) -> bool:
        """Whether an idle worker has that binding."""
        return binding in self._by_binding

    def take_clean(self, environment: Environment) -> WorkerRecord | None:
        """Remove an idle worker to which nothing was assigned yet."""
        clean = self._clean.get(environment)
        if not clean:
            return None
        record = next(iter(clean.values()))
        self._leave_idle(record)
        return record

    def take_unclaimed(self, environment: Environment) -> WorkerRecord | None:
        """Remove a starting worker whose task has gone, None without one."""
        unclaimed = self._unclaimed.get(environment)
        if not unclaimed:
            return None
        record = next(iter(unclaimed.values()))  # it has started first
        del unclaimed[record.id]
        if not unclaimed:
            del self._unclaimed[environment]
        return record

    def drop_unclaimed(self, environment: Environment) -> list[WorkerRecord]:
        """Remove all starting workers without a task."""
        return list(self._unclaimed.pop(environment, {}).values())

    def spares(self, environment: Environment) -> int:
        """How many are clean and without a task, those that start included."""
        clean = self._clean.get(environment, ())
        return len(clean) + len(self._unclaimed.get(environment, ()))

    def clean(self, environment: Environment) -> list[WorkerRecord]:
        """Idle workers to which nothing was assigned yet."""
        return list(self._clean.get(environment, {}).values())

    def bound_to(self, kind: str, index: int) -> list[WorkerRecord]:
        """Workers that idle or run a task and were assigned a device."""
        return [
            record
            for record in self._records.values()
            if record.state in (WorkerState.IDLE, WorkerState.BUSY)
            if record.binding and index in dict(record.binding[1]).get(kind, ())
        ]

    def put_idle(self, record: WorkerRecord) -> None:
        """Move a worker to IDLE and remember that it can take work."""
        if record.state is WorkerState.STARTING:
            self._leave_unclaimed(record)
        move_worker(record, WorkerState.IDLE)
        self.idle += 1
        binding = record.binding
        if binding is None:
            self._clean.setdefault(record.environment, {})[record.id] = record
            return
        self._bound[record.id] = record
        stack = self._by_binding.get(binding)
        if stack is None:
            self._by_binding[binding] = [record]
            self.warmth.add(binding)
        else:
            stack.append(record)

    def put_unclaimed(self, record: WorkerRecord) -> None:
        """Remember that a starting worker has no task."""
        self._unclaimed.setdefault(record.environment, {})[record.id] = record

    def pop_idle(self, kept: Callable[[Environment], int]) -> WorkerRecord:
        """Remove the idle worker that will be missed least.

        That is a clean one where there are more of its environment than are kept, else
        the one that has been idle longest.

        Args:
            kept: gives how many clean workers of an environment are kept.

        Raises:
            KeyError: none is idle.
        """
        for environment, clean in self._clean.items():
            if len(clean) > kept(environment) or not self._bound:
                record = next(iter(clean.values()))
                break
        else:
            if not self._bound:
                raise KeyError("no worker is idle")
            record = next(iter(self._bound.values()))
        self._leave_idle(record)
        return record

    def leave_idle(self, record: WorkerRecord) -> None:
        """Remove this very worker from those that can take work."""
        self._leave_idle(record)

    def _leave_idle(self, record: WorkerRecord) -> None:
        self.idle -= 1
        binding = record.binding
        if binding is None:
            clean = self._clean[record.environment]
            del clean[record.id]
            if not clean:
                del self._clean[record.environment]
            return
        del self._bound[record.id]
        stack = self._by_binding[binding]
        if stack[-1] is record:
            stack.pop()
        else:
            stack.remove(record)
        if not stack:
            del self._by_binding[binding]
            self.warmth.discard(binding)

    def _leave_unclaimed(self, record: WorkerRecord) -> None:
        unclaimed = self._unclaimed.get(record.environment, {})
        if unclaimed.pop(record.id, None) is not None and not unclaimed:
            del self._unclaimed[record.environment]

    def remove(self, record: WorkerRecord) -> None:
        """Forget a worker whose process has ended; moves it to GONE."""
        if record.state is WorkerState.IDLE:
            self._leave_idle(record)
        self._leave_unclaimed(record)
        move_worker(record, WorkerState.GONE)
        del self._records[record.id]

    def check(self) -> None:
        """Assert that the indices agree with the records. Costs O(workers)."""
        idle = 0
        for record in self._records.values():
            if record.state is WorkerState.IDLE:
                idle += 1
                assert record.task is None, record
                assert record.lease is None, record
            is_bound = record.state is WorkerState.IDLE and record.binding is not None
            assert is_bound == (record.id in self._bound), record
            clean = self._clean.get(record.environment, {})
            is_clean = record.state is WorkerState.IDLE and record.binding is None
            assert is_clean == (record.id in clean), record
            if record.binding is not None and is_bound:
                assert record in self._by_binding[record.binding], record
            unclaimed = self._unclaimed.get(record.environment, {})
            is_unclaimed = record.state is WorkerState.STARTING and record.task is None
            is_unclaimed = is_unclaimed and not record.is_stale
            assert is_unclaimed == (record.id in unclaimed), record
        stacked = sum(len(stack) for stack in self._by_binding.values())
        assert stacked == len(self._bound), self
        assert stacked + sum(map(len, self._clean.values())) == idle == self.idle, self
        assert all(self._by_binding.values()), self
        assert all(self._clean.values()), self
        assert all(self._unclaimed.values()), self
        self.warmth.check(self._by_binding)
