"""What resides needs a CPU to be placed, and none from then on."""

from __future__ import annotations

from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


def free_cpus(world: World) -> float:
    return world.scheduler.ledger.available()["CPU"]


def placed(world: World) -> set[str]:
    """Who has a worker."""
    return {worker.task.spec.name for worker in world.workers.values() if worker.task}


def resident(world: World, name: str = "actor", num_gpus: float = 0.0) -> None:
    world.submit(name, num_gpus=num_gpus, max_calls=1, max_retries=1, is_endless=True)
    world.tell(Scheduler.release_cpus, world.tasks[name].id)
    world.scheduler.check()


def test_its_cpu_is_another_ones_at_once() -> None:
    world = World(cpus=1, gpus=1)
    resident(world, num_gpus=0.5)
    assert world.scheduler.ledger.available() == {"CPU": 1.0, "GPU": 0.5}
    resident(world, "second", num_gpus=0.5)
    world.submit("task")
    assert world.scheduler.ledger.available() == {"CPU": 0.0, "GPU": 0.0}
    held = {
        task.name: task.request
        for task in snapshot(world.scheduler, {}, world.now).tasks
    }
    assert held["actor"] == {"GPU": 0.5}
    assert held["task"] == {"CPU": 1.0}


def test_one_that_waits_is_placed_with_it() -> None:
    world = World(cpus=1)
    world.submit("first", max_calls=1, is_endless=True)
    world.submit("second")
    assert not any(
        w.task and w.task.spec.name == "second" for w in world.workers.values()
    )
    world.tell(Scheduler.release_cpus, world.tasks["first"].id)
    assert any(w.task and w.task.spec.name == "second" for w in world.workers.values())
    world.scheduler.check()


def test_its_end_gives_back_no_more_than_it_had() -> None:
    for end in ("finish", "die", "cancel"):
        world = World(cpus=2)
        resident(world)
        if end == "finish":
            world.finish("actor")
        elif end == "die":
            world.die("actor")
            assert free_cpus(world) == 1.0, "it begins anew"
            world.tell(Scheduler.release_cpus, world.tasks["actor"].id)
            world.die("actor")
        else:
            world.cancel("actor")
        world.run_dry()
        world.scheduler.check()
        assert free_cpus(world) == 2.0


def test_twice_is_once_and_nobody_is_nobody() -> None:
    world = World(cpus=2)
    resident(world)
    world.tell(Scheduler.release_cpus, world.tasks["actor"].id)
    world.tell(Scheduler.release_cpus, 99)  # type: ignore[arg-type]
    assert free_cpus(world) == 2.0
    world.scheduler.check()


def test_who_waits_for_an_actor_lends_its_cpu() -> None:
    world = World(cpus=1)
    world.submit("task")
    task = world.tasks["task"].id
    world.tell(Scheduler.wait_for, task, (), elsewhere=True)
    record = world.scheduler.tasks[task]
    assert record.state is TaskState.BLOCKED
    assert free_cpus(world) == 1.0
    assert "waits for an actor" in str(why(world.scheduler, record, {}, world.now))
    assert "an actor" in str(snapshot(world.scheduler, {}, world.now))
    world.scheduler.check()
    world.tell(Scheduler.wait_for, task, ())
    assert free_cpus(world) == 0.0
    world.finish("task")
    world.run_dry()
    world.scheduler.check()


def test_at_the_nodes_end_it_has_the_nodes_grace() -> None:
    world = World(cpus=1)
    world.submit("actor", max_calls=1, is_endless=True, cancel_grace=0.0)
    world.close()
    assert world.killed == []
    world.advance(world.scheduler.config.cancel_grace - 0.1)
    assert world.killed == []
    world.advance(0.2)
    assert len(world.killed) == 1


def test_who_ends_it_alone_gives_it_none() -> None:
    world = World(cpus=1)
    world.submit("actor", max_calls=1, is_endless=True, cancel_grace=0.0)
    world.cancel("actor")
    world.advance(0.01)
    assert len(world.killed) == 1
