"""Specs are compared by what decides."""

from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT


def test_shapes_are_compared_by_value():
    one = Shape(Request.of({"CPU": UNIT}, {}), (("A", "1"),))
    same = Shape(Request.of({"CPU": UNIT}, {}), (("A", "1"),))
    other_environment = Shape(Request.of({"CPU": UNIT}, {}))
    other_request = Shape(Request.of({"CPU": 5_000}, {}), (("A", "1"),))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other_environment
    assert one != other_request
    assert one != "one"
    assert len({one, same, other_environment, other_request}) == 3


def test_a_spec_is_itself_alone():
    shape = Shape(Request())
    assert TaskSpec("f", shape) != TaskSpec("f", shape)
    assert TaskSpec("f", shape).max_retries == 3
    assert TaskSpec("f", shape).timeout is None
