"""Workers that use more device memory than they reserved, and errors for a shortage.

The limit of a framework covers only memory that the framework allocates. So the real
memory use of processes is measured. A worker that exceeds its reservation is reported
once, and optionally ended before its neighbours suffer. A process belongs to a worker
if one of its ancestors does. Most nodes have no devices, so the modules that sample
devices are not imported here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT, size
from aiogpu.core.records import Memory, WorkerRecord, WorkerState
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import GpuOutOfMemoryError
from aiogpu.runtime.devices.binding import held_of, limits_of
from aiogpu.serialization.exceptions import RAISED, pack_failure

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Sample
    from aiogpu.core.model.request import Device
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.linux.procfs import Origin
    from aiogpu.observe.status import OtherProcess
    from aiogpu.runtime.devices.probe_thread import DeviceThread, Key
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.wire.messages import Failed

LISTED: Final = 8
"""Most neighbours that a message lists."""


QUOTED: Final = 500
"""Characters quoted of a framework's own message; the traceback has all of it."""


def gpu_out_of_memory(
    name: str, worker: WorkerRecord, node: Scheduler, *, peak: int, what: str
) -> GpuOutOfMemoryError:
    """Return the error of a task that ran out of device memory.

    Args:
        name: the name of the task.
        worker: the worker that ran the task, and still has its lease.
        node: knows the other workers on the same GPUs.
        peak: the most bytes of device memory that the worker was seen to use, 0 if
            unknown.
        what: what happened, as a predicate after the task's name: "ran out of GPU
            memory".
    """
    lease, task = worker.lease, worker.task
    neighbours = neighbours_of(worker, node.workers)
    gpus = node.ledger.device_sets.get(GPU)
    held = held_of(lease, GPU) if lease is not None else {}
    limits = limits_of(lease, gpus) if lease is not None else ()
    devices = [gpus.devices[index] for index in held] if gpus is not None else []
    limit = min((each for each in limits if each), default=0)
    asked = lease.request.gpu_memory if lease is not None else 0
    # Whole GPUs, by the request or by `retry_oom`.
    is_whole = not asked and bool(held) and all(part >= UNIT for part in held.values())
    had = f"{_named(devices)} to itself"
    if not is_whole:
        had = f"asked for {_asked(asked, held)} of {_named(devices)}"
    could = "had no limit of its own"
    if limit:
        could = f"could use {size(limit)} of {'each' if len(devices) > 1 else 'it'}"
    used = f", and used {size(peak)} at its peak" if peak else ""
    is_known = all(device.memory for device in devices)
    # `retry_oom` is an option for tasks only.
    may_try_alone = task is None or not (task.spec.is_endless or task.spec.retries_oom)
    return GpuOutOfMemoryError(
        f"{name} {what.rstrip('.')}. It had {had}, {could}{used}; "
        f"{_shared_with(neighbours)}. "
        f"{_advice(is_whole, may_try_alone, bool(neighbours), is_known)}",
        asked=0 if asked == BY_SHARE else asked,
        limit=limit,
        peak=peak,
        devices=tuple(device.id for device in devices),
        neighbours=neighbours,
    )


def neighbours_of(
    worker: WorkerRecord, workers: Iterable[WorkerRecord]
) -> tuple[str, ...]:
    """Return the names of other workers' tasks with a share of the same GPUs."""
    if worker.lease is None:
        return ()
    gpus = held_of(worker.lease, GPU).keys()
    return tuple(
        other.task.spec.name
        for other in workers
        if other is not worker and other.task is not None and other.lease is not None
        if not gpus.isdisjoint(held_of(other.lease, GPU))
    )


def _asked(asked: int, held: Mapping[int, int]) -> str:
    part = next(iter(held.values()), 0)
    share = f"num_gpus={len(held) if part >= UNIT else part / UNIT:g}"
    if not asked:
        return f"{share} without gpu_memory="
    if asked == BY_SHARE:
        return f"{share}, gpu_memory='share'"
    return f"{share}, gpu_memory={size(asked)!r}" if part else f"{size(asked)}"


