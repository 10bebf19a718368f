"""On small boxes the choice is the one that a look at every single set would make."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import DeviceSet
from tests.support.sampling import examples


@st.composite
def boxes(draw):
    """Some devices, their links, and which of them are taken."""
    count = draw(st.integers(2, 8))
    pairs = list(combinations(range(count), 2))
    linked = set(draw(st.lists(st.sampled_from(pairs), unique=True)))
    taken = draw(st.sets(st.integers(0, count - 1), max_size=count - 2))
    return count, linked, taken


def joined(chosen, linked) -> int:
    """How many pairs of them are linked."""
    return sum(pair in linked for pair in combinations(sorted(chosen), 2))


@settings(max_examples=examples(200), derandomize=True, database=None, deadline=None)
@given(boxes(), st.integers(2, 8))
def test_the_best_joined_set_is_chosen(box, wanted):
    count, linked, taken = box
    devices = DeviceSet(
        "GPU",
        [
            Device(
                index,
                uuid=f"GPU-{index}",
                links=frozenset(f"GPU-{b}" for a, b in linked if a == index),
            )
            for index in range(count)
        ],
    )
    devices.take([(index, UNIT) for index in taken])
    shares = devices.choose(wanted * UNIT, Request.of({}, {"GPU": wanted * UNIT}))
    free = [index for index in range(count) if index not in taken]
    best = min(
        combinations(free, wanted),
        key=lambda chosen: (-joined(chosen, linked), chosen),
        default=None,
    )
    assert shares == (best and tuple((index, UNIT) for index in best))
