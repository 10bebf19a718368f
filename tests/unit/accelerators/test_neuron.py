"""[B35] AWS Neuron's answers, with a `neuron-ls` that is a script."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from aiogpu.accelerators import AWS_NEURON_CORE
from aiogpu.accelerators import neuron as neuron_file
from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.neuron import Neuron
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError, OptionError

GIB = 1 << 30
CHIPS = [
    {
        "neuron_device": number,
        "bdf": f"00:1{number}.0",
        "connected_to": None,
        "nc_count": 2,
        "memory_size": 32 * GIB,
        "neuron_processes": [],
    }
    for number in range(2)
]


def tool(folder: Path, script: str) -> dict[str, str]:
    """A `neuron-ls` in a folder, and the environment in which it is found."""
    path = folder / "neuron-ls"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"/nowhere:{folder}"}


def listing(folder: Path, chips: object = CHIPS) -> dict[str, str]:
    text = chips if isinstance(chips, str) else json.dumps(chips)
    script = f'[ "$*" = --json-output ] || exit 9\ncat <<"END"\n{text}\nEND'
    return tool(folder, script)


@pytest.fixture
def neuron(tmp_path: Path) -> Neuron:
    return Neuron(str(tmp_path / "none"))


def test_it_gives_the_answers(neuron: Neuron) -> None:
    vendor: Accelerator = neuron
    assert vendor.kind == "neuron_cores"
    assert vendor.option == "resources['neuron_cores']"
    assert vendor.variable == "NEURON_RT_VISIBLE_CORES"
    assert vendor.type_of(None) == AWS_NEURON_CORE
    assert repr(vendor) == "<Neuron neuron_cores>"
    assert not vendor.watch().knows(Device(0))


@pytest.mark.parametrize(("value", "parts"), [(0, 0), (1, 10_000), (2.0, 20_000)])
def test_cores_are_asked_for_whole(neuron: Neuron, value: float, parts: int) -> None:
    assert neuron.quantity(value) == parts


@pytest.mark.parametrize("value", [0.5, 1.5, 2.00001])
def test_a_core_cannot_be_shared(neuron: Neuron, value: float) -> None:
    with pytest.raises(OptionError, match=rf"\['neuron_cores'\]={value}: a NeuronCore"):
        neuron.quantity(value)


@pytest.mark.parametrize("value", [-1, "2", True, None])
def test_what_is_no_quantity_at_all(neuron: Neuron, value: object) -> None:
    with pytest.raises(OptionError):
        neuron.quantity(value)


def test_cores_are_assigned_by_their_variable(neuron: Neuron) -> None:
    assert neuron.assignment((2, 3), {}) == {"NEURON_RT_VISIBLE_CORES": "2,3"}
    assert neuron.assignment((), {}) == {"NEURON_RT_VISIBLE_CORES": ""}
    switch = {"AIOGPU_NOSET_NEURON_RT_VISIBLE_CORES": "1"}
    assert neuron.assignment((0,), switch) == {}


def test_every_core_is_a_device(neuron: Neuron, tmp_path: Path) -> None:
    found = neuron.devices(listing(tmp_path), None)
    assert found == tuple(
        Device(core, type=AWS_NEURON_CORE, memory=16 * GIB, pci=f"00:1{core // 2}.0")
        for core in range(4)
    )


def test_the_tools_own_folder_comes_before_the_path(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    listing(own, CHIPS[:1])
    assert len(Neuron(str(own)).devices(listing(other), None)) == 2
    os.chmod(own / "neuron-ls", 0o644)
    assert len(Neuron(str(own)).devices(listing(other), None)) == 4


def test_a_machine_without_the_tool_has_none(neuron: Neuron) -> None:
    assert neuron.devices({"PATH": "/nowhere::"}, None) == ()
    assert neuron.devices({}, None) == ()


@pytest.mark.parametrize("chips", [[], "", [{"neuron_device": 0}]])
def test_a_list_without_cores(neuron: Neuron, tmp_path: Path, chips: object) -> None:
    assert neuron.devices(listing(tmp_path, chips), None) == ()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken >&2; echo no driver >&2; exit 3", "status 3: no driver"),
        ("exit 1", "ended with status 1;"),
        ("echo no json", "Expecting value"),
        ("echo {}", "wrote no list of chips"),
        ("echo '[1]'", "wrote no list of chips"),
        ("""echo '[{"nc_count": "two"}]'""", "wrote 'two' cores"),
        ("""echo '[{"nc_count": -1}]'""", "wrote -1 cores"),
        ("printf '\\377'", "can't decode"),
    ],
)
def test_a_tool_that_fails_is_one_line_and_no_core(
    neuron: Neuron,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    script: str,
    why: str,
) -> None:
    assert neuron.devices(tool(tmp_path, script), None) == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert why in record.message
    assert record.message.startswith(f"! {tmp_path}/neuron-ls: ")
    assert record.message.endswith("; no NeuronCore is detected.")


def test_a_tool_that_hangs_is_ended(
    neuron: Neuron,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neuron_file, "TOOL_LIMIT", 0.05)
    assert neuron.devices(tool(tmp_path, "exec tail -f /dev/null"), None) == ()
    assert "it has not answered for 0.05 s" in caplog.text


def test_a_tool_that_cannot_be_started(
    neuron: Neuron, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = tool(tmp_path, "")
    (tmp_path / "neuron-ls").write_text("#!/no/such/shell\n")
    assert neuron.devices(environ, None) == ()
    assert "no NeuronCore is detected" in caplog.text


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1,3", [1, 3]), ("0-2", [0, 1, 2]), ("3,0-1", [3, 0, 1]), ("", []), ("2-2", [2])],
)
def test_the_variable_restricts_detection(
    neuron: Neuron, tmp_path: Path, text: str, ids: list[int]
) -> None:
    environ = listing(tmp_path) | {"NEURON_RT_VISIBLE_CORES": text}
    found = neuron.devices(environ, None)
    assert [device.id for device in found] == ids
    assert all(device.memory for device in found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0,a", "'a' names no device"),
        ("2-0", "'2-0' names no device"),
        ("0-", "'0-' names no device"),
        ("0-999999", "'0-999999' names no device"),
        ("0-2,1", "'1' names the device 1 for the second time"),
        ("0-4", "there is no device '4'. This machine has 0, 1, 2, 3"),
    ],
)
def test_what_the_variable_may_not_say(
    neuron: Neuron, tmp_path: Path, text: str, why: str
) -> None:
    environ = listing(tmp_path) | {"NEURON_RT_VISIBLE_CORES": text}
    with pytest.raises(DeviceError) as caught:
        neuron.devices(environ, None)
    assert str(caught.value).startswith(f"NEURON_RT_VISIBLE_CORES={text!r}")
    assert why in str(caught.value)


def test_declared_cores_are_logical(neuron: Neuron) -> None:
    found = neuron.devices({}, 2)
    assert found == tuple(Device(core, type=AWS_NEURON_CORE) for core in range(2))
    named = neuron.devices({"NEURON_RT_VISIBLE_CORES": "4-7"}, 2)
    assert [device.id for device in named] == [4, 5]
    assert neuron.devices({"NEURON_RT_VISIBLE_CORES": "?"}, 0) == ()


def test_more_cores_than_the_variable_names(neuron: Neuron) -> None:
    with pytest.raises(
        DeviceError, match=r"=3, but NEURON_RT_VISIBLE_CORES='0-1' name"
    ):
        neuron.devices({"NEURON_RT_VISIBLE_CORES": "0-1"}, 3)
