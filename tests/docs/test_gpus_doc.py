"""`docs/gpus.md` shows what is printed, and its figures are the code's."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from aiogpu.accelerators.listed_devices import NONE
from aiogpu.accelerators.nvml.health import APPLICATION, xid_in_words
from aiogpu.accelerators.visible import Inventory, resolve
from aiogpu.core.model.request import Device
from aiogpu.observe.status import DeviceStatus, Holder, NodeStatus, OtherProcess, report
from aiogpu.runtime.devices.memory_guard import (
    LEFT,
    OVERHEAD,
    THIS_PROGRAM,
    Use,
    outgrowth_told,
)
from aiogpu.runtime.devices.monitor import CALM, EACH, SILENT, SOONEST
from tests.cli.test_gpus import on_stub
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import GIB, StubNvml, gpus

__all__ = ["nvml", "stub_library"]

PAGE = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
(COMMAND, STATUS, SICK, OUTGROWN) = [text for _, text in FENCE.findall(PAGE)]
NAME = "NVIDIA A100-SXM4-40GB"


def test_the_command_prints_what_the_page_shows(nvml: StubNvml) -> None:
    first, second = gpus(2)
    here = ((os.getpid(), GIB),)
    first = replace(first, used=3 * GIB, utilisation=37, processes=here)
    nvml.write([first, replace(second, action=1)], links=[(0, 1)])
    told = re.sub(r"\S+ pid \d+", "python pid N", on_stub(nvml).stdout)
    assert f"$ aiogpu gpus\n{told}" == COMMAND


def test_the_status_prints_what_the_page_shows() -> None:
    holders = (
        Holder(0.5, 1, 11, "train", 1.2, used=7 * GIB, memory=6 * GIB),
        Holder(0.25, 2, 12, "serve", 1.2, used=GIB, memory=10 * GIB),
    )
    device = DeviceStatus("GPU", 0, "A100", "u", NAME, 40 * GIB, 1.0, (), used=0)
    devices = (
        replace(
            device,
            free=0.25,
            holders=holders,
            memory_reserved=16 * GIB,
            used=10 * GIB,
            utilisation=87,
            others=(OtherProcess(13, "Xorg", 2 * GIB),),
        ),
        replace(device, id=1, utilisation=0),
    )
    status = NodeStatus({}, {}, devices, (), (), 0, (), 0, None)
    rows = re.sub(r"pid \d+", "pid N", report(status)).splitlines()[2:]
    assert rows == STATUS.splitlines()


def test_what_is_logged_stands_there_as_it_is() -> None:
    told = outgrowth_told("train", "GPU 0", Use(9 * GIB, 1), 6 * GIB, ["serve"])
    assert f"! {told} {LEFT}\n" == OUTGROWN
    reason = f"{xid_in_words(79)}; the driver asks for this: GPU reset"
    assert f"! GPU 0 gets no new tasks until it is well: {reason}\n" in SICK


@pytest.mark.parametrize(
    "words",
    [
        f"has not answered at all for {SILENT:g} seconds",
        f"It is back when for {CALM:g} seconds it has answered",
        f"by more than {OVERHEAD >> 30} GiB for each of them",
        f"({', '.join(map(str, sorted(APPLICATION)))})",
        f"is `{THIS_PROGRAM}`",
        f"or `{NONE[1]}`",
    ],
)
def test_its_figures_are_those_of_the_code(words: str) -> None:
    assert words in " ".join(PAGE.split())
    assert (EACH, round(1 / SOONEST)) == (1.0, 10)


def test_the_forms_of_the_variable_are_read_as_it_says() -> None:
    there = Inventory(tuple(Device(i, uuid=f"GPU-{i}f") for i in range(3)), 3)
    read = {text: [d.id for d in resolve(text, there)] for text in ("2,0", "1,-1,0")}
    assert read == {"2,0": [2, 0], "1,-1,0": [1]}
    assert [device.id for device in resolve("GPU-1", there)] == ["GPU-1f"]
    assert all(f"`{text}`" in PAGE for text in read)