def _named(devices: list[Device]) -> str:
    if not devices:
        return "no GPU"
    ids = ", ".join(str(device.id) for device in devices)
    least = min(device.memory for device in devices)
    memory = f" ({size(least)}{' each' if len(devices) > 1 else ''})" if least else ""
    return f"GPU{'s' if len(devices) > 1 else ''} {ids}{memory}"


def _shared_with(neighbours: tuple[str, ...]) -> str:
    if not neighbours:
        return "no other task had a share"
    more = len(neighbours) - LISTED
    names = ", ".join(neighbours[:LISTED]) + (f" and {more} more" if more > 0 else "")
    return f"{names} also had a share"


def _advice(
    is_whole: bool, may_try_alone: bool, has_neighbours: bool, is_known: bool
) -> str:
    """Say what to do; where memory is unknown, no task can ask for any."""
    if is_whole:
        larger = ", or choose larger GPUs by gpu_where={'memory': ...}"
        return (
            f"Use less, for example with smaller batches{larger if is_known else ''}."
        )
    more = "Ask for more with gpu_memory="
    fewer = ", for fewer neighbours with num_gpus=" if has_neighbours else ""
    if not is_known:
        more, fewer = "Ask for a larger share with num_gpus=", ""
    if not may_try_alone:
        return f"{more}{fewer}, or use less, for example with smaller batches."
    return (
        f"{more}{fewer}, or let it be retried alone on a GPU by retry_oom='exclusive'."
    )


class Shortages:
    """Explains failures for lack of device memory with the node's knowledge."""

    def __init__(
        self, node: Scheduler, peak_seen: Callable[[int], int] | None = None
    ) -> None:
        """Prepare; `peak_seen` returns the most bytes that a worker used of a GPU."""
        self._node = node
        self._peak_seen = peak_seen

    def replace(self, call: Call, failed: Failed) -> None:
        """Replace the answer of a task."""
        spec = call.func.spec
        record = self._node.workers.get(WorkerId(call.worker))
        last = record.task.spec if record and record.task else spec
        again = ""
        if spec.retries_oom and not last.retries_oom:
            again = ", retried alone on a GPU,"
        elif spec.doubles_share and not last.doubles_share:
            again = ", retried on twice its share,"
        call.answer = self.explain(call.worker, f"{spec.name}{again}", failed)

    def explain(self, worker: int, name: str, failed: Failed) -> Failed:
        """Return the failure that replaces a framework's error, with its traceback.

        Args:
            worker: the worker that ran the task or call.
            name: the name of the task or call.
            failed: the error as it was raised.
        """
        peak = max(failed.peak, self._peak_seen(worker) if self._peak_seen else 0)
        record = self._node.workers.get(WorkerId(worker))
        if record is None:
            return failed
        lines = failed.message.strip().splitlines()
        message = f": {lines[0][:QUOTED]}" if lines else ""
        what = f"ran out of GPU memory: {failed.type_name}{message}"
        error = gpu_out_of_memory(name, record, self._node, peak=peak, what=what)
        packed = pack_failure(failed.task, RAISED, error, "")
        return packed._replace(traceback=failed.traceback)


FOREIGN_IDS: Final = (
    "the owners of its processes (the driver's process ids differ from those seen here)"
)


UNLISTED: Final = "which processes are on it (its driver lists none)"


