"""`aiogpu gpus`, on the NVML stub, alone and with a running node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest

import aiogpu
from aiogpu.accelerators.base import Health, Sample
from aiogpu.cli import connect
from aiogpu.cli.doctor import NodeDevices, as_data, ask_node, lines
from aiogpu.core.model.request import Device
from aiogpu.engines.device_report import DetectedDevice, DeviceReport, place_of
from aiogpu.observe.status import OtherProcess
from tests.cli.status_examples import BUSY, answer_with
from tests.support.program import run_command
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import GIB, StubNvml, gpus

__all__ = ["nvml", "stub_library"]


COMMAND = [sys.executable, "-m", "aiogpu", "gpus"]


A100 = Device(0, "A100", "GPU-0", "NVIDIA A100-SXM4-40GB", 40 * GIB)


def on_stub(
    nvml: StubNvml, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {**without_colours(nvml.environ), **variables}
    return run_command(*COMMAND, *options, env=environ)


def without_colours(environ: Mapping[str, str]) -> dict[str, str]:
    left_out = ("CUDA_", "AIOGPU_NOSET", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {k: v for k, v in environ.items() if not k.startswith(left_out)}
    return {**kept, "TERM": "xterm-256color"}


@pytest.fixture
def two(nvml: StubNvml) -> StubNvml:
    """Two GPUs with NVLink; this process uses the first one."""
    first, second = gpus(2)
    on_it = replace(
        first, used=3 * GIB, utilisation=37, processes=((os.getpid(), GIB),)
    )
    nvml.write([on_it, replace(second, action=1)], links=[(0, 1)])
    return nvml


def test_gpus_in_a_pipe_prints_plain_lines(two: StubNvml) -> None:
    ran = on_stub(two)
    assert (ran.returncode, ran.stderr) == (0, "")
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert ran.stdout.splitlines() == [
        "GPU 0  NVIDIA A100-SXM4-40GB",
        "  uuid        GPU-00000000-0000-0000-0000-000000000000",
        "  type        A100",
        "  capability  8.0",
        "  pci         00000000:01:00.0",
        "  memory      3 GiB used of 40 GiB",
        "  busy        37 %",
        "  linked to   1",
        "  health      well",
        f"  processes   {name} pid {os.getpid()} 1 GiB",
        "GPU 1  NVIDIA A100-SXM4-40GB",
        "  uuid        GPU-11111111-1111-1111-1111-111111111111",
        "  type        A100",
        "  capability  8.0",
        "  pci         00000000:02:00.0",
        "  memory      0 used of 40 GiB",
        "  busy        0 %",
        "  linked to   0",
        "  health      the driver asks for this: GPU reset",
        "  processes   none",
    ]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (
            120,
            [
                "linked to",
                "NVIDIA A100-SXM4-40GB +3 GiB used of 40 GiB +37 %",
                "\x1b\\[32mGPU 0: well",
                "\x1b\\[31mGPU 1: the driver asks for this: GPU reset",
            ],
        ),
        (
            40,
            [
                "GPU 0  NVIDIA A100-SXM4-40GB\r\n",
                "  memory      3 GiB used of 40 GiB\r\n",
            ],
        ),
    ],
    ids=["table", "lines"],
)
def test_gpus_fits_the_terminal(two: StubNvml, columns: int, wanted: list[str]) -> None:
    terminal = pexpect.spawn(
        COMMAND[0],
        COMMAND[1:],
        env=without_colours(two.environ),  # type: ignore[arg-type]
        dimensions=(50, columns),
        encoding="utf-8",
        timeout=100,
    )
    for each in wanted:
        terminal.expect(each)
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize(
    ("state", "variables", "text"),
    [
        (
            {},
            {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "1"},
            "CUDA_DEVICE_ORDER='FASTEST_FIRST': only CUDA knows which GPUs the indices "
            "in CUDA_VISIBLE_DEVICES='1' name; name them by their UUIDs.",
        ),
        (
            {"init_error": 9},
            {"CUDA_VISIBLE_DEVICES": "1"},
            "Nothing is known about these GPUs: NVML does not start: Driver Not "
            "Loaded.",
        ),
        ({"init_error": 9}, {}, "No GPUs: NVML does not start: Driver Not Loaded."),
        (
            {"lost": [1]},
            {},
            "GPU 1 does not answer: GPU is lost; GPUs are known only in part, or not "
            "at all.",
        ),
        (
            {},
            {"CUDA_VISIBLE_DEVICES": ""},
            "No GPUs: CUDA_VISIBLE_DEVICES='' names none.",
        ),
    ],
    ids=["order", "hidden", "no driver", "lost", "none visible"],
)
def test_a_missing_reading_is_explained_once(
    nvml: StubNvml, state: dict[str, Any], variables: dict[str, str], text: str
) -> None:
    nvml.write(gpus(2), **state)
    ran = on_stub(nvml, **variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[-1] == text
    assert ran.stdout.count(text) == 1


def test_gpus_as_json_lists_usable_devices(two: StubNvml) -> None:
    ran = on_stub(two, "--json", CUDA_VISIBLE_DEVICES="1")
    assert (ran.returncode, ran.stderr) == (0, "")
    data = json.loads(ran.stdout)
    [device] = data["devices"]
    assert (device["id"], device["action"], device["links"]) == (1, "GPU reset", [])
    assert (device["used"], device["processes"]) == (0, [])
    assert data["notes"] == ["CUDA_VISIBLE_DEVICES='1' hides 1 of 2 GPUs."]


def test_an_unknown_device_is_an_error(two: StubNvml) -> None:
    ran = on_stub(two, CUDA_VISIBLE_DEVICES="0,7")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(
        "Error: CUDA_VISIBLE_DEVICES='0,7': there is no device"
    )


def facts_of(seen: DetectedDevice) -> dict[str, str]:
    """The printed facts about a device."""
    _, *rows = lines(DeviceReport((seen,), ()))
    return {row[2:13].rstrip(): row[14:] for row in rows}


def test_a_device_without_a_driver_shows_known_facts() -> None:
    seen = DetectedDevice("TPU", Device(3), numa_node=1, cpus="8-15")
    assert facts_of(seen) == {
        "health": "unknown: aiogpu does not ask its driver",
        "near": "NUMA node 1, CPUs 8-15",
    }
    assert list(lines(DeviceReport((seen,), ("why",))))[:: len(facts_of(seen)) + 1] == [
        "TPU 3  without a name",
        "why",
    ]
    [data] = as_data(DeviceReport((seen,), ()))["devices"]
    assert (data["used"], data["processes"], data["action"]) == (None, None, None)
    assert (data["is_lost"], data["errors"], data["cpus"]) == (False, [], "8-15")


@pytest.mark.parametrize(
    ("sample", "health", "text"),
    [
        (Sample({}), Health(action=""), "well"),
        (Sample({}), Health(), "answers"),
        (Sample(problem="GPU is lost", is_lost=True), Health(), "lost (GPU is lost)"),
        (
            Sample(problem="Unknown"),
            Health(),
            "the driver does not report its use (Unknown)",
        ),
        (Sample({}), Health(("XID 79",), is_lost=True), "XID 79; lost"),
    ],
)
def test_health_is_described(sample: Sample, health: Health, text: str) -> None:
    assert facts_of(DetectedDevice("GPU", A100, sample, health))["health"] == text


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        (None, "not listed by its driver"),
        ((), "none"),
        ((OtherProcess(7), OtherProcess(8, "sh", 0)), "pid 7, sh pid 8 0"),
        (
            tuple(OtherProcess(pid) for pid in range(1, 7)),
            "pid 1, pid 2, pid 3, pid 4, and 2 more",
        ),
    ],
)
def test_processes_are_described(
    processes: tuple[OtherProcess, ...] | None, text: str
) -> None:
    seen = DetectedDevice("GPU", A100, Sample({}), Health(), processes)
    assert facts_of(seen)["processes"] == text


def test_the_numa_node_is_read_from_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    assert place_of("00000000:3B:00.0", tmp_path) == (None, "")
    (folder / "numa_node").write_text("1\n")
    (folder / "local_cpulist").write_text("8-15\n")
    assert place_of("00000000:3B:00.0", tmp_path) == (1, "8-15")
    (folder / "numa_node").write_text("-1\n")
    assert place_of("00000000:3B:00.0", tmp_path) == (None, "8-15")
    assert place_of(None, tmp_path) == (None, "")


# With a running node: the holders of each device.


SHARES = NodeDevices(BUSY.devices)


BOX = DeviceReport(
    tuple(
        DetectedDevice("GPU", Device(n, "A100", f"GPU-{n}", "NVIDIA A100", 40 * GIB))
        for n in range(4)
    ),
    (),
)


def test_the_lines_name_the_holders() -> None:
    held = [line.split(None, 1)[1] for line in lines(BOX, SHARES) if " held " in line]
    assert held == [
        "0.5 Model 'serve', 0.25 train; 0.25 free",
        "1 whole; 0 free",
        "set aside: XID 79 (the GPU has fallen off the bus)",
    ]


def test_json_names_the_holders_of_a_nodes_devices() -> None:
    first, *_, last = as_data(BOX, SHARES)["devices"]
    assert (first["free"], first["aside"]) == (0.25, None)
    assert [each["task"] for each in first["holders"]] == ["Model 'serve'", "train"]
    assert "holders" not in last
    assert as_data(BOX) == as_data(BOX, NodeDevices())


def test_devices_are_matched_by_uuid() -> None:
    other = Device(0, uuid="GPU-1")
    assert SHARES.of("GPU", other) is BUSY.devices[1]
    assert SHARES.of("GPU", replace(other, uuid=None)) is BUSY.devices[0]
    assert SHARES.of("neuron_cores", other) is None
    assert NodeDevices((replace(BUSY.devices[0], holders=(), free=1.0),)).holders(
        "GPU", Device(0)
    ) == ("1 free")


async def test_gpus_without_a_node_shows_no_holders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    assert await ask_node() == NodeDevices()


async def test_gpus_reports_a_node_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "check_there", lambda _: None)
    answer_with(monkeypatch, BUSY)
    assert await ask_node() == SHARES

    def fail(_address: str, _patience: float) -> object:
        raise aiogpu.NodeDiedError("the node has ended. Start it anew.")

    monkeypatch.setattr(connect, "joined", fail)
    text = (await ask_node()).note
    assert text == "The holders of devices are unknown: the node has ended."
