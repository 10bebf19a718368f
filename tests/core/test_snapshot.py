"""The picture of a node: who holds what, what waits and why."""

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import MOST_PARTS, UNIT
from aiogpu.core.queue import ready as ready_module
from aiogpu.core.queue.ready import precedence
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import ABANDONED, Scheduler
from aiogpu.observe import snapshot as snapshot_module
from aiogpu.observe.snapshot import LISTED, snapshot
from aiogpu.observe.status import (
    DeviceStatus,
    Holder,
    NodeStatus,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
)
from aiogpu.testing import World


def look_at(w: World) -> NodeStatus:
    """A picture in which worker 1 has process 101, and so on."""
    pids = {worker: 100 + worker for worker in w.workers}
    return snapshot(w.scheduler, pids, w.now)


def reason_of(w: World, name: str) -> str | None:
    """Why a task waits."""
    [status] = [task for task in look_at(w).tasks if task.name == name]
    return status.reason


def test_an_idle_node():
    status = look_at(World(cpus=2, gpu_types=["A100"]))
    assert status.total == {"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0}
    assert status.available == status.total
    assert status.devices == (DeviceStatus("GPU", 0, "A100", None, None, 0, 1.0, ()),)
    assert status.workers == status.tasks == status.waiting == status.shapes == ()
    assert (status.waiting_count, status.shape_count) == (0, 0)
    assert status.reservation is None


def test_a_device_shows_who_holds_it():
    w = World(gpus=2, exits=False)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_gpus=0.25, max_calls=1)
    w.submit("c", num_gpus=1)
    w.advance(0.5)
    w.finish("b")
    w.submit("cpu")
    w.advance(3)
    first, second = look_at(w).devices
    assert first.free == 0.25
    assert first.holders == (Holder(0.5, 1, 101, "a", 3.5), Holder(0.25, 2, 102, None))
    assert second.free == 0.0
    assert second.holders == (Holder(1.0, 3, 103, "c", 3.5),)


def test_how_long_a_worker_has_run_its_task_is_known_to_a_second():
    w = World(cpus=1, gpus=1)
    for name in "abc":
        w.submit(name, num_gpus=1)
    w.advance(0.3)
    w.finish("a")
    (holder,) = look_at(w).devices[0].holders
    assert (holder.task, holder.seconds) == ("b", None)
    w.advance(5)
    (holder,) = look_at(w).devices[0].holders
    assert 4 <= holder.seconds <= 5
    w.finish("b")
    w.advance(2)
    (holder,) = look_at(w).devices[0].holders
    assert (holder.task, holder.seconds) == ("c", 2)


def test_what_is_held_without_end_is_shown_as_such():
    w = World(gpus=1)
    w.submit("model", num_gpus=0.5, is_endless=True)
    w.submit("task", num_gpus=0.5)
    model, task = look_at(w).devices[0].holders
    assert (model.task, model.is_endless) == ("model", True)
    assert (task.task, task.is_endless) == ("task", False)


def test_each_kind_of_device_shows_its_own_holders():
    kinds = [DeviceSet(kind, [Device(0), Device(1)]) for kind in ("GPU", "NPU")]
    scheduler = Scheduler(Ledger({}, kinds))
    request = Request.of({}, {"NPU": 2_500, "GPU": 2 * UNIT})
    spec = TaskSpec("a", Shape(request))
    scheduler.submit(0.0, TaskId(1), spec)
    status = snapshot(scheduler, {}, 0.0)
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
    assert snapshot(w.scheduler, {}, 0.0).workers[0].pid == 0


def test_tasks_that_run_come_before_those_that_wait_in_their_turn():
    w = World(cpus=1)
    w.submit("low", priority=-1)
    w.submit("a")
    w.submit("b")
    w.submit("high", priority=1)
    status = look_at(w)
    assert [task.name for task in status.tasks] == ["low", "high", "a", "b"]
    assert [task.name for task in status.waiting] == ["high", "a", "b"]
    assert status.waiting_count == 3
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
    w = World(cpus=MOST_PARTS)
    w.submit("a", num_cpus=0.0001)
    w.submit("b", num_cpus=MOST_PARTS)
    assert reason_of(w, "b") == "waits for CPU 1e+14 (free: 1e+14)"


def test_those_that_have_a_worker_say_why_their_code_does_not_run():
    w = World(cpus=1, took=1e-5)
    w.submit("zero")
    for name in ("a", "b", "c", "d", "e", "f"):
        w.submit(name)
    w.finish("zero")
    assert w.queued == {"b", "c"}
    states = [(task.name, task.state, task.reason) for task in look_at(w).tasks]
    assert states[:4] == [
        ("a", "running", None),
        ("b", "queued", "sent ahead to pid 101, behind a"),
        ("c", "queued", "sent ahead to pid 101, behind a"),
        ("d", "waiting", "waits for CPU 1 (free: 0)"),
    ]
    assert [task.worker for task in look_at(w).tasks] == [1] * 3 + [None] * 3


