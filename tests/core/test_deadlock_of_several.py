"""A wait for several tasks: each that could never end is told, not the last alone."""

from __future__ import annotations

from aiogpu.testing.world import World


def test_all_that_cannot_end_are_told() -> None:
    world = World(cpus=4, gpus=1)
    world.submit("parent", num_gpus=1)
    for name, gpus in (("a", 1), ("b", 0), ("c", 0.5)):
        world.submit(name, num_gpus=gpus, parent="parent")
    world.wait_for("parent", "a", "b", "c")
    told = {name: world.tasks[name].news for name in "abc"}
    assert told == {"a": "deadlocked", "b": None, "c": "deadlocked"}
    world.finish("b")
    world.finish("parent")
    assert world.tasks["parent"].news == "settled"