THIS_PROGRAM: Final = "this program"


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a device by one worker with its descendants.

    Attributes:
        memory: bytes of device memory.
        processes: the number of processes that use memory.
    """

    memory: int
    processes: int


@dataclass(frozen=True, slots=True)
class Sorted:
    """The processes on a device, by owner.

    Attributes:
        workers: memory use by worker id, without processes of unknown memory use.
        others: foreign processes; None if they cannot be distinguished.
        unknown: the unknown facts, and why; None for none.
    """

    workers: Mapping[int, Use] = field(default_factory=dict)
    others: tuple[OtherProcess, ...] | None = ()
    unknown: str | None = None


class ProcessAttribution:
    """Finds the owners of the processes on one node's devices.

    The driver's process ids are trusted if they are certainly those of this process's
    pid namespace (`Sample.reads_pids`), or once a worker's process was listed.
    """

    def __init__(self) -> None:
        self._ours: dict[int, int] = {}
        self._read: set[str] = set()
        self._unseen: set[int] = set()
        self._unseen_before: set[int] = set()

    def sort(
        self,
        kind: str,
        sample: Sample,
        origins: Mapping[int, Origin],
        roots: Mapping[int, int],
    ) -> Sorted:
        """Sort the processes on a device by owner.

        Args:
            kind: the kind of the device.
            sample: the sample of the device.
            origins: the origins of the live processes in the sample.
            roots: the root processes of workers: process id to worker id. A root and
                its descendants belong to the worker.
        """
        from aiogpu.observe.status import OtherProcess

        if sample.problem is not None:
            return Sorted({}, None, f"what is on it ({sample.problem})")
        if sample.processes is None:
            return Sorted({}, None, UNLISTED)
        workers: dict[int, Use] = {}
        others: list[OtherProcess] = []
        for pid, memory in sample.processes.items():
            origin = origins.get(pid)
            worker = self._worker(pid, origin, roots)
            if worker is not None:
                self._read.add(kind)
                if memory:
                    before = workers.get(worker, Use(0, 0))
                    workers[worker] = Use(before.memory + memory, before.processes + 1)
            elif origin is not None or self._is_elsewhere(pid, sample):
                name = "" if origin is None else origin.name
                name = THIS_PROGRAM if origin and pid == os.getpid() else name
                others.append(OtherProcess(pid, name, memory))
        if others and not sample.reads_pids and kind not in self._read:
            return Sorted(workers, None, FOREIGN_IDS)
        return Sorted(workers, tuple(others))

    def _worker(
        self, pid: int, origin: Origin | None, roots: Mapping[int, int]
    ) -> int | None:
        """Return a process's worker; for an ended process, its last known worker."""
        if origin is None:
            return self._ours.get(pid)
        for each in (pid, *origin.ancestors):
            worker = roots.get(each)
            if worker is not None:
                self._ours[pid] = worker
                return worker
        self._ours.pop(pid, None)
        return None

    def _is_elsewhere(self, pid: int, sample: Sample) -> bool:
        """Return True if a process invisible from here is alive in another namespace.

        The driver lists an ended process for a moment longer. So the process must have
        been listed in the previous round, and ids of other namespaces must be possible.
        """
        if sample.reads_pids:
            return False
        self._unseen.add(pid)
        return pid in self._unseen_before

    def end_round(self, listed: Collection[int]) -> None:
        """End a round over all devices, in which only these processes were listed."""
        self._ours = {pid: id_ for pid, id_ in self._ours.items() if pid in listed}
        self._unseen_before, self._unseen = self._unseen, set()


OVERHEAD: Final = 1 << 30
"""Bytes that a process may use beyond its reservation. The limit of a framework covers
only memory from its allocator. The CUDA context, loaded kernels and the workspaces of
cuBLAS and NCCL come on top (1015 MiB in pytorch#58466, for a process limited to half of
10989 MiB). Each process has its own context."""


def describe_outgrowth(
    name: str, device: str, use: Use, reserved: int, neighbours: Iterable[str]
) -> str:
    """Describe a worker that exceeds its reservation, without the consequence.

    Args:
        name: the name of the worker's task.
        device: the name of the device, "GPU 0".
        use: the worker's use of the device.
        reserved: the bytes that the worker reserved.
        neighbours: names of other tasks with a share of the device.
    """
    count = use.processes
    by = f", by {count} processes" if count > 1 else ""
    names = ", ".join(neighbours)
    return (
        f"{name} uses {size(use.memory)} of {device}{by}, but has asked for "
        f"{size(reserved)} (gpu_memory=); "
        f"{f'it shares the device with {names}' if names else 'it has no neighbours'}."
    )


_log: Final = logging.getLogger(__name__)


ENDING: Final = "It is ended."


LEFT_ALONE: Final = "It goes on; init(gpu_memory_enforce=True) would end it."


ENDED: Final = "was ended because it used more GPU memory than it had reserved"