def test_a_task_says_that_its_worker_is_being_forked():
    w = World(starts=False)
    w.submit("a")
    assert look_at(w).tasks[0].reason == "a worker is being forked for it"


def test_a_task_names_the_children_that_it_waits_for():
    w = World(cpus=1)
    w.submit("parent")
    children = [f"child{number}" for number in range(10)]
    for name in children:
        w.submit(name, parent="parent")
    w.wait_for("parent", *children)
    status = look_at(w)
    assert status.tasks[0] == TaskStatus(
        *(0, "parent", "blocked", {"CPU": 1.0}, 1),
        f"waits for its children: {', '.join(children[:8])}, and 2 more",
        pid=status.workers[0].pid,
    )
    assert status.tasks[1].name == "child0"


def test_a_task_that_is_being_stopped_has_no_reason_to_wait():
    w = World()
    w.submit("a")
    w.cancel("a")
    (task,) = look_at(w).tasks
    assert (task.state, task.reason) == ("stopping", None)


def test_only_the_first_of_those_that_wait_are_listed():
    w = World(cpus=1)
    w.submit("runs")
    for number in range(LISTED + 20):
        w.submit(f"t{number}", priority=number)
    status = look_at(w)
    assert status.waiting_count == LISTED + 20
    names = [task.name for task in status.waiting]
    assert names == [f"t{number}" for number in range(LISTED + 19, 19, -1)]
    (shape,) = status.shapes
    assert (shape.count, shape.first) == (LISTED + 20, names[0])


def test_the_turns_of_all_shapes_are_one_line():
    w = World(cpus=2, gpus=1)
    w.submit("runs", num_cpus=2)
    w.submit("a", num_gpus=1)
    w.submit("b", num_gpus=0.5)
    w.submit("c", environment={"A": "1"})
    w.submit("d", num_gpus=1)
    w.submit("e", environment={"A": "1"}, priority=1)
    w.submit("f", environment={"A": "2"})
    status = look_at(w)
    assert [task.name for task in status.waiting] == ["e", "a", "b", "c", "d", "f"]
    assert [shape.first for shape in status.shapes] == ["e", "a", "b", "f"]


def test_each_shape_is_told_once():
    w = World(cpus=2, gpus=2)
    w.submit("runs", num_cpus=2)
    w.advance(1)
    w.submit("old", num_gpus=0.5, strategy="spread", environment={"B": "2", "A": "1"})
    w.advance(1)
    w.submit("next", priority=1)
    w.submit("new", num_gpus=0.5, strategy="spread", environment={"A": "1", "B": "2"})
    w.submit("first", num_gpus=0.5, strategy="spread", priority=2)
    w.cancel("first")
    w.advance(2)
    reason = "waits for CPU 1 (free: 0)"
    assert look_at(w).shapes == (
        ShapeStatus({"CPU": 1.0}, "pack", (), 1, "next", 2.0, reason),
        ShapeStatus(
            {"CPU": 1.0, "GPU": 0.5}, "spread", ("A", "B"), 2, "old", 3.0, reason
        ),
    )
    assert look_at(w).shape_count == 2


def test_the_oldest_of_a_shape_need_not_be_its_first():
    w = World(cpus=1)
    w.submit("runs")
    w.submit("old")
    w.advance(5)
    w.submit("urgent", priority=1)
    (shape,) = look_at(w).shapes
    assert (shape.first, shape.seconds) == ("urgent", 5)


def test_shapes_that_have_left_are_not_told():
    """Their places in the line are found later."""
    w = World(cpus=1)
    w.submit("runs")
    for number in range(20):
        w.submit(f"t{number}", environment={"N": str(number)})
    for number in (0, 3, 4, 11, 19):
        w.cancel(f"t{number}")
    w.submit("again", environment={"N": "3"})
    w.submit("more", environment={"N": "5"})
    w.cancel("t5")
    left = [n for n in range(20) if n not in (0, 3, 4, 5, 11, 19)]
    expected = [*(f"t{n}" for n in left), "again", "more"]
    assert [shape.first for shape in look_at(w).shapes] == expected
    assert [task.name for task in look_at(w).waiting] == expected
    assert look_at(w).waiting_count == look_at(w).shape_count == len(expected)


def go_past(w: World, name: str) -> None:
    """Let a task come and go, so that all who wait are looked at."""
    w.submit(name, num_cpus=0)
    w.finish(name)


def reserved() -> World:
    """A world in which something is kept for `big`."""
    w = World(cpus=4, gpus=2)
    w.submit("long", num_gpus=0.5)
    w.submit("big", num_gpus=2)
    go_past(w, "before")
    w.advance(1)
    go_past(w, "after")
    w.submit("small", num_gpus=0.25)
    return w


def test_what_is_kept_is_told():
    status = look_at(reserved())
    kept = ReservationStatus(1, "big", {"GPU": (0, 1)}, {}, None)
    assert status.reservation == kept, "its CPU serves others until its GPUs are free"
    assert str(kept) == "GPU 0, 1"
    both = ReservationStatus(1, "big", {"GPU": (0, 1)}, {"CPU": 1.0}, None)
    assert str(both) == "GPU 0, 1 and CPU 1"


