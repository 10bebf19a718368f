"""`status()` as data and as text: holders, waiting tasks, reasons."""

from dataclasses import replace

import pytest

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import MOST_PARTS
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    NodeStatus,
    OtherProcess,
    Program,
    TaskStatus,
    held_tasks,
    report,
    state_of,
)
from tests.core.builders import GIB, World, status_of


def reason_of(w: World, name: str) -> str | None:
    """Return the reason of a waiting task."""
    [status] = [task for task in status_of(w).tasks if task.name == name]
    return status.reason


def table(w: World) -> list[str]:
    """Return the lines of the printed status."""
    return str(status_of(w)).splitlines()


def test_status_of_an_idle_node():
    status = status_of(World(cpus=2, gpu_types=["A100"]))
    assert status.total == {"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0}
    assert status.available == status.total
    assert status.devices == (DeviceStatus("GPU", 0, "A100", None, None, 0, 1.0, ()),)
    assert status.workers == status.tasks == status.waiting == status.shapes == ()
    assert (status.waiting_count, status.shape_count) == (0, 0)
    assert status.reservation is None


ALL = " ".join(f"{index}: 0," for index in range(7))
SHORT = {
    "CPU 2 (free: 1) and license 0.5 (free: 0)": (
        {"cpus": 2, "resources": {"license": 1}},
        "submit a resources=license:1; submit b cpus=2 resources=license:0.5",
    ),
    "GPU 0.5 (free by device: 0: 0.3, 1: 0.3)": (
        {"gpus": 2},
        "submit a c gpus=0.7; submit b gpus=0.5",
    ),
    "CPU 1 (free: 0)": ({"cpus": 1, "gpus": 1}, "submit a; submit b gpus=0.5"),
    "CPU 1e+14 (free: 1e+14)": (
        {"cpus": MOST_PARTS},
        f"submit a cpus=0.0001; submit b cpus={MOST_PARTS}",
    ),
    f"GPU 1 (free by device: {ALL} 7: 0, and 4 more)": (
        {"gpus": 12},
        "submit a gpus=12; submit b gpus=1",
    ),
    "GPU 1 (free by device: 0: 0, 2: 0)": (
        {"gpu_types": ["A100", "T4", "A100"]},
        "submit a gpus=2 accelerator_type=A100; submit b gpus=1 accelerator_type=A100",
    ),
}


@pytest.mark.parametrize("reason", SHORT)
def test_status_names_the_shortage_of_a_task(reason):
    node, story = SHORT[reason]
    w = World(**node).play(story)
    assert (reason_of(w, "a"), reason_of(w, "b")) == (None, f"waits for {reason}")


def test_status_names_the_awaited_children():
    w = World(cpus=1).play("submit parent")
    children = [f"child{number}" for number in range(10)]
    for name in children:
        w.submit(name, parent="parent")
    w.wait_for("parent", *children)
    status = status_of(w)
    assert status.tasks[0] == TaskStatus(
        *(0, "parent", "blocked", {"CPU": 1.0}, 1),
        f"waits for its children: {', '.join(children[:8])}, and 2 more",
        pid=status.workers[0].pid,
    )
    assert status.tasks[1].name == "child0"


def reserved() -> World:
    """A world with a reservation for `big`."""
    return World(cpus=4, gpus=2).play("""
        submit long gpus=0.5; submit big gpus=2; pass_over; advance 1; pass_over
        submit small gpus=0.25
    """)


def test_status_names_the_task_of_the_reservation():
    w = reserved()
    assert reason_of(w, "small") == (
        "waits for GPU 0.25 (free by device: 0: 0.5, 1: 1; kept for big)"
    )
    assert reason_of(w, "big") == "waits for GPU 2 (free by device: 0: 0.5, 1: 1)"


def test_status_shows_memory_that_is_used():
    w = World(cpus=2, resources={"memory": 4 << 30}).play("submit a")
    assert "memory" not in str(status_of(w))
    w.submit("b", resources={"memory": 1 << 30})
    assert "memory   3GiB of 4GiB free" in str(status_of(w))
    assert "memory 3GiB/4GiB" in repr(status_of(w))


# The status as text.


def test_status_of_a_busy_node():
    w = World(cpus=5, gpu_types=["A100", "A100"], exits=False).play("""
        submit model gpus=0.5 is_endless=True; submit ended gpus=0.25 max_calls=1
        submit train cpus=2; finish ended; advance 2
    """)
    w.starts = False
    w.submit("load", num_gpus=0.25)
    w.submit("whole", num_gpus=2, environment={"B": "1", "A": "2"})
    w.play("submit half half2 gpus=0.5 strategy=spread; advance 0.5")
    assert table(w) == [
        "CPU                    0 of 5 free",
        "accelerator_type:A100  1 of 1 free",
        "GPU                    1 of 2 free",
        "workers                2 busy, 1 ending, 1 starting",
        "tasks                  2 running, 1 starting, 3 waiting",
        "GPU 0  0 free  A100",
        "  0.5   model     pid 101     without end",
        "  0.25  (ending)  pid 102",
        "  0.25  load      (starting)",
        "GPU 1  1 free  A100",
        "on workers",
        "  0  model  running   pid 101     {CPU: 1, GPU: 0.5}",
        "  2  train  running   pid 103     {CPU: 2}",
        "  3  load   starting  (starting)  {CPU: 1, GPU: 0.25}  "
        "a worker is being forked for it",
        "waiting",
        "  1 x {CPU: 1, GPU: 2} with A, B: whole first, the oldest for 0.5 s",
        "    waits for CPU 1 (free: 0) and GPU 2 (free by device: 0: 0, 1: 1)",
        "  2 x {CPU: 1, GPU: 0.5}, spread: half first, the oldest for 0.5 s",
        "    waits for CPU 1 (free: 0)",
    ]


def test_report_ends_with_actors_and_failures():
    status = snapshot(World(cpus=2).scheduler, {}, 0.0)
    actors = (
        ActorStatus(4, "serve", "", "Model", "alive", 2, 1, 101, 3, True),
        ActorStatus(9, None, "", "Cache", "pending", 1, None, 0, 0, False),
    )
    failures = (
        EndedTask(5, "train", "ValueError", "no such key", 1.0),
        EndedTask(6, "load", "MemoryError", "", 70.0),
    )
    shown = replace(status, actors=actors, failures=failures)
    assert str(shown).splitlines()[4:] == [
        "actors",
        "  4  serve  Model  alive    pid 101  held by 2  3 calls",
        "  9         Cache  pending           held by 1",
        "failed",
        "  1.0 s ago  5  train  ValueError: no such key",
        "  70 s ago   6  load   MemoryError",
    ]


def test_held_tasks_are_on_workers_or_leases():
    asks = {"GPU": 1.0}
    tasks = (
        TaskStatus(1, "train", "running", asks, 7, None, pid=107),
        TaskStatus(2, "train.py", "running", asks, None, None, 0, True, 200),
        TaskStatus(
            3, "ends.py", "stopping", asks, None, "is being returned", 0, True, 200
        ),
        TaskStatus(4, "waits.py", "waiting", asks, None, "waits for GPU 1", 0, True),
        TaskStatus(5, "waits", "delayed", asks, None, "has failed before"),
    )
    status = replace(snapshot(World(cpus=2).scheduler, {}, 0.0), tasks=tasks)
    told = [(task.id, state_of(task)) for task in held_tasks(status)]
    assert told == [(1, "running"), (2, "leased"), (3, "stopping")]


def test_report_lists_tasks_sent_to_a_cluster():
    status = snapshot(World(cpus=2).scheduler, {}, 0.0)
    tasks = (
        TaskStatus(4, "train", "sent", {"GPU": 1.0}, None, "a second ago"),
        TaskStatus(12, "load", "sent", {"CPU": 1.0}, None, None),
    )
    lines = str(replace(status, tasks=tasks)).splitlines()
    assert lines[3:] == [
        "tasks    2 sent",
        "sent",
        "  4   train  {GPU: 1}  a second ago",
        "  12  load   {CPU: 1}",
    ]


A100 = Device(0, "A100", "GPU-1", "NVIDIA A100-SXM4-80GB", 80 * GIB)


def picture(*devices: DeviceStatus) -> list[str]:
    """Return the printed lines of devices."""
    status = NodeStatus({}, {}, devices, (), (), 0, (), 0, None)
    return report(status).splitlines()[2:]


def device(**known: object) -> DeviceStatus:
    return DeviceStatus(*("GPU", 0, "A100", "u", A100.name, 80 * GIB, 1.0, ()), **known)


LONG = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def test_wide_device_has_two_lines():
    wide = DeviceStatus("GPU", 0, None, None, LONG, 96 * GIB, 1.0, (), used=95 * GIB)
    busy = DeviceStatus(
        *("GPU", 1, None, None, LONG, 96 * GIB, 1.0, ()), used=0, utilisation=3
    )
    rows = picture(wide, busy)
    assert rows == [
        f"GPU 0  1 free  {LONG}  95 GiB used of 96 GiB",
        f"GPU 1  1 free  {LONG}",
        "  0 used of 96 GiB  3 % busy",
    ]
    assert all(len(row) <= 100 for row in rows)


def test_report_shows_memory_used_by_holders():
    holders = (
        Holder(0.5, 1, 101, "a", 3.0, used=(100 << 30) + 1, has_outgrown=True),
        Holder(0.25, 2, 102, "b", 12.0, used=1000),
        Holder(0.0, 3, 103, "c", memory=6 * GIB),
    )
    assert picture(DeviceStatus("GPU", 0, None, None, None, 0, 0.0, holders)) == [
        "GPU 0  0 free",
        "  0.5   a  pid 101  3.0 s  100 GiB used, more than was reserved for it",
        "  0.25  b  pid 102  12 s   0 used",
        "  6GiB  c  pid 103",
    ]


def test_report_names_foreign_processes():
    others = (
        OtherProcess(7, "Xorg", 120 << 20),
        OtherProcess(9, "", GIB),
        OtherProcess(11, "python"),
    )
    assert picture(device(others=others))[1] == (
        "  not ours: Xorg pid 7 with 120 MiB, pid 9 with 1 GiB, python pid 11"
    )


def test_report_lists_unknown_values_once():
    rows = picture(device(unknown="all"), device(), device(unknown="all"))
    assert rows[3:] == ["not known of GPU 0, GPU 0: all"]


def test_unshared_node_lists_no_programs():
    w = World().play("submit own")
    assert status_of(w).clients == ()
    w.play("join 1; leave 1")
    assert len(status_of(w).clients) == 1
    assert "programs" not in str(status_of(w))
    w = World().play("join 1")
    assert [client.id for client in status_of(w).clients] == [1], "its own does nothing"


# Programs that share the node.

PROGRAMS = {1: Program("train.py", 4711), 2: Program("", 0)}


def test_report_shows_each_program():
    w = World(cpus=2, gpus=1)
    limits = Limits(max_waiting=9)
    w.join(1, 2.0, limits)
    w.play("""
        join 2; submit own; submit a gpus=0.5 client=1; submit t0 t1 t2 client=1
        submit b client=2; leave 2
    """)
    status = status_of(w, programs=PROGRAMS)
    nothing = Limits()
    assert status.clients == (
        ClientStatus(0, "the node's own program", 0, 1.0, 1, 0, {"CPU": 1.0}, nothing),
        ClientStatus(1, "train.py", 4711, 2.0, 1, 3, {"CPU": 1.0, "GPU": 0.5}, limits),
        ClientStatus(2, "", 0, 1.0, 0, 1, {}, nothing, has_left=True),
    )
    assert [shape.client for shape in status.shapes] == [2, 1]
    assert [task.client for task in status.waiting] == [2, 1, 1, 1]
    lines = str(status).splitlines()
    start = lines.index("programs")
    assert [" ".join(line.split()) for line in lines[start + 1 : start + 4]] == [
        "train.py pid 4711 1 run 3 wait weight 2 {CPU: 1, GPU: 0.5}",
        "the node's own program 1 run 0 wait {CPU: 1}",
        "program 2 0 run 1 wait has left",
    ]


def test_report_shows_that_the_node_is_being_stopped():
    w = World()
    status = replace(status_of(w), draining=12.0)
    told = "is being stopped: no new work; running tasks have 12 s to end"
    assert str(status).splitlines()[0] == told
    assert repr(status).startswith(f"<NodeStatus {told}; CPU ")


def test_why_names_programs_that_go_first():
    w = World(cpus=1).play("""
        join 1 2; submit own; submit a client=1; submit b client=2; submit own2
    """)
    for name, rivals in (("a", ()), ("own2", ("train.py (pid 4711)", "program 2"))):
        record = w.scheduler.tasks[w.tasks[name].id]
        told = why(w.scheduler, record, {}, w.now, PROGRAMS)
        assert (told.rivals, told.rival_count) == (rivals, len(rivals))
    assert str(told).splitlines()[1] == (
        "  tasks of other programs go before it: train.py (pid 4711), program 2"
    )
    assert (told.position, told.of) == (1, 1)


def test_expected_order_uses_task_durations():
    w = World(cpus=1).play("""
        join 1; join 2 weight=2; submit own; submit a0 a1 a2 a3 a4 a5 client=1
        submit b0 b1 b2 b3 b4 b5 client=2; submit urgent client=1 priority=1
    """)
    names = [record.spec.name for record in w.scheduler.ready.in_turn()]
    assert " ".join(names) == "urgent b0 b1 a0 b2 b3 a1 b4 b5 a2 a3 a4 a5"
    foreseen = [task.name for task in status_of(w).waiting]
    assert foreseen == names
    assert {r.spec.name for r in w.scheduler.ready} == set(names)
