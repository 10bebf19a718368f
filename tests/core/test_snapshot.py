"""The picture of a node: who holds what, what waits and why."""

from aiogpu.core.devices import Device, DeviceSet
from aiogpu.core.events import Submitted
from aiogpu.core.ids import TaskId
from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import LARGEST, UNIT, Request
from aiogpu.core.scheduler import Scheduler
from aiogpu.core.snapshot import (
    DeviceStatus,
    Holder,
    NodeStatus,
    WorkerStatus,
    snapshot,
)
from aiogpu.core.specs import Shape, TaskSpec
from aiogpu.testing import World


def look_at(w: World) -> NodeStatus:
    """A picture in which worker 1 has process 101, and so on."""
    return snapshot(w.scheduler, {worker: 100 + worker for worker in w.workers})


def reason_of(w: World, name: str) -> str | None:
    """Why a task waits."""
    [status] = [task for task in look_at(w).tasks if task.name == name]
    return status.reason


def test_an_idle_node():
    status = look_at(World(cpus=2, gpu_types=["A100"]))
    assert status.total == {"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0}
    assert status.available == status.total
    assert status.devices == (DeviceStatus("GPU", 0, "A100", None, None, 0, 1.0, ()),)
    assert status.workers == status.tasks == status.waiting == ()


def test_a_device_shows_who_holds_it():
    w = World(gpus=2, exits=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.25, max_calls=1)
    w.submit("c", num_gpus=1)
    w.finish("b")
    w.submit("cpu")
    first, second = look_at(w).devices
    assert first.free == 0.25
    assert first.holders == (Holder(0.5, 1, 101, "a"), Holder(0.25, 2, 102, None))
    assert second.free == 0.0
    assert second.holders == (Holder(1.0, 3, 103, "c"),)


def test_each_kind_of_device_shows_its_own_holders():
    kinds = [DeviceSet(kind, [Device(0), Device(1)]) for kind in ("GPU", "NPU")]
    scheduler = Scheduler(Ledger({}, kinds))
    request = Request.of({}, {"NPU": 2_500, "GPU": 2 * UNIT})
    spec = TaskSpec("a", Shape(request))
    scheduler.handle(Submitted(TaskId(1), spec), 0.0)
    status = snapshot(scheduler, {})
    gpu, npu = Holder(1.0, 1, 0, "a"), Holder(0.25, 1, 0, "a")
    assert [d.kind for d in status.devices] == ["GPU", "GPU", "NPU", "NPU"]
    assert [d.holders for d in status.devices] == [(gpu,), (gpu,), (npu,), ()]


def test_an_idle_worker_holds_no_device():
    w = World(gpus=1)
    w.submit("a", num_gpus=1)
    w.finish("a")
    assert look_at(w).devices[0].holders == ()
    assert look_at(w).workers == (WorkerStatus(1, 101, "idle", None),)


def test_workers_and_their_tasks():
    w = World(starts=False, exits=False)
    for name in "abc":
        w.submit(name, max_calls=1)
    w.start("a")
    w.start("b")
    w.start("c")
    w.finish("b")
    w.cancel("c")
    w.submit("d")
    assert look_at(w).workers == (
        WorkerStatus(1, 101, "busy", "a"),
        WorkerStatus(2, 102, "ending", None),
        WorkerStatus(3, 103, "busy", "c"),
        WorkerStatus(4, 104, "starting", "d"),
    )


def test_a_worker_without_a_process_has_no_pid():
    w = World(starts=False)
    w.submit("a")
    assert snapshot(w.scheduler, {}).workers[0].pid == 0


def test_tasks_that_run_come_before_those_that_wait_in_their_turn():
    w = World(cpus=1)
    w.submit("low", priority=-1)
    w.submit("a")
    w.submit("b")
    w.submit("high", priority=1)
    status = look_at(w)
    assert [task.name for task in status.tasks] == ["low", "high", "a", "b"]
    assert [task.name for task in status.waiting] == ["high", "a", "b"]
    assert [task.state for task in status.tasks] == ["running"] + ["waiting"] * 3
    assert [task.worker for task in status.tasks] == [1, None, None, None]
    assert status.tasks[0].request == {"CPU": 1.0}
    assert status.tasks[0].reason is None


def test_a_task_says_which_scalar_is_short():
    w = World(cpus=2, resources={"license": 1})
    w.submit("a", resources={"license": 1})
    w.submit("b", num_cpus=2, resources={"license": 0.5})
    reason = "waits for CPU 2 (free: 1) and license 0.5 (free: 0)"
    assert reason_of(w, "b") == reason
    assert reason_of(w, "a") is None


def test_a_task_says_that_only_the_sum_of_shares_would_do():
    w = World(gpus=2)
    w.submit("a", num_gpus=0.7)
    w.submit("b", num_gpus=0.7)
    w.submit("c", num_gpus=0.5)
    reason = "waits for GPU 0.5 (free by device: 0: 0.3, 1: 0.3)"
    assert reason_of(w, "c") == reason


def test_a_task_names_no_device_where_a_device_is_free():
    w = World(cpus=1, gpus=1)
    w.submit("a")
    w.submit("b", num_gpus=0.5)
    assert reason_of(w, "b") == "waits for CPU 1 (free: 0)"


def test_a_reason_is_exact_where_floats_are_not():
    w = World(cpus=LARGEST)
    w.submit("a", num_cpus=0.0001)
    w.submit("b", num_cpus=LARGEST)
    assert reason_of(w, "b") == "waits for CPU 1e+14 (free: 1e+14)"
