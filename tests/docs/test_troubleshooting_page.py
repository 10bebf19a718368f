"""The troubleshooting page shows the real output."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import aiogpu
from aiogpu.cli import checks, doctor
from aiogpu.cli.checks import CHECKS, CheckError, Level
from aiogpu.linux.cgroup import _DELEGATE

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
(SHOWN,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BY_NAME = {check.name: check for check in CHECKS}


def failing(name, text, level=None):
    def run():
        raise CheckError(text, level=level)

    return replace(BY_NAME[name], run=run)


def test_doctor_prints_the_text_on_the_page(capsys, monkeypatch):
    monkeypatch.setattr(checks, "try_out", lambda *a, **k: (120, 6.1, 0.21, 10))
    library = "libnvidia-ml.so.1: cannot open shared object file"
    printed = [
        BY_NAME["node"],
        failing("cgroup2", f"/sys/fs/cgroup is not writable; {_DELEGATE}"),
        failing("nvml", f"NVML cannot be loaded: {library}", Level.MISSING),
    ]
    assert doctor.run(printed) == 0
    assert capsys.readouterr().out == SHOWN


def test_the_page_names_every_check_of_the_doctor():
    table = PAGE.partition("\n| line |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(BY_NAME)


async def test_the_error_for_a_second_node_is_on_the_page():
    async with aiogpu.init(address="inline", num_gpus=0):
        with pytest.raises(aiogpu.AiogpuError, match="loop already has a node"):
            await aiogpu.init()
    assert "\n## `this event loop already has a node`\n" in PAGE