def test_how_long_something_is_kept_at_most_is_told_where_it_is_known():
    w = World(cpus=4, gpus=1, config=SchedulerConfig(cancel_grace=2))
    w.submit("long", num_gpus=1, timeout=10)
    w.submit("big", num_gpus=1)
    go_past(w, "before")
    w.advance(1)
    go_past(w, "after")
    assert look_at(w).reservation.seconds == 11
    w.advance(4)
    assert look_at(w).reservation.seconds == 7


def test_a_task_says_for_whom_is_kept_what_it_could_have():
    w = reserved()
    assert reason_of(w, "small") == (
        "waits for GPU 0.25 (free by device: 0: 0.5, 1: 1; kept for big)"
    )
    assert reason_of(w, "big") == "waits for GPU 2 (free by device: 0: 0.5, 1: 1)"


def test_reasons_are_those_of_the_task_where_only_some_may_pass():
    w = reserved()
    w.submit("soon", num_gpus=0.25, priority=1)
    assert "soon" in w.running, "what goes before may take anything"
    w.submit("full", num_gpus=0.5, priority=1)
    w.submit("late", num_gpus=0.5)
    assert w.waiting == {"big", "small", "late"}
    assert reason_of(w, "late").endswith("kept for big)")


def test_what_is_placed_in_the_same_moment_does_not_undo_what_is_kept():
    w = reserved()
    w.submit("soon", num_gpus=0.25, priority=1)
    assert w.running == {"long", "soon"}
    assert look_at(w).reservation.name == "big"


def test_many_devices_are_told_in_part():
    w = World(gpus=12)
    w.submit("a", num_gpus=12)
    w.submit("b", num_gpus=1)
    shares = ", ".join(f"{index}: 0" for index in range(8))
    reason = f"waits for GPU 1 (free by device: {shares}, and 4 more)"
    assert reason_of(w, "b") == reason


def test_only_devices_of_the_type_asked_for_are_told():
    w = World(gpu_types=["A100", "T4", "A100"])
    w.submit("a", num_gpus=2, accelerator_type="A100")
    w.submit("b", num_gpus=1, accelerator_type="A100")
    assert reason_of(w, "b") == "waits for GPU 1 (free by device: 0: 0, 2: 0)"


def test_on_a_node_that_closes_a_task_waits_for_its_turn():
    w = World(cpus=1, exits=False)
    w.submit("a")
    for number in range(ABANDONED + 1):
        w.submit(f"t{number}")
    w.close()
    w.finish("a")
    assert look_at(w).waiting[0].reason == "waits for its turn"


def test_a_line_says_what_matters():
    w = World(cpus=2, gpus=1, took=1e-5)
    w.submit("a", num_gpus=0.5)
    w.submit("b", num_cpus=2)
    w.submit("c", num_cpus=2)
    assert repr(look_at(w)) == (
        "<NodeStatus CPU 1/2, GPU 0.5/1; 1 workers; 1 running, 2 waiting>"
    )
    assert repr(look_at(World(cpus=1, gpus=0))) == (
        "<NodeStatus CPU 1/1, GPU 0/0; 0 workers; no tasks>"
    )


def test_a_great_many_cost_no_more_than_a_few(monkeypatch):
    """What is looked at and what is made is counted, not timed."""
    w = World(cpus=1)
    w.submit("runs")
    spec = w.scheduler.tasks.get(TaskId(0)).spec
    for number in range(1, 50_001):
        w.scheduler.submit(0.0, TaskId(number), spec)
    looks, seen = count_looks(monkeypatch), count_made(monkeypatch)
    status = look_at(w)
    assert status.waiting_count == 50_000
    assert len(seen) == 1 + LISTED == len(status.tasks)
    assert len(looks) <= 4 * LISTED


def count_made(monkeypatch) -> list[object]:
    """Everything that is told of a task from now on."""
    made = []

    def make(*parts):
        made.append(parts)
        return TaskStatus(*parts)

    monkeypatch.setattr(snapshot_module, "TaskStatus", make)
    return made


def count_looks(monkeypatch) -> list[object]:
    """The records whose place in line is asked for from now on."""
    looks = []

    def note(record):
        looks.append(record)
        return precedence(record)

    monkeypatch.setattr(ready_module, "precedence", note)
    return looks


def test_memory_is_told_of_where_somebody_has_asked_for_some():
    w = World(cpus=2, resources={"memory": 4 << 30})
    w.submit("a")
    assert "memory" not in str(snapshot(w.scheduler, {}, w.now))
    w.submit("b", resources={"memory": 1 << 30})
    assert "memory   3GiB of 4GiB free" in str(snapshot(w.scheduler, {}, w.now))
    assert "memory 3GiB/4GiB" in repr(snapshot(w.scheduler, {}, w.now))
