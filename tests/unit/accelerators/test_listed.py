"""Variables that list devices by their indices."""

from __future__ import annotations

import pytest

from aiogpu.accelerators.listed_devices import choose, entries, is_left_alone, joined
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError

THERE = tuple(Device(number, name="x") for number in range(3))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", ()),
        ("  ", ()),
        ("NoDevFiles", ()),
        ("-1", ()),
        ("0", (0,)),
        ("2, 0 ,1", (2, 0, 1)),
        ("1,-1,7", (1,)),
    ],
)
def test_entries_are_indices(text: str, ids: tuple[int, ...]) -> None:
    assert entries("V", text) == ids


@pytest.mark.parametrize(
    "text", ["0,x", "x", "0,", "1.5", "-2", "1" * 10, "²", "GPU-1"]
)
def test_an_ill_formed_entry_is_named(text: str) -> None:
    entry = text.split(",")[-1]
    with pytest.raises(DeviceError, match=r"V=.*names no device. Correct") as caught:
        entries("V", text)
    assert f"V={text!r}: {entry!r} names no device" in str(caught.value)


def test_a_device_is_named_once() -> None:
    with pytest.raises(
        DeviceError, match="'01' names the device 1 for the second time"
    ):
        entries("V", "1,01")


@pytest.mark.parametrize(
    ("wanted", "text", "ids"),
    [
        (None, None, [0, 1, 2]),
        (2, None, [0, 1]),
        (5, None, [0, 1, 2, 3, 4]),
        (None, "2,0", [2, 0]),
        (1, "2,0", [2]),
        (None, "", []),
    ],
)
def test_what_a_node_may_share_out(
    wanted: int | None, text: str | None, ids: list[int]
) -> None:
    listed = None if text is None else ("V", text, entries("V", text))
    chosen = choose("num", wanted, THERE, listed)
    assert [device.id for device in chosen] == ids
    assert all(device in THERE or int(device.id) > 2 for device in chosen)


def test_a_list_without_devices_is_believed_only_by_who_gives_a_number() -> None:
    listed = ("V", "4,5", (4, 5))
    assert choose("num", None, (), listed) == ()
    assert choose("num", 2, (), listed) == (Device(4), Device(5))


def test_more_than_the_variable_names() -> None:
    with pytest.raises(
        DeviceError, match=r"num=3, but V='0,1' names 2 devices; ask for at most"
    ):
        choose("num", 3, THERE, ("V", "0,1", (0, 1)))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(
        DeviceError, match=r"there is no device '7'.*has 0, 1, 2\. Name"
    ):
        choose("num", None, THERE, ("V", "0,7", (0, 7)))


def test_the_switch_that_leaves_a_variable_alone() -> None:
    assert is_left_alone("V", {"AIOGPU_NOSET_V": " Yes "})
    assert not is_left_alone("V", {"AIOGPU_NOSET_V": "0"})
    assert not is_left_alone("V", {"AIOGPU_NOSET_W": "1"})


def test_ids_are_joined() -> None:
    assert joined((0, "1.2")) == "0,1.2"
