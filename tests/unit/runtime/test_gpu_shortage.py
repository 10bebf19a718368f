"""What is told of a task that had too little device memory."""

from __future__ import annotations

import pickle

import pytest

from aiogpu.core.model.ids import LeaseId, TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import GpuOutOfMemoryError, RemoteTraceback
from aiogpu.runtime.devices.binding import limits_of
from aiogpu.runtime.devices.memory_guard import Shortages, gpu_out_of_memory
from aiogpu.serialization.exceptions import RAISED, unpack_failure
from aiogpu.wire.messages import Failed
from tests.unit.runtime import funcs

GIB = 1 << 30
GPUS = DeviceSet(
    "GPU",
    [Device(0, memory=80 * GIB), Device("GPU-1", memory=40 * GIB), Device(2)],
)


def lease_of(
    *indices: int, share: int = UNIT, gpu_memory: int = 0, also: bool = False
) -> Lease:
    amounts = {"GPU": share * len(indices)} if share else {}
    if also:
        amounts["AAA"] = UNIT
    request = Request.of({}, amounts, gpu_memory=gpu_memory)
    shares = tuple((index, share) for index in indices)
    others = (((0, UNIT),),) if also else ()
    return Lease(
        LeaseId(1), request, (*others, shares) if request.devices else (), Ledger({})
    )


