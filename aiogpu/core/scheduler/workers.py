"""The node's workers: an index of the idle ones, spares, and the limit of workers.

A worker keeps its devices for life, because CUDA reads its variable once, and its
environment as well: its binding. Idle workers are found by their binding. Among equally
good devices, a device with an idle worker is chosen, which saves a process
(`affinity`). A worker without a binding is clean: it can run any task of its
environment.

Spares are clean workers that are kept ready, so that a task need not wait for a new
process. An environment gets spares after one of its tasks has asked for a process of
its own; a program that reuses its workers never pays for them. The spares of the node's
own program stay; those of other environments end after a while without such a task.

Each worker takes descriptors of the driver and two processes. The node computes the
limit of workers when it opens. If a worker cannot be started, `WorkerLimit` is lowered
to the present number and rises again step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import Binding, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import COLD, Affinity

if TYPE_CHECKING:
    from aiogpu.core.queue.timers import Timers


_Key = tuple[Environment, str, int]
"""Environment, kind of devices, and limit of device memory (`limit_of`)."""


def _key_and_mask(binding: Binding) -> tuple[_Key, int]:
    """Return the index key of a binding and its devices as a mask, or 0."""
    environment, devices, limit = binding
    if len(devices) != 1:
        return (environment, "", 0), 0
    kind, indices = devices[0]
    mask = 0
    for index in indices:
        mask |= 1 << index
    return (environment, kind, limit), mask


MAX_ENVIRONMENTS: Final = 8
"""Environments that have spares at a time. Another one gets spares only after one of
these was not used for a while: replacing spares in turn costs more than it saves."""


class Spares:
    """The number of spares to keep for each environment.

    Attributes:
        target: spares for each environment, including workers that start.
        wanted: the environments that have spares, with the time of their last use.
    """

    def __init__(self, target: int, kept_for: float, timers: Timers) -> None:
        self.target = target
        self._kept_for = kept_for
        self._timers = timers
        self.wanted: dict[Environment, float] = {}
        self._in_vain: set[Environment] = set()
        self._is_awaited = False

    def __repr__(self) -> str:
        return f"<Spares {self.target} for each of {len(self.wanted)} environments>"

    @property
    def total(self) -> int:
        """The number of spares for all environments together."""
        return self.target * max(len(self.wanted), 1)

    def want(self, environment: Environment, now: float) -> bool:
        """Note that a task took a fresh process; True if its environment is new."""
        if environment in self.wanted:
            self.wanted[environment] = now
            return False
        if not self.target or len(self.wanted) >= MAX_ENVIRONMENTS:
            return False
        self.wanted[environment] = now
        if environment:
            self._timers.set(now + self._kept_for, AlarmKind.SPARES, 0)
        return True

    def pop_unused(self, now: float) -> Iterator[Environment]:
        """Forget and yield the environments whose spares were not used for long."""
        earliest = None
        for environment, used_at in list(self.wanted.items()):
            if not environment:
                continue
            # The sum with which the alarm was set: a difference may be rounded below.
            if used_at + self._kept_for <= now:
                self.forget(environment)
                yield environment
            elif earliest is None or used_at < earliest:
                earliest = used_at
        if earliest is not None:
            self._timers.set(earliest + self._kept_for, AlarmKind.SPARES, 0)

    def forget(self, environment: Environment) -> None:
        """Keep no spares for this environment until a task takes a fresh process."""
        self.wanted.pop(environment, None)
        self._in_vain.discard(environment)

    def note_start(self, environment: Environment, has_started: bool) -> None:
        """Note that a worker has started, or that a spare ended before it had started.

        After a failure no spare is forked until some worker has started; otherwise a
        node that cannot fork would try for ever.
        """
        if has_started:
            self._in_vain.discard(environment)
        elif environment in self.wanted:
            self._in_vain.add(environment)

    def await_refill(self) -> bool:
        """Note that a refill is due; False if one was due already."""
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def note_refill(self) -> None:
        """Note that the refill happens now."""
        self._is_awaited = False

    def kept(self, environment: Environment) -> int:
        """Return how many clean workers of an environment to keep."""
        return self.target if environment in self.wanted else 0

    def missing(self, environment: Environment, present: int) -> int:
        """Return how many spares to fork for an environment that has `present`."""
        if environment in self._in_vain or environment not in self.wanted:
            return 0
        return max(self.target - present, 0)


UNLIMITED_WORKERS: Final = 1 << 30
"""The limit of a node that was given none, such as a simulated one."""


class WorkerLimit:
    """The limit of a node's workers.

    Attributes:
        most: workers that there may be at a time.
        now: the limit that applies now; below `most` after a failed start.
        refused: tasks that lacked only a worker in the last placement; at most one is
            counted for each request.
        failures: failed attempts in a row, since a worker last started or ended;
            workers that fail together count as one attempt.
        reason: why the last attempt failed.
        since: when the first attempt failed.
        retry_at: when the limit is raised next.
        leaving: idle workers that were retired to make room for others.
    """

    def __init__(self) -> None:
        self.most = self.now = UNLIMITED_WORKERS
        self.refused = 0
        self.failures = 0
        self.reason = ""
        self.since = 0.0
        self.retry_at = 0.0
        self._is_counted = False
        self._is_awaited = False
        self._step = 1
        self.leaving: set[WorkerId] = set()

    def __repr__(self) -> str:
        return f"<WorkerLimit {self.now} of {self.most}>"

    def bound(self, most: int) -> None:
        """Set the limit, 1 or more."""
        self.most = self.now = most

    def shrink(self, present: int, reason: str, now: float) -> bool:
        """Lower the limit to the present number; True: the caller must set a timer."""
        if not self.failures:
            self.since = now
        if not self._is_counted:
            self._is_counted = True
            self.failures += 1
        self.reason = reason
        self._step = 1
        self.now = min(self.now, present)
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def grow(self, is_quiet: bool = True) -> bool:
        """Raise the limit by 1, then 2, 4, ...; True if the caller must set a timer.

        The first step is 1 because a failed start costs time.

        Args:
            is_quiet: no worker is starting, so none can still fail.
        """
        has_failed, self._is_counted = self._is_counted, False
        if is_quiet and not has_failed:
            self.failures = 0
        self.now = min(self.most, self.now + self._step)
        self._step *= 2
        self._is_awaited = self.now < self.most or has_failed
        return self._is_awaited

    def note_change(self) -> None:
        """Forget the failures after a worker has started or ended."""
        self.failures = 0
        self._is_counted = False


class Workers:
    """All workers, from the decision to fork them until they have ended.

    Attributes:
        by_id: the workers by id; callers must not change it.
        get: returns the worker with an id, None if it is gone.
        idle: the number of idle workers.
    """

    def __init__(self) -> None:
        self.by_id: dict[WorkerId, WorkerRecord] = {}
        self.get: Callable[[WorkerId], WorkerRecord | None] = self.by_id.get
        self.idle = 0
        self._bound: dict[WorkerId, WorkerRecord] = {}
        self._by_binding: dict[Binding, list[WorkerRecord]] = {}
        self._warm: dict[_Key, Affinity] = {}
        self._clean: dict[Environment, dict[WorkerId, WorkerRecord]] = {}
        self._unclaimed: dict[Environment, dict[WorkerId, WorkerRecord]] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self.by_id.values())

    def __repr__(self) -> str:
        return f"<Workers {len(self)}: {self.idle} idle>"

    def create(self, environment: Environment) -> WorkerRecord:
        """Add a worker that will be forked."""
        self._last_id += 1
        record = WorkerRecord(WorkerId(self._last_id), environment)
        self.by_id[record.id] = record
        return record

    def stand_in(self) -> WorkerRecord:
        """Make a record for a lease's holder, which is no worker of the node."""
        self._last_id += 1
        return WorkerRecord(WorkerId(self._last_id), state=WorkerState.BUSY)

    def take_bound(self, binding: Binding, function: int) -> WorkerRecord | None:
        """Remove the most recently used idle worker with a binding, and return it.

        None if that worker has not run this function.
        """
        stack = self._by_binding.get(binding)
        if not stack:
            return None
        record = stack[-1]
        if function not in record.prepared:
            return None
        self.leave_idle(record)
        return record

    def idle_with(self, binding: Binding) -> Iterator[WorkerRecord]:
        """Yield the idle workers with a binding, the most recently used first."""
        return reversed(self._by_binding.get(binding, ()))

    def has_bound(self, binding: Binding) -> bool:
        """Return True if an idle worker has that binding."""
        return binding in self._by_binding

    def affinity(self, environment: Environment, kind: str, limit: int) -> Affinity:
        """Return the devices, and the sets of several, that have an idle worker."""
        return self._warm.get((environment, kind, limit), COLD)

    def _note_warm(self, binding: Binding, *, is_there: bool) -> None:
        """Add or remove a binding in the index of bindings with an idle worker."""
        key, mask = _key_and_mask(binding)
        single, several = self._warm.get(key, COLD)
        if not mask & (mask - 1):
            single ^= mask
        elif is_there:
            several = (*several, mask)
        else:
            several = tuple(other for other in several if other != mask)
        if single or several:
            self._warm[key] = single, several
        else:
            self._warm.pop(key, None)

    def spare(self, environment: Environment) -> WorkerRecord | None:
        """Return the clean worker that is idle for the longest time, or None."""
        if environment not in self._clean:
            return None
        return next(iter(self._clean[environment].values()))

    def take_unclaimed(self, environment: Environment) -> WorkerRecord | None:
        """Remove a starting worker without a task and return it, or None."""
        unclaimed = self._unclaimed.get(environment)
        if not unclaimed:
            return None
        record = next(iter(unclaimed.values()))  # the one that was forked first
        del unclaimed[record.id]
        if not unclaimed:
            del self._unclaimed[environment]
        return record

    @property
    def has_any_free(self) -> bool:
        """True if a worker is idle, or starts without a task."""
        return self.idle > 0 or bool(self._unclaimed)

    def drop_unclaimed(self, environment: Environment) -> list[WorkerRecord]:
        """Remove all starting workers without a task and return them."""
        return list(self._unclaimed.pop(environment, {}).values())

    def spares(self, environment: Environment) -> int:
        """Return the number of clean workers without a task, starting ones included."""
        count = 0
        for idle in (self._clean, self._unclaimed):
            if environment in idle:
                count += len(idle[environment])
        return count

    def clean(self, environment: Environment) -> list[WorkerRecord]:
        """Return the clean idle workers."""
        return list(self._clean.get(environment, {}).values())

    def bound_to(self, kind: str, index: int) -> list[WorkerRecord]:
        """Return the idle and busy workers that are bound to a device."""
        return [
            record
            for record in self.by_id.values()
            if record.state in (WorkerState.IDLE, WorkerState.BUSY)
            if record.binding and index in dict(record.binding[1]).get(kind, ())
        ]

    def put_idle(self, record: WorkerRecord) -> None:
        """Move a worker to IDLE and index it."""
        if record.state is WorkerState.STARTING:
            self._leave_unclaimed(record)
        record.move(WorkerState.IDLE)
        self.idle += 1
        binding = record.binding
        if binding is None:
            self._clean.setdefault(record.environment, {})[record.id] = record
            return
        self._bound[record.id] = record
        stack = self._by_binding.get(binding)
        if stack is None:
            self._by_binding[binding] = [record]
            if binding[1]:
                self._note_warm(binding, is_there=True)
        else:
            stack.append(record)

    def put_unclaimed(self, record: WorkerRecord) -> None:
        """Index a starting worker that has no task."""
        self._unclaimed.setdefault(record.environment, {})[record.id] = record

    def pop_idle(self, spares: Spares | None = None) -> WorkerRecord:
        """Remove the least useful idle worker and return it.

        A clean one if its environment has more than `spares` keeps, else the bound one
        that has been idle longest.

        Args:
            spares: how many clean workers to keep for each environment; None: keep
                none.

        Raises:
            KeyError: no worker is idle.
        """
        for environment, clean in self._clean.items():
            kept = 0 if spares is None else spares.kept(environment)
            if len(clean) > kept or not self._bound:
                record = next(iter(clean.values()))
                break
        else:
            if not self._bound:
                raise KeyError("no worker is idle")
            record = next(iter(self._bound.values()))
        self.leave_idle(record)
        return record

    def leave_idle(self, record: WorkerRecord) -> None:
        """Remove a worker from the index of idle workers."""
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
            if binding[1]:
                self._note_warm(binding, is_there=False)

    def _leave_unclaimed(self, record: WorkerRecord) -> None:
        unclaimed = self._unclaimed.get(record.environment, {})
        if unclaimed.pop(record.id, None) is not None and not unclaimed:
            del self._unclaimed[record.environment]

    def remove(self, record: WorkerRecord) -> None:
        """Forget a worker whose process has ended; moves it to GONE."""
        if record.state is WorkerState.IDLE:
            self.leave_idle(record)
        self._leave_unclaimed(record)
        record.move(WorkerState.GONE)
        del self.by_id[record.id]

    def check(self) -> None:
        """Assert that the indexes agree with the records. Costs O(workers)."""
        idle = 0
        for record in self.by_id.values():
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
        fresh = Workers()
        for binding in self._by_binding:
            fresh._note_warm(binding, is_there=True)
        recorded, expected = (
            {key: (single, set(several)) for key, (single, several) in warm.items()}
            for warm in (self._warm, fresh._warm)
        )
        assert recorded == expected, (recorded, expected)
