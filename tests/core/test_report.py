"""A node's status as people read it."""

from dataclasses import replace

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot
from aiogpu.observe.status import (
    ActorStatus,
    FailureStatus,
    TaskStatus,
    held_tasks,
    state_of,
)
from aiogpu.testing import World


def table(w: World) -> list[str]:
    """The lines of `print(status)`; worker 1 has process 101, and so on."""
    started = [id_ for id_, worker in w.workers.items() if worker.has_started]
    pids = {id_: 100 + id_ for id_ in started}
    return str(snapshot(w.scheduler, pids, w.now)).splitlines()


def go_past(w: World, name: str) -> None:
    """Let a task come and go, so that all who wait are looked at."""
    w.submit(name, num_cpus=0)
    w.finish(name)


def test_an_idle_node():
    assert table(World(cpus=2)) == [
        "CPU      2 of 2 free",
        "GPU      0 of 0 free",
        "workers  none",
        "tasks    no tasks",
    ]


def test_a_busy_node():
    w = World(cpus=5, gpu_types=["A100", "A100"], exits=False)
    w.submit("model", num_gpus=0.5, is_endless=True)
    w.submit("ended", num_gpus=0.25, max_calls=1)
    w.submit("train", num_cpus=2)
    w.finish("ended")
    w.advance(2)
    w.starts = False
    w.submit("load", num_gpus=0.25)
    w.submit("whole", num_gpus=2, environment={"B": "1", "A": "2"})
    w.submit("half", num_gpus=0.5, strategy="spread")
    w.submit("half2", num_gpus=0.5, strategy="spread")
    w.advance(0.5)
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


def test_what_is_kept_comes_last():
    w = World(cpus=4, gpus=1)
    w.submit("long", num_gpus=1, timeout=20)
    w.submit("big", num_gpus=1)
    go_past(w, "before")
    w.advance(1)
    go_past(w, "after")
    w.advance(3)
    assert table(w)[-3:] == [
        "  1 x {CPU: 1, GPU: 1}: big first, the oldest for 4.0 s",
        "    waits for GPU 1 (free by device: 0: 0)",
        "kept for big (task 1): GPU 0, for 18 s at most",
    ]
    w = World(cpus=4, gpus=1)
    w.submit("long", num_gpus=1)
    w.submit("big", num_gpus=1)
    go_past(w, "before")
    w.advance(1)
    go_past(w, "after")
    assert table(w)[-1] == "kept for big (task 1): GPU 0"


def test_of_many_the_first_are_shown():
    w = World(cpus=1, gpus=1)
    for number in range(10):
        w.submit(f"t{number}", num_cpus=0.01, num_gpus=0.1)
    for number in range(10):
        w.submit(f"w{number}", environment={"N": str(number)})
    lines = table(w)
    assert lines[4] == "GPU 0  0 free"
    assert [line for line in lines if "more" in line] == ["  and 2 more"] * 3


def test_a_device_is_told_with_its_name_and_its_memory():
    devices = [
        Device(0, "A100", "GPU-1", "NVIDIA A100-SXM4-80GB", 85_899_345_920),
        Device("MIG-2", None, None, None, 512 * 2**20),
        Device(2, "T4", None, None, 1000),
    ]
    scheduler = Scheduler(Ledger({"CPU": UNIT}, [DeviceSet("GPU", devices)]))
    assert str(snapshot(scheduler, {}, 0.0)).splitlines()[-3:] == [
        "GPU 0      1 free  NVIDIA A100-SXM4-80GB  80 GiB",
        "GPU MIG-2  1 free                         512 MiB",
        "GPU 2      1 free  T4",
    ]


def test_actors_and_failures_come_last():
    status = snapshot(World(cpus=2).scheduler, {}, 0.0)
    actors = (
        ActorStatus(4, "serve", "", "Model", "alive", 2, 1, 101, 3, True),
        ActorStatus(9, None, "", "Cache", "pending", 1, None, 0, 0, False),
    )
    failures = (
        FailureStatus(5, "train", "ValueError", "no such key", 1.0),
        FailureStatus(6, "load", "MemoryError", "", 70.0),
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


def test_what_is_held_are_tasks_on_workers_and_leases():
    asks = {"GPU": 1.0}
    tasks = (
        TaskStatus(1, "train", "running", asks, 7, None, pid=107),
        TaskStatus(2, "train.py", "running", asks, None, None, 0, True, 200),
        TaskStatus(3, "ends.py", "stopping", asks, None, "is given back", 0, True, 200),
        TaskStatus(4, "waits.py", "waiting", asks, None, "waits for GPU 1", 0, True),
        TaskStatus(5, "waits", "delayed", asks, None, "has failed before"),
    )
    status = replace(snapshot(World(cpus=2).scheduler, {}, 0.0), tasks=tasks)
    told = [(task.id, state_of(task)) for task in held_tasks(status)]
    assert told == [(1, "running"), (2, "leased"), (3, "stopping")]


def test_what_was_sent_to_a_cluster_is_listed():
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
