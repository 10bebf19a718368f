"""What is endless begins anew: at once, then later and later, and not for ever."""

from __future__ import annotations

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.testing import World

PATIENCE = SchedulerConfig(retry_after=1.0, retry_at_last=8.0, restarts_in_a_row=5)


def endless(max_retries: int = -1) -> World:
    world = World(cpus=1, config=PATIENCE)
    world.submit("actor", max_calls=1, max_retries=max_retries, is_endless=True)
    return world


def pause(world: World) -> float:
    """Seconds until it begins anew; it has died just now."""
    began = world.now
    while world.tasks["actor"].news is None:
        if any(worker.task for worker in world.workers.values()):
            return world.now - began
        world.advance(0.5)
    return -1.0


def die_and_wait(world: World, times: int, lived: float = 0.0) -> list[float]:
    pauses = []
    for _ in range(times):
        world.advance(lived)
        world.die("actor")
        pauses.append(pause(world))
    return pauses


def test_pauses_grow_and_then_it_is_given_up() -> None:
    world = endless()
    assert die_and_wait(world, 6) == [0, 1, 2, 4, 8, -1]
    assert world.tasks["actor"].news == "lost"
    assert not world.scheduler.restarts
    world.scheduler.check()


def test_one_that_has_lived_for_a_while_is_sound() -> None:
    world = endless()
    assert die_and_wait(world, 4) == [0, 1, 2, 4]
    assert die_and_wait(world, 8, lived=PATIENCE.sound_after) == [0] * 8
    assert die_and_wait(world, 3) == [1, 2, 4]


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_no_more_often_than_was_asked_for(max_retries: int) -> None:
    world = endless(max_retries)
    pauses = die_and_wait(world, max_retries + 1, lived=PATIENCE.sound_after)
    assert pauses == [0] * max_retries + [-1]


def test_one_that_ends_leaves_nothing() -> None:
    world = endless()
    die_and_wait(world, 2)
    world.cancel("actor")
    world.run_dry()
    assert not world.scheduler.restarts
    world.scheduler.check()
