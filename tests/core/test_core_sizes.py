"""Amounts of memory, as people write and read them."""

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import LARGEST, LEAST, memory_size, parse_size, size
from aiogpu.errors import OptionError


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (0, 0),
        (12, 12),
        (LARGEST, LARGEST),
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("0.5KiB", 512),
        ("500MB", 500_000_000),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        (" 7 B ", 7),
    ],
)
def test_what_is_a_size(given, count):
    assert parse_size("memory", given) == count


@pytest.mark.parametrize(
    "given",
    [-1, 1.5, True, None, LARGEST + 1, "6", "", "GiB", "6GiBB", "-1GB", "nanGB"],
)
def test_what_is_none(given):
    with pytest.raises(OptionError) as caught:
        parse_size("memory", given)
    assert f"memory={given!r}" in str(caught.value)
    assert '"6GiB"' in str(caught.value)


@pytest.mark.parametrize("given", ["infGB", "1e99GB"])
def test_more_than_there_can_be(given):
    with pytest.raises(OptionError):
        parse_size("memory", given)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0MiB"),
        (1, "1MiB"),
        (1 << 20, "1MiB"),
        ((1 << 20) + 1, "2MiB"),
        (6 << 30, "6GiB"),
        ((3 << 30) + (1 << 28), "3.3GiB"),
    ],
)
def test_how_a_size_is_told(count, text):
    assert size(count) == text
    assert parse_size("memory", text) >= count


def test_a_request_tells_its_memory():
    request = Request.of({"CPU": 10_000, "memory": (6 << 30) * 10_000}, {})
    assert str(request) == "{CPU: 1, memory: 6GiB}"


@pytest.mark.parametrize("given", [0, "0B", LEAST, "1MiB", "2GiB", LARGEST])
def test_what_a_program_may_have(given):
    assert memory_size("memory", given) == parse_size("memory", given)


@pytest.mark.parametrize(
    ("given", "read", "meant"),
    [
        (1, "1 byte,", "1GiB"),
        (2, "2 bytes,", "2GiB"),
        (8000, "8000 bytes,", "8000MiB"),
        (LEAST - 1, f"{LEAST - 1} bytes,", "65536MiB"),
    ],
)
def test_so_little_that_its_unit_was_forgotten(given, read, meant):
    with pytest.raises(OptionError) as caught:
        memory_size("gpu_memory", given)
    said = str(caught.value)
    assert said.startswith(f"gpu_memory={given!r} is read as {read}")
    assert said.endswith(f'such as gpu_memory="{meant}".')
    assert memory_size("gpu_memory", meant)


@pytest.mark.parametrize(
    ("given", "read"), [("80B", "80 bytes"), ("500KB", "500000 bytes")]
)
def test_so_little_that_its_unit_is_the_wrong_one(given, read):
    with pytest.raises(OptionError) as caught:
        memory_size("gpu_memory", given)
    assert str(caught.value) == (
        f"gpu_memory={given!r} is read as {read}, in which nothing runs; give 1MiB at "
        f"least."
    )


def test_what_is_no_size_is_no_size_of_a_program():
    with pytest.raises(OptionError, match="is not an amount of memory"):
        memory_size("memory", -1)