class GpuMemoryGuard:
    """Compares the device memory that workers use with what they reserved.

    Attributes:
        enforces: a worker that exceeds its reservation is ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        thread: DeviceThread,
        watch: Callable[[Collection[Key]], None],
    ) -> None:
        """Prepare; `watch` makes the monitor sample devices more often."""
        self.enforces = False
        self._scheduler = scheduler
        self._thread = thread
        self._on_hot = watch
        self._hot: set[Key] = set()
        self._reported: set[tuple[int, Key, TaskId]] = set()
        self._peaks: dict[int, int] = {}
        self._errors: dict[tuple[int, int], GpuOutOfMemoryError] = {}

    def __repr__(self) -> str:
        return f"<GpuMemoryGuard of {len(self._hot)} devices>"

    def begin(self, lease: Lease) -> None:
        """Sample the devices of a lease often if memory is reserved on them."""
        reserved = {key for key, amount in self._reserved(lease) if amount}
        if not reserved <= self._hot:
            self._watch(self._hot | reserved)

    def tidy(self) -> None:
        """Sample only devices with reserved memory often; forget ended workers."""
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
        if self._reported:
            # A worker may run any number of tasks.
            running = {(w.id, w.task.id) for w in workers if w.task is not None}
            keys = self._reported
            self._reported = {key for key in keys if (key[0], key[2]) in running}

    def _watch(self, hot: set[Key]) -> None:
        self._hot = hot
        self._on_hot(hot)

    def _reserved(self, lease: Lease) -> Iterator[tuple[Key, int]]:
        """Yield the devices of a lease that can be sampled, with reserved bytes."""
        if not lease.request.gpu_memory:
            return
        limits = limits_of(lease, self._scheduler.ledger.device_sets.get(GPU))
        for index, limit in zip(held_of(lease, GPU), limits, strict=False):
            if (GPU, index) in self._thread.devices:
                yield (GPU, index), limit

    def check(self, key: Key, uses: Mapping[int, Use], feed: Feed) -> frozenset[int]:
        """Find the workers that use more of a device than they reserved.

        Args:
            key: the device.
            uses: the use of the device by worker.
            feed: tells the core of a worker that must be ended.

        Returns:
            These workers, ended or not.
        """
        over = set()
        for worker, use in uses.items():
            self._peaks[worker] = max(use.memory, self._peaks.get(worker, 0))
            record = self._scheduler.workers.get(WorkerId(worker))
            if record is None or record.lease is None:
                continue
            reserved = dict(self._reserved(record.lease)).get(key, 0)
            if reserved and use.memory > reserved + OVERHEAD * use.processes:
                over.add(worker)
                self._note(record, key, use, reserved, feed)
        return frozenset(over)

    def _note(
        self, worker: WorkerRecord, key: Key, use: Use, reserved: int, feed: Feed
    ) -> None:
        """Report a worker that exceeds its reservation, once per task."""
        task = worker.task
        if task is None or (worker.id, key, task.id) in self._reported:
            return
        self._reported.add((worker.id, key, task.id))
        name = task.spec.name
        neighbours = neighbours_of(worker, self._scheduler.workers)
        device = self._thread.name_of(key)
        text = describe_outgrowth(name, device, use, reserved, neighbours)
        _log.warning("! %s %s", text, ENDING if self.enforces else LEFT_ALONE)
        if self.enforces and worker.state is WorkerState.BUSY:
            self._errors[worker.id, task.id] = gpu_out_of_memory(
                name, worker, self._scheduler, peak=use.memory, what=ENDED
            )
            feed(Scheduler.kill_for_memory, worker.id, Memory.DEVICE)

    def peak_of(self, worker: int) -> int:
        """Return the most bytes that a worker was seen to use of a device, or 0."""
        return self._peaks.get(worker, 0)

    def explain(self, worker: int, task: int) -> GpuOutOfMemoryError | None:
        """Return the error of a task that the guard has ended; None for other tasks.

        Keyed by worker and task: the worker may have begun another task meanwhile.
        """
        return self._errors.get((worker, task))
