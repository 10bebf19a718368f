"""Quantities are exact integers, and what is no quantity is refused in words."""

import re
from enum import IntEnum
from functools import reduce
from operator import add

import numpy
import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import MOST_PARTS, UNIT, device_quantity, number, quantity
from aiogpu.errors import OptionError


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (0, 0),
        (-0.0, 0),
        (1, 10_000),
        (0.5, 5_000),
        (0.57, 5_700),
        (0.29, 2_900),
        (1 / 3, 3_333),
        (2 / 3, 6_666),
        (0.1, 1_000),
        (0.1 + 0.2, 3_000),
        (0.0001, 1),
        (0.00019, 1),
        (0.99999, 9_999),
        (128.5, 1_285_000),
        (MOST_PARTS, MOST_PARTS * UNIT),
    ],
)
def test_a_number_becomes_parts_by_its_decimal_text(value, parts):
    assert quantity("num_gpus", value) == parts


def test_float_arithmetic_would_have_lost_a_part():
    assert int(0.57 * UNIT) == 5_699
    assert quantity("num_gpus", 0.57) == 5_700


def test_a_thousand_times_a_tenth_does_not_drift():
    assert sum(quantity("num_gpus", 0.1) for _ in range(1000)) == 100 * UNIT
    assert reduce(add, [0.1] * 1000) != 100  # from 3.12 on, `sum` compensates


def test_three_thirds_and_ten_tenths_fit_into_one():
    assert 3 * quantity("num_gpus", 1 / 3) <= UNIT
    assert 10 * quantity("num_gpus", 0.1) == UNIT


def test_numbers_that_write_themselves_in_words_are_taken_by_value():
    class Cards(IntEnum):
        TWO = 2

    assert quantity("num_gpus", numpy.float64(0.57)) == 5_700
    assert quantity("num_gpus", Cards.TWO) == 20_000


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "num_gpus=True is a bool; give an int or a float"),
        ("1", "num_gpus='1' is a str; give an int or a float"),
        (None, "num_gpus=None is a NoneType"),
        ([1], "num_gpus=[1] is a list"),
        (1j, "num_gpus=1j is a complex"),
        (float("nan"), "num_gpus=nan is not a quantity; give a finite number"),
        (float("inf"), "num_gpus=inf is not a quantity"),
        (float("-inf"), "num_gpus=-inf is not a quantity"),
        (-1, "num_gpus=-1 is not a quantity"),
        (-0.5, "num_gpus=-0.5 is not a quantity"),
        (10**15, "from 0 to 1e+14"),
        pytest.param(10**400, "is not a quantity", id="beyond floats"),
        (0.00001, "num_gpus=1e-05 is finer than 1/10000"),
        (5e-324, "num_gpus=5e-324 is finer than 1/10000"),
    ],
)
def test_what_is_no_quantity_is_refused_by_name(value, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        quantity("num_gpus", value)


def test_the_article_fits_the_type():
    class Apple:
        pass

    class ounce:
        pass

    with pytest.raises(OptionError, match="is a Apple"):
        quantity("num_cpus", Apple())
    with pytest.raises(OptionError, match="is an ounce"):
        quantity("num_cpus", ounce())


@pytest.mark.parametrize("value", [1.5, 2.0001, 3.9999])
def test_more_than_one_device_must_be_whole(value):
    with pytest.raises(OptionError, match="mixes whole devices and a share"):
        device_quantity("num_gpus", value)


@pytest.mark.parametrize("value", [0, 0.0001, 0.5, 1, 1.0, 2, 8.0])
def test_shares_of_one_device_and_whole_devices_are_fine(value):
    assert number(device_quantity("num_gpus", value)) == value


def test_a_request_keeps_no_zeros_and_no_order():
    one = Request.of({"b": UNIT, "CPU": 0, "a": 5_000}, {"GPU": 2_500})
    assert one == Request((("a", 5_000), ("b", UNIT)), (("GPU", 2_500),))
    assert str(one) == "{a: 0.5, b: 1, GPU: 0.25}"
    assert one.as_numbers() == {"a": 0.5, "b": 1.0, "GPU": 0.25}
    assert str(Request.of({}, {})) == "{}"


def test_requests_are_compared_by_value():
    half = Request.of({"CPU": UNIT}, {"GPU": 5_000})
    same = Request.of({"CPU": UNIT}, {"GPU": 5_000})
    typed = Request.of({"CPU": UNIT}, {"GPU": 5_000}, "A100")
    assert half == same
    assert hash(half) == hash(same)
    spread = Request.of({"CPU": UNIT}, {"GPU": 5_000}, spread=True)
    assert half != typed
    assert half != spread
    assert half != "half"
    assert len({half, same, typed, spread}) == 3


def test_a_type_takes_a_thousandth_of_its_own_resource():
    typed = Request.of({"CPU": UNIT}, {"GPU": UNIT}, "A100")
    assert typed.as_numbers() == {"CPU": 1, "accelerator_type:A100": 0.001, "GPU": 1}
