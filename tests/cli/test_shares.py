"""`aiogpu gpus` while a node runs: who holds what of each device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.doctor import NodeDevices, as_data, ask_node, lines
from aiogpu.core.model.request import Device
from aiogpu.engines.device_report import DetectedDevice, DeviceReport
from tests.cli.pictures import BUSY, GIB, stand_in

SHARES = NodeDevices(BUSY.devices)
BOX = DeviceReport(
    tuple(
        DetectedDevice("GPU", Device(n, "A100", f"GPU-{n}", "NVIDIA A100", 40 * GIB))
        for n in range(4)
    ),
    (),
)


def test_lines_say_who_holds_what() -> None:
    told = [line.split(None, 1)[1] for line in lines(BOX, SHARES) if " held " in line]
    assert told == [
        "0.5 Model 'serve', 0.25 train; 0.25 free",
        "1 whole; 0 free",
        "set aside: XID 79 (the GPU has fallen off the bus)",
    ]


def test_json_has_them_where_a_node_has_the_device() -> None:
    first, *_, last = as_data(BOX, SHARES)["devices"]
    assert (first["free"], first["aside"]) == (0.25, None)
    assert [one["task"] for one in first["holders"]] == ["Model 'serve'", "train"]
    assert "holders" not in last
    assert as_data(BOX) == as_data(BOX, NodeDevices())


def test_devices_are_told_apart_by_uuid_where_that_is_known() -> None:
    other = Device(0, uuid="GPU-1")
    assert SHARES.of("GPU", other) is BUSY.devices[1]
    assert SHARES.of("GPU", replace(other, uuid=None)) is BUSY.devices[0]
    assert SHARES.of("neuron_cores", other) is None
    assert NodeDevices((replace(BUSY.devices[0], holders=(), free=1.0),)).told(
        "GPU", Device(0)
    ) == ("1 free")


async def test_without_a_node_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    assert await ask_node() == NodeDevices()


async def test_a_node_is_asked_or_it_is_said_why_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "check_there", lambda _: None)
    stand_in(monkeypatch, BUSY)
    assert await ask_node() == SHARES

    def fail(_address: str, _patience: float) -> object:
        raise aiogpu.NodeDiedError("the node has ended. Start it anew.")

    monkeypatch.setattr(connect, "joined", fail)
    told = (await ask_node()).note
    assert told == "Who holds what is not known: the node has ended."
