"""Names the tasks that use more device memory than was reserved for them, or ends them.

What a framework is limited to is advice: it binds only what the framework allocates. So
what processes really use is observed. A process that has outgrown its reservation is
reported once, and ended before its neighbours suffer if the user wants that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.units import GPU, size
from aiogpu.core.records import WorkerRecord, WorkerState
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import GpuOutOfMemoryError
from aiogpu.runtime.devices.binding import held_of, limits_of
from aiogpu.runtime.devices.memory_shortage import gpu_out_of_memory, neighbours_of
from aiogpu.runtime.devices.probe import Key
from aiogpu.runtime.devices.probe_thread import DeviceThread
from aiogpu.runtime.devices.process_attribution import Use

OVERHEAD: Final = 1 << 30
"""Bytes that a process may use beyond what was reserved. What frameworks are limited
to is what their allocators hand out; a CUDA context, the kernels that it has loaded
and the workspaces of cuBLAS and NCCL come on top (1015 MiB in pytorch#58466, by a
process limited to half of 10989 MiB). Each process has a context of its own."""


def is_outgrown(use: Use, reserved: int) -> bool:
    """Return whether a worker uses more than it was given.

    Args:
        use: what it uses of a device, with all below it.
        reserved: bytes that were reserved for it there, 0 for all that there is.
    """
    return bool(reserved) and use.memory > reserved + OVERHEAD * use.processes


def outgrowth_told(
    name: str, device: str, use: Use, reserved: int, neighbours: Iterable[str]
) -> str:
    """Return what is said of it, for people, without a word of what follows.

    Args:
        name: of the task.
        device: as people know it, "GPU 0".
        use: what its worker uses there.
        reserved: bytes that were reserved for it.
        neighbours: names of the tasks that have a share there as well.
    """
    count = use.processes
    by = f", by {count} processes" if count > 1 else ""
    beside = ", ".join(neighbours)
    return (
        f"{name} uses {size(use.memory)} of {device}{by}, and had asked for "
        f"{size(reserved)} (gpu_memory=); "
        f"{f'beside it there: {beside}' if beside else 'nobody else is there'}."
    )


_log: Final = logging.getLogger(__name__)


ENDING: Final = "It is ended."


LEFT: Final = "It goes on; init(gpu_memory_enforce=True) would end it."


ENDED: Final = "was ended, for it used more GPU memory than was reserved for it"


class GpuMemoryGuard:
    """Watches over what one node's workers use of the memory that they reserved.

    Attributes:
        enforces: whether a worker that has outgrown what it reserved is ended.
    """

    def __init__(self, scheduler: Scheduler, thread: DeviceThread) -> None:
        self.enforces = False
        self._scheduler = scheduler
        self._thread = thread
        self._hot: set[Key] = set()
        self._told: set[tuple[int, Key, TaskId]] = set()
        self._peaks: dict[int, int] = {}
        self._errors: dict[tuple[int, int], GpuOutOfMemoryError] = {}

    def __repr__(self) -> str:
        return f"<GpuMemoryGuard of {len(self._hot)} devices>"

    def begin(self, lease: Lease) -> None:
        """A worker gets these devices: look often at those with memory reserved."""
        reserved = {key for key, amount in self._reserved(lease) if amount}
        if not reserved <= self._hot:
            self._watch(self._hot | reserved)

    def tidy(self) -> None:
        """Look often only where memory is reserved; forget those who have gone."""
        workers = self._scheduler.workers
        hot = {
            key
            for worker in workers
            if worker.lease is not None and worker.state is WorkerState.BUSY
            for key, amount in self._reserved(worker.lease)
            if amount
        }
        if hot != self._hot:
            self._watch(hot)
        gone = [w for w in self._peaks if workers.get(WorkerId(w)) is None]
        for worker in gone:
            del self._peaks[worker]
        if self._errors:
            self._errors = {
                at: error for at, error in self._errors.items() if at[0] in self._peaks
            }
        if self._told:
            # A worker may run tasks without end.
            running = {(w.id, w.task.id) for w in workers if w.task is not None}
            self._told = {one for one in self._told if (one[0], one[2]) in running}

    def _watch(self, hot: set[Key]) -> None:
        self._hot = hot
        keys = tuple(hot)
        self._thread.order(lambda desk: desk.rounds.watch(keys))

    def _reserved(self, lease: Lease) -> Iterator[tuple[Key, int]]:
        """The devices of a lease that can be looked at, with what is reserved."""
        if not lease.request.gpu_memory:
            return
        limits = limits_of(lease, self._scheduler.ledger.device_sets.get(GPU))
        for index, limit in zip(held_of(lease, GPU), limits, strict=False):
            if (GPU, index) in self._thread.devices:
                yield (GPU, index), limit

    def check(
        self,
        key: Key,
        uses: Mapping[int, Use],
        feed: Feed,
    ) -> frozenset[int]:
        """See who has outgrown what it reserved of a device.

        Args:
            key: the device.
            uses: what the workers use of it.
            feed: is told of those who are to be ended.

        Returns:
            The workers that have, whether they are ended or not.
        """
        over = set()
        for worker, use in uses.items():
            self._peaks[worker] = max(use.memory, self._peaks.get(worker, 0))
            record = self._scheduler.workers.get(WorkerId(worker))
            if record is None or record.lease is None:
                continue
            reserved = dict(self._reserved(record.lease)).get(key, 0)
            if is_outgrown(use, reserved):
                over.add(worker)
                self._note(record, key, use, reserved, feed)
        return frozenset(over)

    def _note(
        self,
        worker: WorkerRecord,
        key: Key,
        use: Use,
        reserved: int,
        feed: Feed,
    ) -> None:
        """Tell of it, once for each task."""
        task = worker.task
        if task is None or (worker.id, key, task.id) in self._told:
            return
        self._told.add((worker.id, key, task.id))
        name = task.spec.name
        _log.warning(
            "! %s %s",
            outgrowth_told(
                name,
                self._thread.name_of(key),
                use,
                reserved,
                neighbours_of(worker, self._scheduler.workers),
            ),
            ENDING if self.enforces else LEFT,
        )
        if self.enforces and worker.state is WorkerState.BUSY:
            self._errors[worker.id, task.id] = gpu_out_of_memory(
                name, worker, self._scheduler, peak=use.memory, told=ENDED
            )
            feed(Scheduler.memory_outgrown, worker.id)

    def peak_of(self, worker: int) -> int:
        """The most bytes that a worker was seen to use of a device, 0 if never."""
        return self._peaks.get(worker, 0)

    def explain(self, worker: int, task: int) -> GpuOutOfMemoryError | None:
        """The error of a task that this has ended with its worker, None for others.

        What the worker had begun after it, when it was ended, is another.
        """
        return self._errors.get((worker, task))
