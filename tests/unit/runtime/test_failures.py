"""The last failures that a node remembers."""

from aiogpu.observe.status import FailureStatus
from aiogpu.runtime.results import KEPT, LONGEST, Failures


def test_the_latest_comes_first_with_its_age():
    failures = Failures()
    failures.note(1.0, 7, "train", "ValueError", "no such key\nat all", 0)
    failures.note(3.0, 8, "load", "OSError", "", 5)
    assert failures.at(4.0) == (
        FailureStatus(8, "load", "OSError", "", 1.0, 5),
        FailureStatus(7, "train", "ValueError", "no such key", 3.0, 0),
    )
    assert repr(failures) == "<Failures 2>"


def test_the_oldest_are_forgotten_and_long_ones_cut():
    failures = Failures()
    for number in range(KEPT + 3):
        failures.note(float(number), number, "train", "ValueError", "x" * 999, 0)
    told = failures.at(0.0)
    assert [one.task for one in told] == list(range(KEPT + 2, 2, -1))
    assert {len(one.message) for one in told} == {LONGEST}
    assert {one.seconds for one in told} == {0.0}
