"""Gaudi's answers, with the kernel's files in a directory of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.accelerators import INTEL_GAUDI
from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.gaudi import Gaudi
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError


def card(root: Path, name: str, pci: str, device: str, **facts: str) -> None:
    place = root / "sys/devices/pci" / pci
    place.mkdir(parents=True)
    for fact, text in {"vendor": "0x1da3", "device": device, **facts}.items():
        (place / fact).write_text(f"{text}\n")
    entry = root / "sys/class" / name
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(place)


def test_it_gives_the_answers() -> None:
    vendor: Accelerator = Gaudi()
    assert (vendor.kind, vendor.option) == ("HPU", "resources['HPU']")
    assert vendor.variable == "HABANA_VISIBLE_MODULES"
    assert vendor.quantity(2) == 20_000
    with pytest.raises(OptionError, match=r"\['HPU'\]=0\.5: a Gaudi cannot be shared"):
        vendor.quantity(0.5)
    assert vendor.type_of("0x1000") == INTEL_GAUDI
    assert vendor.type_of(None) is None
    assert repr(vendor) == "<Gaudi HPU>"
    assert not vendor.watch().knows(Device(0))


def test_modules_are_what_is_counted(tmp_path: Path) -> None:
    card(tmp_path, "accel/accel0", "0000:33:00.0", "0x1020", module_id="3")
    card(tmp_path, "accel/accel1", "0000:19:00.0", "0x1020", module_id="0")
    card(tmp_path, "accel/accel2", "0000:20:00.0", "0x1", vendor="0x8086")
    assert Gaudi(str(tmp_path)).devices({}, None) == (
        Device(0, type="Intel-GAUDI2", pci="0000:19:00.0"),
        Device(3, type="Intel-GAUDI2", pci="0000:33:00.0"),
    )


def test_older_kernels_have_another_class(tmp_path: Path) -> None:
    card(tmp_path, "habanalabs/hl0", "0000:33:00.0", "0x1000")
    card(tmp_path, "habanalabs/hl1", "0000:34:00.0", "0x9999")
    gaudi = Gaudi(str(tmp_path))
    assert gaudi.devices({"HABANA_VISIBLE_MODULES": "1,0"}, None) == (
        Device(1, pci="0000:34:00.0"),
        Device(0, type=INTEL_GAUDI, pci="0000:33:00.0"),
    )
    with pytest.raises(DeviceError, match="there is no device '4'"):
        gaudi.devices({"HABANA_VISIBLE_MODULES": "4"}, None)


def test_a_machine_without_has_none(tmp_path: Path) -> None:
    gaudi = Gaudi(str(tmp_path))
    assert gaudi.devices({}, None) == gaudi.devices({}, 0) == ()
    assert gaudi.devices({}, 2) == (Device(0), Device(1))


def test_they_are_assigned_by_their_variable() -> None:
    assert Gaudi().assignment((0, 3), {}) == {"HABANA_VISIBLE_MODULES": "0,3"}
    assert Gaudi().assignment((), {}) == {"HABANA_VISIBLE_MODULES": ""}
    switch = {"AIOGPU_NOSET_HABANA_VISIBLE_MODULES": "1"}
    assert Gaudi().assignment((0,), switch) == {}
