"""A child that was sent ahead behind a task that comes to wait."""

from __future__ import annotations

from aiogpu.testing.world import World


def test_a_wait_for_what_is_taken_back_into_a_deadlock() -> None:
    """Both wait before it is known that the child has not begun."""
    world = World(cpus=8, gpus=1, resources={"license": 1}, took=1e-5, revokes=False)
    for number in range(30):
        world.submit(f"short{number}", num_gpus=1)
    for number in range(30):
        world.finish(f"short{number}")
    world.submit("one", resources={"license": 1})
    world.submit("first", num_gpus=1)
    world.submit("two", num_gpus=1, priority=4)
    world.submit("child of one", num_gpus=1, parent="one")
    for number in range(20):
        world.submit(f"behind{number}", num_gpus=1, priority=-5)
    world.wait_for("one", "child of one")
    world.finish("first")
    child = world.scheduler.tasks[world.tasks["child of one"].id]
    assert child.state.value == "queued"
    world.submit("child of two", resources={"license": 1}, parent="two")
    world.wait_for("two", "child of two")
    world.revoked("two")
    told = [world.tasks[f"child of {name}"].news for name in ("one", "two")]
    assert told == [None, "deadlocked"]
    assert "one holds" in world.tasks["child of two"].reason
    world.finish("two")
    assert child.state.value == "running"
