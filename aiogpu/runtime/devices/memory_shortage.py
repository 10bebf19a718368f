"""What is told of a task that had too little device memory, or took too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT, size
from aiogpu.errors import GpuOutOfMemoryError
from aiogpu.runtime.devices.binding import held_of, limits_of
from aiogpu.serialization.exceptions import RAISED, pack_failure

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device
    from aiogpu.core.records import WorkerRecord
    from aiogpu.core.resources.ledger import Lease, Ledger
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.runtime.pending_tasks import Call
    from aiogpu.wire.messages import Failed


LISTED: Final = 8
"""Neighbours that a message names."""


QUOTED: Final = 500
"""Characters of a framework's own message that are quoted; its traceback has all."""


class Occupied(Protocol):
    """A node: what there is, and who has what of it."""

    @property
    def ledger(self) -> Ledger:
        """What there is."""
        ...

    @property
    def workers(self) -> Iterable[WorkerRecord]:
        """Who has what of it."""
        ...


def gpu_out_of_memory(
    name: str, worker: WorkerRecord, node: Occupied, *, peak: int, told: str
) -> GpuOutOfMemoryError:
    """The error of a task that has run out of device memory, with all that is known.

    Args:
        name: the task's.
        worker: who has run it; it still has its lease.
        node: knows who else is on its GPUs.
        peak: the most bytes of device memory that it is known to have used, 0 where
            nobody could tell.
        told: what has happened, a clause after the task's name: "ran out of GPU
            memory".
    """
    return describe_shortage(
        name,
        worker.lease,
        node.ledger,
        neighbours_of(worker, node.workers),
        peak=peak,
        told=told,
        may_try_alone=_may_try_alone(worker),
    )


def describe_shortage(
    name: str,
    lease: Lease | None,
    ledger: Ledger,
    neighbours: tuple[str, ...],
    *,
    peak: int,
    told: str,
    may_try_alone: bool = True,
) -> GpuOutOfMemoryError:
    """See `gpu_out_of_memory`, with the names of those who shared the GPUs."""
    gpus = ledger.device_sets.get(GPU)
    held = held_of(lease, GPU) if lease is not None else {}
    limits = limits_of(lease, gpus) if lease is not None else ()
    devices = [gpus.devices[index] for index in held] if gpus is not None else []
    limit = min((each for each in limits if each), default=0)
    asked = lease.request.gpu_memory if lease is not None else 0
    which = "each" if len(devices) > 1 else "it"
    facts = (
        f"It had {_had(asked, held, _named(devices))}",
        f"could use {size(limit)} of {which}" if limit else "had no limit of its own",
    )
    used = f", and used {size(peak)} at its peak" if peak else ""
    return GpuOutOfMemoryError(
        f"{name} {told.rstrip('.')}. {', '.join(facts)}{used}; {_beside(neighbours)}. "
        f"{_advice(asked, held, neighbours, may_try_alone=may_try_alone)}",
        asked=0 if asked == BY_SHARE else asked,
        limit=limit,
        peak=peak,
        devices=tuple(device.id for device in devices),
        neighbours=neighbours,
    )


def neighbours_of(
    worker: WorkerRecord, workers: Iterable[WorkerRecord]
) -> tuple[str, ...]:
    """Names of the tasks of other workers with a share of the same GPUs."""
    if worker.lease is None:
        return ()
    ours = held_of(worker.lease, GPU).keys()
    return tuple(
        one.task.spec.name
        for one in workers
        if one is not worker and one.task is not None and one.lease is not None
        if not ours.isdisjoint(held_of(one.lease, GPU))
    )


def _may_try_alone(worker: WorkerRecord) -> bool:
    """Return whether `retry_oom` is an option for it, and one that it has not had."""
    spec = worker.task.spec if worker.task else None
    return spec is None or not (spec.is_endless or spec.retries_oom)


def _is_whole(asked: int, held: Mapping[int, int]) -> bool:
    """Whether it had all that there is of its GPUs, asked for or by `retry_oom`."""
    return not asked and bool(held) and all(part >= UNIT for part in held.values())


def _had(asked: int, held: Mapping[int, int], named: str) -> str:
    if _is_whole(asked, held):
        return f"{named} to itself"
    return f"asked for {_asked(asked, held)} of {named}"


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
    there = f" ({size(least)}{' each' if len(devices) > 1 else ''})" if least else ""
    return f"GPU{'s' if len(devices) > 1 else ''} {ids}{there}"


def _beside(neighbours: tuple[str, ...]) -> str:
    if not neighbours:
        return "no other task had a share there"
    more = len(neighbours) - LISTED
    told = ", ".join(neighbours[:LISTED]) + (f" and {more} more" if more > 0 else "")
    return f"{told} had a share there as well"


def _advice(
    asked: int,
    held: Mapping[int, int],
    neighbours: tuple[str, ...],
    *,
    may_try_alone: bool,
) -> str:
    if _is_whole(asked, held):
        return (
            "Let it use less, such as smaller batches, or choose larger GPUs by "
            "gpu_where={'memory': ...}."
        )
    more = "Ask for more with gpu_memory="
    fewer = ", for fewer neighbours with num_gpus=" if neighbours else ""
    if not may_try_alone:
        return f"{more}{fewer}, or let it use less, such as smaller batches."
    return (
        f"{more}{fewer}, or have it tried once more with a GPU of its own by "
        f"retry_oom='exclusive'."
    )


def told_instead(
    name: str, worker: WorkerRecord, node: Occupied, failed: Failed, peak: int
) -> Failed:
    """What is told in the place of a framework's error, with that one's traceback.

    Args:
        name: the task's.
        worker: who has run it.
        node: knows who else is on its GPUs.
        failed: the error as it was raised.
        peak: as in `gpu_out_of_memory`.
    """
    lines = failed.message.strip().splitlines()
    what = f": {lines[0][:QUOTED]}" if lines else ""
    told = f"ran out of GPU memory: {failed.type_name}{what}"
    error = gpu_out_of_memory(name, worker, node, peak=peak, told=told)
    packed = pack_failure(failed.task, RAISED, error, "")
    return packed._replace(traceback=failed.traceback)


class Shortages:
    """Tells of failures for want of device memory what is known of them here.

    Attributes:
        peak_seen: the most bytes that a worker was seen from outside to use of a GPU.
    """

    def __init__(self, node: Scheduler) -> None:
        self.peak_seen: Callable[[int], int] = lambda _worker: 0
        self._node = node

    def replace(self, call: Call, failed: Failed) -> None:
        """Replace a task's answer."""
        spec = call.func.spec
        record = self._node.workers.get(WorkerId(call.worker))
        is_exclusive = record and record.task and record.task.spec is not spec
        again = ", tried once more with a GPU of its own," if is_exclusive else ""
        call.answer = self.told(call.worker, f"{spec.name}{again}", failed)

    def told(self, worker: int, name: str, failed: Failed) -> Failed:
        """What is told of one in the answer's place, with that one's traceback."""
        peak = max(failed.peak, self.peak_seen(worker))
        record = self._node.workers.get(WorkerId(worker))
        if record is None:
            return failed
        return told_instead(name, record, self._node, failed, peak)
