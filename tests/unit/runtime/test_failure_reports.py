"""Reports of workers that died and of tasks that ran out of GPU memory."""

from __future__ import annotations

import pickle
import re
import signal

import pytest

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import GpuOutOfMemoryError, WorkerDiedError
from aiogpu.linux.procfs import Findings
from aiogpu.runtime.devices.memory_guard import Shortages, gpu_out_of_memory
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.death import (
    IN_WORDS,
    Death,
    describe_death,
    find_cause,
    may_be_kernels,
)
from aiogpu.serialization.exceptions import RAISED
from aiogpu.wire.messages import Failed
from tests.unit.runtime.fakes import SIZED_GPUS, lease_of

NOTHING = Findings()
IN_GROUP = Findings(1, 1)
ON_MACHINE = Findings(0, 1)
LOGGED = Findings(0, 0, "Out of memory: Killed process 12 (python) total-vm:1kB")
SEGFAULT = Findings(0, 0, "python[12]: segfault at 0")


@pytest.mark.parametrize(
    ("status", "known", "findings", "expected"),
    [
        (None, "", NOTHING, cause.NOT_STARTED),
        (0, "", NOTHING, cause.EXIT),
        (3 << 8, "", IN_GROUP, cause.EXIT),
        (0, cause.ENDED, NOTHING, cause.EXIT),
        (0, cause.DISCONNECTED, NOTHING, cause.EXIT),
        (0, cause.KEEPER_DIED, NOTHING, cause.KEEPER_DIED),
        (9, "", NOTHING, cause.KILLED),
        (9, "", SEGFAULT, cause.KILLED),
        (9, "", IN_GROUP, cause.OUT_OF_MEMORY),
        (9, "", ON_MACHINE, cause.OUT_OF_MEMORY),
        (9, "", LOGGED, cause.OUT_OF_MEMORY),
        (9, cause.DISCONNECTED, NOTHING, cause.DISCONNECTED),
        (9, cause.DISCONNECTED, IN_GROUP, cause.DISCONNECTED),
        (9, cause.DISCONNECTED, LOGGED, cause.OUT_OF_MEMORY),
        (9, cause.ENDED, NOTHING, cause.ENDED),
        (9, cause.KEEPER_DIED, ON_MACHINE, cause.KEEPER_DIED),
        (9, cause.NOT_STARTED, NOTHING, cause.NOT_STARTED),
        (15, "", IN_GROUP, cause.SIGNAL),
        (15, cause.ENDED, NOTHING, cause.SIGNAL),
        (signal.SIGRTMIN, "", NOTHING, cause.SIGNAL),
        (11, "", NOTHING, "segfault"),
        (11 | 0x80, "", SEGFAULT, "segfault"),
        (7, "", NOTHING, "bus error"),
        (6, "", IN_GROUP, "abort"),
    ],
)
def test_cause_of_death_follows_from_status_and_findings(
    status: int | None, known: str, findings: Findings, expected: str
) -> None:
    assert find_cause(status, known, findings) == expected
    assert IN_WORDS[expected].what
    assert IN_WORDS[expected].advice.endswith(".")


@pytest.mark.parametrize(
    ("status", "known", "expected"),
    [
        *[(None, "", False), (0, "", False), (9, "", True)],
        *[(9, cause.DISCONNECTED, True), (9, cause.ENDED, False), (11, "", True)],
        (15, "", False),
    ],
)
def test_kernel_log_is_searched_for_signals_of_the_kernel_only(
    status: int | None, known: str, expected: bool
) -> None:
    assert may_be_kernels(status, known) is expected


def test_docstring_of_worker_died_error_names_every_cause() -> None:
    assert WorkerDiedError.__doc__ is not None
    text = " ".join(WorkerDiedError.__doc__.split())
    documented = set(re.findall(r'"([a-z ]+)"', text))
    assert documented == {*cause.IN_WORDS}


def test_signal_without_a_name_is_called_a_real_time_signal() -> None:
    number = signal.SIGRTMIN + 3
    error = describe_death("train", Death(12, number))
    assert f"signal {number} (a real-time signal)" in str(error)
    assert error.cause == "signal"


def test_long_output_line_is_quoted_in_part() -> None:
    lines = ("x" * 65536, "y" * 500)
    error = describe_death("train", Death(12, 9, lines))
    quoted = str(error).partition("Its last output:")[2]
    assert quoted == f"\n  {'x' * 500}... (65536 characters)\n  {'y' * 500}"
    assert error.last_output == lines


GIB = 1 << 30


def worker_of(node: Scheduler, name: str | None, lease: Lease | None) -> WorkerRecord:
    worker = node.workers.create(())
    worker.lease = lease
    if name is not None:
        spec = TaskSpec(name, Shape(Request()), 1)
        worker.task = TaskRecord(TaskId(int(worker.id)), spec)
    return worker


@pytest.fixture
def node() -> Scheduler:
    return Scheduler(Ledger({}, [SIZED_GPUS]))


def test_gpu_memory_error_names_the_request_and_the_neighbours(node: Scheduler) -> None:
    share = lease_of(0, share=2500, gpu_memory=6 * GIB)
    worker = worker_of(node, "train", share)
    worker_of(node, "serve", lease_of(0, share=5000))
    worker_of(node, "elsewhere", lease_of(1))
    worker_of(node, None, lease_of(0, share=1000))
    worker_of(node, "on CPUs", None)
    error = gpu_out_of_memory(
        "train", worker, node, peak=5 * GIB, what="ran out of GPU memory: CUDA out."
    )
    assert str(error) == (
        "train ran out of GPU memory: CUDA out. It had asked for num_gpus=0.25, "
        "gpu_memory='6GiB' of GPU 0 (80GiB), could use 6GiB of it, and used 5GiB at "
        "its peak; serve also had a share. Ask for more with gpu_memory=, for fewer "
        "neighbours with num_gpus=, or let it be retried alone on a GPU by "
        "retry_oom='exclusive'."
    )
    assert (error.asked, error.limit, error.peak) == (6 * GIB, 6 * GIB, 5 * GIB)
    assert error.devices == (0,)
    assert error.neighbours == ("serve",)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is GpuOutOfMemoryError
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("share", "advice"),
    [
        (2500, "a share. Ask for a larger share with num_gpus=, or let it be retried"),
        (10_000, "a share. Use less, for example with smaller batches."),
    ],
)
def test_no_advice_asks_for_memory_that_is_unknown(share: int, advice: str) -> None:
    gpus = DeviceSet("GPU", [Device(number) for number in range(2)])
    node = Scheduler(Ledger({}, [gpus]))
    worker = worker_of(node, "train", lease_of(0, share=share))
    error = gpu_out_of_memory("train", worker, node, peak=0, what="ran out")
    assert advice in str(error)
    assert "gpu_memory=" not in str(error).replace("without gpu_memory=", "")


def test_memory_error_of_a_worker_without_lease_has_no_devices(node: Scheduler) -> None:
    worker = WorkerRecord(WorkerId(9))
    error = gpu_out_of_memory("train", worker, node, peak=3, what="ran out")
    assert (error.asked, error.limit, error.peak, error.devices) == (0, 0, 3, ())
    assert error.neighbours == ()


FAILED = Failed(
    7, RAISED, "torch.OutOfMemoryError", "CUDA out\nof it", "trace", b"x", peak=5
)


def test_failure_of_an_ended_worker_is_unchanged(node: Scheduler) -> None:
    assert Shortages(node).explain(1, "train", FAILED) is FAILED
