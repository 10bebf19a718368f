"""The union of effects is closed, and `World` can carry out every one."""

from dataclasses import is_dataclass
from typing import get_args

from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from tests.core.placement_group_world import GangWorld

TOLD = ("settled", "lost", "expired", "deadlocked", "disowned")


def test_every_class_of_the_file_is_in_the_union():
    own = {
        value
        for value in vars(effects).values()
        if is_dataclass(value)
        and value.__module__ == effects.__name__
        and not value.__name__.startswith("About")
    }
    assert set(get_args(effects.Effect)) == own
    assert all("__slots__" in vars(effect) for effect in own)


def test_a_short_life_shows_every_effect():
    w = Diary(cpus=2, gpus=1, config=SchedulerConfig(cancel_grace=1.0))
    w.submit("settled")
    w.finish("settled")
    w.submit("lost", max_retries=0)
    w.die("lost")
    w.submit("expired", timeout=1.0)
    w.advance(2.0)
    w.submit("parent", num_gpus=1)
    w.submit("deadlocked", num_gpus=1, parent="parent")
    w.wait_for("parent", "deadlocked")
    w.submit("disowned", parent="parent")
    w.finish("parent")
    w.finish("disowned")
    w.lease("reclaimed", num_gpus=1)
    w.submit("warned", num_gpus=1)
    w.advance(5.0)
    w.cancel("warned")
    w.cancel("reclaimed")
    w.give_back("reclaimed")
    w.placement_group("gang", {"GPU": 0.5})
    w.submit_in("gang", "evicted")
    w.submit_in("gang", "misfit", num_gpus=0.6)
    w.cancel("gang")
    w.finish("evicted")
    w.took = 1e-5
    for number in range(8):
        w.submit(f"abandoned {number}")
    w.finish("abandoned 0")
    assert w.queued
    w.close()
    w.run_dry()
    assert {type(effect) for effect in w.seen} == set(get_args(effects.Effect))
    for name in (*TOLD, "evicted", "misfit"):
        assert w.told[name] == name
    assert [w.told[f"abandoned {n}"] for n in range(1, 8)] == ["abandoned"] * 7


class Diary(GangWorld):
    """Notes every effect, whatever led to it."""

    def __init__(self, *arguments, **options):
        self.seen = []
        super().__init__(*arguments, **options)

    def _apply(self, effect):
        self.seen.append(effect)
        super()._apply(effect)
