"""Ascend's answers, with the kernel's files in a directory of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.accelerators import HUAWEI_NPU_910B
from aiogpu.accelerators.ascend import Ascend
from aiogpu.accelerators.base import Accelerator
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError


@pytest.fixture
def box(tmp_path: Path) -> Ascend:
    (tmp_path / "dev").mkdir()
    for name in ("davinci1", "davinci0", "davinci10", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    return Ascend(str(tmp_path))


def test_it_gives_the_answers() -> None:
    vendor: Accelerator = Ascend()
    assert (vendor.kind, vendor.option) == ("NPU", "resources['NPU']")
    assert vendor.variable == "ASCEND_RT_VISIBLE_DEVICES"
    assert vendor.quantity(0.5) == 5000
    with pytest.raises(OptionError, match=r"\['NPU'\]=1\.5 mixes"):
        vendor.quantity(1.5)
    assert vendor.type_of(HUAWEI_NPU_910B) == "Ascend910B"
    assert vendor.type_of("") is None
    assert repr(vendor) == "<Ascend NPU>"
    assert not vendor.watch().knows(Device(0))


def test_chips_are_files(box: Ascend) -> None:
    assert [device.id for device in box.devices({}, None)] == [0, 1, 10]
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "10,0"}
    assert [device.id for device in box.devices(visible, None)] == [10, 0]
    with pytest.raises(DeviceError, match="there is no device '2'"):
        box.devices({"ASCEND_RT_VISIBLE_DEVICES": "2"}, None)


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    ascend = Ascend(str(tmp_path))
    assert ascend.devices({}, None) == ascend.devices({}, 0) == ()
    assert ascend.devices({}, 2) == (Device(0), Device(1))


def test_they_are_assigned_by_their_variable() -> None:
    assert Ascend().assignment((0, 3), {}) == {"ASCEND_RT_VISIBLE_DEVICES": "0,3"}
    assert Ascend().assignment((), {}) == {"ASCEND_RT_VISIBLE_DEVICES": ""}
    switch = {"AIOGPU_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert Ascend().assignment((0,), switch) == {}
