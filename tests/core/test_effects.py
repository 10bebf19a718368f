"""The union of effects is closed, and `World` can carry out every one."""

from dataclasses import is_dataclass
from typing import get_args

from aiogpu.core import effects
from aiogpu.core.policy import Patience
from aiogpu.testing import World


def test_every_class_of_the_file_is_in_the_union():
    own = {
        value
        for value in vars(effects).values()
        if is_dataclass(value) and value.__module__ == effects.__name__
    }
    assert set(get_args(effects.Effect)) == own
    assert all("__slots__" in vars(effect) for effect in own)


def test_a_short_life_shows_every_effect():
    w = World(cpus=3, patience=Patience(cancel_grace=1.0))
    seen: list[effects.Effect] = []
    w.submit("settled")
    seen += w.effects
    w.finish("settled")
    seen += w.effects
    w.submit("lost", max_retries=0)
    w.die("lost")
    seen += w.effects
    w.submit("expired", timeout=1.0)
    w.advance(2.0)
    seen += w.effects
    w.submit("done")
    w.finish("done")
    w.submit("abandoned")
    w.submit("beside it")
    w.finish("beside it")
    w.close()
    seen += w.effects
    w.finish("abandoned")
    seen += w.effects
    assert {type(effect) for effect in seen} == set(get_args(effects.Effect))
    assert w.told == {
        "settled": "settled",
        "lost": "lost",
        "expired": "expired",
        "done": "settled",
        "abandoned": "abandoned",
        "beside it": "settled",
    }
