"""Lanes from spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiogpu.cli.demo import Span, device_label, lanes


def span(task: int, begin: float, end: float, *gpus: int) -> Span:
    return Span(task, gpus or (0,), 100 + task, begin, end)


def test_what_overlaps_lies_in_lanes_of_its_own() -> None:
    first, second, third = span(1, 0, 2), span(2, 1, 3), span(3, 2, 4)
    assert lanes([third, first, second], 0) == [[first, third], [second]]


def test_other_devices_do_not_count() -> None:
    both, other = span(1, 0, 2, 0, 1), span(2, 0, 2, 1)
    assert lanes([both, other], 0) == [[both]]
    assert lanes([both, other], 1) == [[both], [other]]
    assert lanes([both, other], 7) == []


def test_an_end_comes_before_a_beginning_at_the_same_moment() -> None:
    assert len(lanes([span(1, 0, 1), span(2, 1, 2)], 0)) == 1


TIMES = st.tuples(st.integers(0, 20), st.integers(1, 5))


@given(st.lists(TIMES, max_size=30))
def test_there_are_no_more_lanes_than_needed(
    times: list[tuple[int, int]],
) -> None:
    spans = [span(n, begin, begin + long) for n, (begin, long) in enumerate(times)]
    found = lanes(spans, 0)
    at_once = [sum(s.begin <= t < s.end for s in spans) for t in range(26)]
    assert len(found) == max(at_once)
    assert sorted(s for lane in found for s in lane) == sorted(spans)


def test_labels_are_short() -> None:
    assert device_label(3) == "GPU 3"
    assert device_label("GPU-1234abcd-ffff-aaaa-bbbb-ccccccccdddd") == "GPU-1234abcd"