@pytest.mark.parametrize(
    ("lease", "limits"),
    [
        (lease_of(0), ()),
        (lease_of(0, share=2500), ()),
        (lease_of(0, share=2500, gpu_memory=6 * GIB), (6 * GIB,)),
        (lease_of(0, share=0, gpu_memory=6 * GIB), (6 * GIB,)),
        (lease_of(0, 1, gpu_memory=6 * GIB), (6 * GIB, 6 * GIB)),
        (lease_of(0, share=2500, gpu_memory=BY_SHARE), (20 * GIB,)),
        (lease_of(1, share=3333, gpu_memory=BY_SHARE), (40 * GIB * 3333 // 10_000,)),
        (lease_of(2, share=2500, gpu_memory=BY_SHARE), ()),
        (lease_of(0, 1, gpu_memory=BY_SHARE), ()),
        (lease_of(1, share=5000, gpu_memory=7, also=True), (7,)),
        (lease_of(), ()),
    ],
)
def test_the_limit_follows_from_the_lease(
    lease: Lease, limits: tuple[int, ...]
) -> None:
    assert limits_of(lease, GPUS) == limits


def test_without_gpus_there_is_no_limit() -> None:
    assert limits_of(lease_of(0, gpu_memory=GIB), None) == ()


def worker_of(node: Scheduler, name: str | None, lease: Lease | None) -> WorkerRecord:
    worker = node.workers.create(())
    worker.lease = lease
    if name is not None:
        spec = TaskSpec(name, Shape(Request()), 1)
        worker.task = TaskRecord(TaskId(int(worker.id)), spec)
    return worker


@pytest.fixture
def node() -> Scheduler:
    return Scheduler(Ledger({}, [GPUS]))


def test_the_error_says_what_was_asked_and_who_was_beside(node: Scheduler) -> None:
    share = lease_of(0, share=2500, gpu_memory=6 * GIB)
    worker = worker_of(node, "train", share)
    worker_of(node, "serve", lease_of(0, share=5000))
    worker_of(node, "elsewhere", lease_of(1))
    worker_of(node, None, lease_of(0, share=1000))
    worker_of(node, "on CPUs", None)
    error = gpu_out_of_memory(
        "train", worker, node, peak=5 * GIB, told="ran out of GPU memory: CUDA out."
    )
    assert str(error) == (
        "train ran out of GPU memory: CUDA out. It had asked for num_gpus=0.25, "
        "gpu_memory='6GiB' of GPU 0 (80GiB), could use 6GiB of it, and used 5GiB at "
        "its peak; serve had a share there as well. Ask for more with gpu_memory=, for "
        "fewer neighbours with num_gpus=, or have it tried once more with a GPU of its "
        "own by retry_oom='exclusive'."
    )
    assert (error.asked, error.limit, error.peak) == (6 * GIB, 6 * GIB, 5 * GIB)
    assert error.devices == (0,)
    assert error.neighbours == ("serve",)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is GpuOutOfMemoryError
    assert vars(again) == vars(error)


def test_who_had_whole_gpus_is_told_to_use_less(node: Scheduler) -> None:
    worker = worker_of(node, "train", lease_of(0, 1))
    error = gpu_out_of_memory("train", worker, node, peak=0, told="ran out")
    assert str(error) == (
        "train ran out. It had GPUs 0, GPU-1 (40GiB each) to itself, had no limit of "
        "its own; no other task had a share there. Let it use less, such as smaller "
        "batches, or choose larger GPUs by gpu_where={'memory': ...}."
    )
    assert (error.asked, error.limit, error.peak) == (0, 0, 0)
    assert error.devices == (0, "GPU-1")


@pytest.mark.parametrize("which", ["is_endless", "retries_oom"])
def test_an_actor_or_who_has_said_so_is_not_told_of_retry_oom(
    node: Scheduler, which: str
) -> None:
    worker = worker_of(node, None, lease_of(0, share=5000))
    spec = TaskSpec("Model", Shape(Request()), 1, **{which: True})
    worker.task = TaskRecord(TaskId(1), spec)
    error = gpu_out_of_memory("Model.score", worker, node, peak=0, told="ran out")
    assert str(error).endswith(
        "Ask for more with gpu_memory=, or let it use less, such as smaller batches."
    )


def test_a_share_is_told_as_such(node: Scheduler) -> None:
    lease = lease_of(0, share=2500, gpu_memory=BY_SHARE)
    error = gpu_out_of_memory(
        "train", worker_of(node, "train", lease), node, peak=0, told="ran out"
    )
    assert "num_gpus=0.25, gpu_memory='share' of GPU 0 (80GiB), could use 20GiB" in str(
        error
    )
    assert "Ask for more with gpu_memory=, or have it tried" in str(error)
    assert (error.asked, error.limit) == (0, 20 * GIB)


def test_many_neighbours_are_counted_in_the_text_and_listed_in_full(
    node: Scheduler,
) -> None:
    worker = worker_of(node, "train", lease_of(2, share=100))
    names = [f"n{i}" for i in range(10)]
    for name in names:
        worker_of(node, name, lease_of(2, share=100))
    error = gpu_out_of_memory("train", worker, node, peak=0, told="ran out")
    assert error.neighbours == tuple(names)
    assert "n7 and 2 more had a share there as well" in str(error)


def test_what_has_no_lease_any_more_is_told_with_less(node: Scheduler) -> None:
    worker = WorkerRecord(WorkerId(9))
    error = gpu_out_of_memory("train", worker, node, peak=3, told="ran out")
    assert (error.asked, error.limit, error.peak, error.devices) == (0, 0, 3, ())
    assert error.neighbours == ()


FAILED = Failed(
    7, RAISED, "torch.OutOfMemoryError", "CUDA out\nof it", "trace", b"x", peak=5
)


def test_an_answer_is_replaced_by_what_is_known(node: Scheduler) -> None:
    worker = worker_of(node, "train", lease_of(0, share=2500))
    shortages = Shortages(node)
    told = shortages.told(worker.id, "train", FAILED)
    assert (told.task, told.kind, told.traceback) == (7, RAISED, "trace")
    error = unpack_failure(told, "train")
    assert isinstance(error, GpuOutOfMemoryError)
    start = "train ran out of GPU memory: torch.OutOfMemoryError: CUDA out. It had"
    assert str(error).startswith(start)
    assert error.peak == 5
    assert isinstance(error.__cause__, RemoteTraceback)
    shortages = Shortages(node, {worker.id: 9}.__getitem__)
    seen = unpack_failure(shortages.told(worker.id, "train", FAILED), "train")
    assert isinstance(seen, GpuOutOfMemoryError)
    assert seen.peak == 9, "the framework knows only of its own"


def test_of_who_has_gone_nothing_is_known(node: Scheduler) -> None:
    assert Shortages(node).told(1, "train", FAILED) is FAILED


def test_the_answer_is_replaced(node: Scheduler) -> None:
    worker = worker_of(node, "train", lease_of(0, share=2500))
    call = funcs.call()
    call.send_to(worker.id, 1)
    shortages = Shortages(node)
    shortages.replace(call, FAILED)
    assert isinstance(call.answer, Failed)
    assert call.answer.type_name == "aiogpu.errors.GpuOutOfMemoryError"
