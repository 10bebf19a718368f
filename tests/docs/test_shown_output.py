"""Commands, status and warnings print the texts that the pages show."""

import json
import os
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiogpu.accelerators.nvml.health import xid_in_words
from aiogpu.cli.main import COMMANDS, cli
from aiogpu.cli.start import ready_lines
from aiogpu.cli.views.status import status_data
from aiogpu.daemon import process
from aiogpu.daemon.place import Place
from aiogpu.daemon.readiness import Ready
from aiogpu.observe.status import DeviceStatus, Holder, NodeStatus, OtherProcess, report
from aiogpu.runtime.devices.memory_guard import LEFT_ALONE, Use, describe_outgrowth
from aiogpu.runtime.output import LogLine
from tests.cli.status_examples import BUSY, answer_with
from tests.cli.test_gpus import on_stub
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import GIB, StubNvml, gpus

__all__ = ["nvml", "stub_library"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()


def blocks(page: str, kind: str = r"[^\n`]+") -> list[str]:
    """The fenced blocks of a page."""
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


CONSOLE = blocks("cli.md", "console")


def block_with(page: str, text: str) -> str:
    """The only block of a page that contains a text."""
    (found,) = (block for block in blocks(page) if text in block)
    return found


GPUS = block_with("gpus.md", "$ aiogpu gpus\n")
STATUS = block_with("gpus.md", "not ours: Xorg")
SICK = block_with("gpus.md", "! GPU 0 is well again")
OUTGROWN = block_with("gpus.md", "but has asked for")
STARTED = block_with("service.md", "$ aiogpu start --head --num-gpus=2\nThe node runs")
STOPPED = block_with("service.md", "$ aiogpu stop")
PROMPT = re.compile(r"^\$ aiogpu (.*)\n", re.MULTILINE)


@pytest.mark.parametrize("display", CONSOLE, ids=lambda text: text.splitlines()[0])
def test_commands_print_the_text_on_the_page(
    display: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, BUSY)
    printed = [
        f"$ aiogpu {line}\n{CliRunner().invoke(cli, line.split()).stdout}"
        for line in PROMPT.findall(display)
    ]
    assert printed
    assert "".join(printed) == display


def test_every_command_is_named_on_the_page() -> None:
    rows = "".join(re.findall(r"^\| (`aiogpu .*?) \|", PAGE, re.MULTILINE))
    assert sorted(re.findall(r"`aiogpu (\w+)`", rows)) == sorted(COMMANDS)


def keys(value: object) -> set[str]:
    """The keys in a JSON value, except keys that are data."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    names = set(value)
    for name, inner in value.items():
        if name not in ("request", "amounts", "holds", "max_share"):
            names |= keys(list(inner.values()) if name == "resources" else inner)
    return names


def test_the_schema_names_every_key() -> None:
    schema = (DOCS / "service-json.md").read_text()
    data = json.loads(json.dumps(status_data(BUSY)))
    data["reservation"]["devices"] = {}
    for name in keys(data):
        assert f"`{name}`" in schema, name


def test_gpus_prints_the_list_on_the_page(nvml: StubNvml) -> None:
    first, second = gpus(2)
    here = ((os.getpid(), GIB),)
    first = replace(first, used=3 * GIB, utilisation=37, processes=here)
    nvml.write([first, replace(second, action=1)], links=[(0, 1)])
    printed = re.sub(r"\S+ pid \d+", "python pid N", on_stub(nvml).stdout)
    assert f"$ aiogpu gpus\n{printed}" == GPUS


def test_the_status_of_gpus_is_the_text_on_the_page() -> None:
    holders = (
        Holder(0.5, 1, 11, "train", 1.2, used=7 * GIB, memory=6 * GIB),
        Holder(0.25, 2, 12, "serve", 1.2, used=GIB, memory=10 * GIB),
    )
    device = DeviceStatus(
        "GPU", 0, "A100", "u", "NVIDIA A100-SXM4-40GB", 40 * GIB, 1.0, (), used=0
    )
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
    node = NodeStatus({}, {}, devices, (), (), 0, (), 0, None)
    rows = re.sub(r"pid \d+", "pid N", report(node)).splitlines()[2:]
    assert rows == STATUS.splitlines()


def test_warnings_of_gpus_are_on_the_page() -> None:
    warning = describe_outgrowth("train", "GPU 0", Use(9 * GIB, 1), 6 * GIB, ["serve"])
    assert f"! {warning} {LEFT_ALONE}\n" == OUTGROWN
    reason = f"{xid_in_words(79)}; the driver asks for this: GPU reset"
    assert f"! GPU 0 gets no new tasks until it is well: {reason}\n" in SICK


def test_start_prints_the_text_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    place = Place.at()
    resources = {"CPU": 16.0, "memory": float(60 << 30), "GPU": 2.0}
    lines = ready_lines(Ready(4711, resources, place.socket, place.logs))
    assert "\n".join(["$ aiogpu start --head --num-gpus=2", *lines, ""]) == STARTED


def test_a_line_of_the_log_is_on_the_page() -> None:
    at = datetime(2026, 11, 22, 14, 3, 5, 120_500).timestamp()
    entry = LogLine(at, 67108865, 12, 1, "embed pid=4711", "loading the model")
    assert f"{entry}\n" in blocks("debugging.md", "text")


def test_stop_prints_the_text_on_the_page() -> None:
    at = "the node at /run/user/1000/aiogpu/node.sock (pid 4711)"
    first, second = STOPPED.splitlines()[1:]
    assert first == f"Stopping {at}; running tasks have {process.DRAIN:.0f} s to end."
    assert re.fullmatch(rf"Stopped {re.escape(at)} in [\d.]+ s\.", second)
