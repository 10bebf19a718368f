"""How many tasks may be queued behind one: a moment's work, and no guess."""

import pytest

from aiogpu.core.model.request import DEEPEST, HORIZON, DurationEstimate


def pace(*durations: float) -> DurationEstimate:
    """What is known after these, in seconds."""
    made = DurationEstimate()
    for took in durations:
        made.note(took)
    return made


def test_nothing_is_queued_behind_what_nobody_knows():
    assert DurationEstimate().depth == 0


@pytest.mark.parametrize(
    ("took", "depth"),
    [
        (0.0, DEEPEST),
        (1e-6, DEEPEST),
        (HORIZON / DEEPEST, DEEPEST),
        (1e-4, 20),
        (1e-3, 2),
        (HORIZON, 1),
        (2.1e-3, 0),
        (60.0, 0),
    ],
)
def test_as_many_are_queued_as_a_moment_has_room_for(took, depth):
    assert pace(took).depth == depth


def test_one_that_takes_longer_than_the_rest_counts_a_little():
    """Its worker may have been put aside by the system."""
    made = pace(*[1e-5] * 50)
    assert made.depth == DEEPEST
    made.note(1.0)
    assert 40 < made.depth < DEEPEST


def test_several_that_take_longer_count_in_full():
    made = pace(*[1e-5] * 50, *[1.0] * 8)
    assert made.depth == 0


def test_the_mean_follows_what_happens_now():
    made = pace(1.0, *[1e-5] * 60)
    assert made.depth == DEEPEST
    assert made.mean == pytest.approx(1e-5, rel=0.1)


def test_while_one_takes_long_nothing_is_queued():
    made = pace(1e-5)
    made.note_long()
    assert made.depth == 0
    assert made.mean == HORIZON
    made.note(1e-5)
    assert made.depth == 1


def test_one_more_that_is_long_does_not_make_the_mean_shorter():
    made = pace(3.0)
    made.note_long()
    assert made.mean == 3.0
