"""The node's workers: which can take a task at once, spares, and how many there may be.

A worker that was assigned devices keeps them for life (CUDA reads its variable once),
and its environment as well. So idle workers are found by their binding; where several
devices are equally good, one for which a worker waits spares a process (`affinity`).
A worker that was assigned nothing yet is clean: any task of its environment can have
it.

Spares are clean workers that are kept ready, so that a fresh process costs a task
nothing. They are kept for an environment once a task of it has taken a process of its
own, so a program that reuses its workers never pays for them. Those of the node's own
program stay; those of other environments go when no such task has come for a while.

Each worker takes descriptors of the driver and two processes. How many workers there
may be is found out when the node is opened. Where fewer can be had, `WorkerLimit` is
lowered to what is there, and rises again step by step.
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
"""Environment, kind of devices, and what limits the use of their memory."""


def _place(binding: Binding) -> tuple[_Key, int]:
    """Return the index key of a binding and its devices as a mask, or 0."""
    environment, devices, limit = binding
    if len(devices) != 1:
        return (environment, "", 0), 0
    kind, indices = devices[0]
    mask = 0
    for index in indices:
        mask |= 1 << index
    return (environment, kind, limit), mask


MOST: Final = 8
"""Environments that have spares at a time. A further one has none until one of them has
not been used for a while: to replace them by turns would cost more than it saves."""


class Spares:
    """The number of spares to keep for each environment.

    Attributes:
        target: how many there are to be for each, those that start included.
        wanted: the environments for which they are wanted, and when they last were.
    """

    def __init__(self, target: int, kept_for: float, timers: Timers) -> None:
        self.target = target
        self._kept_for = kept_for
        self._timers = timers
        self.wanted: dict[Environment, float] = {}
        self._in_vain: set[Environment] = set()
        self._is_awaited = False

    def __repr__(self) -> str:
        wanted = f"{len(self.wanted)} environments" if self.wanted else "nobody"
        return f"<Spares {self.target} for {wanted}>"

    @property
    def total(self) -> int:
        """The limit for all environments together."""
        return self.target * max(len(self.wanted), 1)

    def want(self, environment: Environment, now: float) -> bool:
        """Note that a task took a fresh process; return whether this is new."""
        if environment in self.wanted:
            self.wanted[environment] = now
            return False
        if not self.target or len(self.wanted) >= MOST:
            return False
        self.wanted[environment] = now
        if environment:
            self._timers.set(now + self._kept_for, AlarmKind.SPARES, 0)
        return True

    def unwanted(self, now: float) -> Iterator[Environment]:
        """Forget and yield the environments whose spares were not used for long."""
        earliest = None
        for environment, used_at in list(self.wanted.items()):
            if not environment:
                continue
            # Compared as the alarm was set: the difference may be a little less.
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
        """A worker has started, or a spare ended before it had.

        After the latter no spare is asked for until one starts: where none can be
        forked, asking would never end.
        """
        if has_started:
            self._in_vain.discard(environment)
        elif environment in self.wanted:
            self._in_vain.add(environment)

    def await_refill(self) -> bool:
        """Note that a refill is due; return whether it was not due before."""
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def note_refill(self) -> None:
        """They are refilled now."""
        self._is_awaited = False

    def kept(self, environment: Environment) -> int:
        """Return how many clean workers of an environment are to be left alone."""
        return self.target if environment in self.wanted else 0

    def missing(self, environment: Environment, there: int) -> int:
        """Return how many are to be forked where there are so many."""
        if environment in self._in_vain or environment not in self.wanted:
            return 0
        return max(self.target - there, 0)


BOUNDLESS: Final = 1 << 30
"""A node without a bound; one on paper is that."""


class WorkerLimit:
    """The bound on a node's workers.

    Attributes:
        most: workers that there may be at a time.
        now: the same for now; less than `most` after one could not be had.
        refused: tasks that lacked nothing but a worker, when all that waits was
            last looked at; of each request the first alone is counted.
        failures: tries in a row that have failed, since a worker last came or went;
            workers that fail together count as one try.
        reason: why the last of them failed.
        since: when the first of them failed.
        retry_at: when more are allowed next.
        leaving: idle workers that were retired so that others can be forked.
    """

    def __init__(self) -> None:
        self.most = self.now = BOUNDLESS
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
        return f"<Room for {self.now} of {self.most}>"

    def bound(self, most: int) -> None:
        """Say how many there may be.

        Args:
            most: at least 1.
        """
        self.most = self.now = most

    def shrink(self, there: int, reason: str, now: float) -> bool:
        """Limit workers to the present number; return whether to set a timer."""
        if not self.failures:
            self.since = now
        if not self._is_counted:
            self._is_counted = True
            self.failures += 1
        self.reason = reason
        self._step = 1
        self.now = min(self.now, there)
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def grow(self, is_quiet: bool = True) -> bool:
        """Allow one more, then twice as many; whether to look again later.

        What is in vain costs something: so it is one at a time where nothing helps.

        Args:
            is_quiet: no worker is being started, so that none may still fail.
        """
        has_failed, self._is_counted = self._is_counted, False
        if is_quiet and not has_failed:
            self.failures = 0
        self.now = min(self.most, self.now + self._step)
        self._step *= 2
        self._is_awaited = self.now < self.most or has_failed
        return self._is_awaited

    def note_change(self) -> None:
        """A worker has come or gone, so that the next try is not in vain."""
        self.failures = 0
        self._is_counted = False


class Workers:
    """All workers that are wanted, alive or still ending.

    Attributes:
        by_id: each by its id, to be read only.
        get: gives the worker of an id, None once it is gone.
        idle: how many wait for work.
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
        """Record a worker that is to be forked."""
        self._last_id += 1
        record = WorkerRecord(WorkerId(self._last_id), environment)
        self.by_id[record.id] = record
        return record

    def stand_in(self) -> WorkerRecord:
        """Make a record with an id that does not count as a worker of the node."""
        self._last_id += 1
        return WorkerRecord(WorkerId(self._last_id), state=WorkerState.BUSY)

    def take_bound(self, binding: Binding) -> WorkerRecord | None:
        """Remove an idle worker with that binding, the most recently used one."""
        stack = self._by_binding.get(binding)
        if not stack:
            return None
        record = stack[-1]
        self.leave_idle(record)
        return record

    def has_bound(self, binding: Binding) -> bool:
        """Return whether an idle worker has that binding."""
        return binding in self._by_binding

    def affinity(self, environment: Environment, kind: str, limit: int) -> Affinity:
        """The devices, and the sets of several, for which a worker waits."""
        return self._warm.get((environment, kind, limit), COLD)

    def _note_warm(self, binding: Binding, *, is_there: bool) -> None:
        """The first idle worker of a binding has come, or the last one has gone."""
        key, mask = _place(binding)
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

    def take_clean(self, environment: Environment) -> WorkerRecord | None:
        """Remove an idle worker to which nothing was assigned yet."""
        clean = self._clean.get(environment)
        if not clean:
            return None
        record = next(iter(clean.values()))
        self.leave_idle(record)
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
        """Return how many are clean and without a task, those that start included."""
        clean = self._clean.get(environment, ())
        return len(clean) + len(self._unclaimed.get(environment, ()))

    def clean(self, environment: Environment) -> list[WorkerRecord]:
        """Idle workers to which nothing was assigned yet."""
        return list(self._clean.get(environment, {}).values())

    def bound_to(self, kind: str, index: int) -> list[WorkerRecord]:
        """Workers that idle or run a task and were assigned a device."""
        return [
            record
            for record in self.by_id.values()
            if record.state in (WorkerState.IDLE, WorkerState.BUSY)
            if record.binding and index in dict(record.binding[1]).get(kind, ())
        ]

    def put_idle(self, record: WorkerRecord) -> None:
        """Move a worker to IDLE and remember that it can take work."""
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
        """Remember that a starting worker has no task."""
        self._unclaimed.setdefault(record.environment, {})[record.id] = record

    def pop_idle(self, spares: Spares | None = None) -> WorkerRecord:
        """Remove the idle worker that will be missed least.

        That is a clean one where there are more of its environment than are kept, else
        the one that has been idle longest.

        Args:
            spares: says how many clean workers of an environment are kept; None: none.

        Raises:
            KeyError: none is idle.
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
        """Remove this very worker from those that can take work."""
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
        """Assert that the indices agree with the records. Costs O(workers)."""
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
        said, held = (
            {key: (single, set(several)) for key, (single, several) in one.items()}
            for one in (self._warm, fresh._warm)
        )
        assert said == held, (said, held)
