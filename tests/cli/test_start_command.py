"""`aiogpu start` and `stop`: options, errors, and systemd's unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aiogpu.cli import start as start_command
from aiogpu.cli.start import ready_lines, start, stop
from aiogpu.daemon.process import Plan
from aiogpu.daemon.readiness import Ready
from aiogpu.daemon.start import quoted, unit


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, runtime_directory: Path) -> list[Plan]:
    """The plans that `start` would carry out."""
    assert runtime_directory
    result: list[Plan] = []

    def note(plan: Plan) -> Ready:
        result.append(plan)
        return Ready(4711, {"CPU": 2.0}, plan.place.socket, plan.place.logs)

    monkeypatch.setattr(start_command, "start_detached", note)
    return result


def given(*arguments: str) -> Result:
    return CliRunner().invoke(start, arguments)


def test_options_become_options_of_init(plans: list[Plan], tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    resources = json.dumps({"license": 2})
    ran = given(
        *("--head", "--num-cpus=1.5", "--num-gpus=2", f"--resources={resources}"),
        *("--memory=4GiB", "--object-store-memory=1GiB", "--gpu-memory=80GiB"),
        *("--accelerator-type=A100", "--gpu-memory-enforce", "--mps=auto"),
        *("--cpu-affinity=off", "--preload=json,math", "--preload=auto"),
        *(
            "--foreign=avoid",
            "--cancel-grace=1",
            "--spare-workers=0",
            "--no-memory-guard",
        ),
        *(f"--spill-directory={spill}", "--drain=3", f"--log-dir={tmp_path}"),
    )
    assert ran.exit_code == 0, ran.output
    (plan,) = plans
    expected = {
        "num_cpus": 1.5,
        "num_gpus": 2,
        "resources": {"license": 2},
        "accelerator_type": "A100",
        "gpu_memory": 80 << 30,
        "gpu_memory_enforce": True,
        "mps": "auto",
        "foreign": "avoid",
        "cpu_affinity": "off",
        "preload": ("json", "math"),
        "learns": True,
        "log_to_driver": True,
        "cancel_grace": 1.0,
        "spare_workers": 0,
        "memory": 4 << 30,
        "memory_guard": False,
        "object_memory": 1 << 30,
        "spill_directory": str(spill),
    }
    assert {name: getattr(plan.options, name) for name in expected} == expected
    assert (plan.drain, plan.place.logs) == (3.0, str(tmp_path))
    assert all(map(os.path.isabs, plan.sys_path))


def test_missing_options_have_defaults(plans: list[Plan]) -> None:
    for arguments in ([], ["--object-store-memory=2000000000"], ["--preload="]):
        assert given("--head", *arguments).exit_code == 0
    default, sized, bare = plans
    assert default.options._asdict() == default.options._field_defaults
    assert default.drain == 30
    assert sized.options.object_memory == 2_000_000_000, "bytes, as in Ray's command"
    assert (bare.options.preload, bare.options.learns) == ((), False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "write `aiogpu start --head`"),
        (["--head", "--resources=x"], "'x' is not a JSON object"),
        (["--head", "--resources=[1]"], "'[1]' is not a JSON object"),
        (["--head", "--drain=-1"], "--drain"),
        (["--head", "--drain=5m"], "'5m' is not a valid number of seconds"),
        (["--head", "--num-gpus=2.5"], "'2.5' is not a valid whole number"),
        (["--head", "--num-gpus=-1"], "-1 is not in the range x>=0"),
        (
            ["--head", "--memory=64G"],
            "'64G' is not an amount of memory; write one with",
        ),
        (
            ["--head", "--gpu-memory=2"],
            "'2' means 2 bytes; write it with a unit",
        ),
        (["--head", "--memory=64B"], "means 64 bytes; the minimum is 1MiB."),
        (["--head", "--object-store-memory=1"], "'1' means 1 byte; write it with"),
        (
            ["--head", "--gpu-memory=-1"],
            "--gpu-memory': '-1' is not an amount of memory",
        ),
        (["--head", "--socket="], "--socket: it is empty"),
        (["--head", "--log-dir="], "--log-dir: it is empty"),
        (["--head", "--mps=on"], "--mps"),
        (
            ["--head", "--systemd", "--socket=a.sock"],
            "must be absolute, because the service",
        ),
    ],
)
def test_bad_options_of_start_are_errors(
    plans: list[Plan], arguments: list[str], message: str
) -> None:
    ran = given(*arguments)
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())
    assert not plans


def test_another_socket_is_printed_in_full(runtime_directory: Path) -> None:
    lines = ready_lines(Ready(1, {"CPU": 1.0}, f"{runtime_directory}/b.sock", "/logs"))
    assert lines[-2:] == [
        f'  join     aiogpu.init(address="{runtime_directory}/b.sock"), or '
        f"AIOGPU_ADDRESS={runtime_directory}/b.sock",
        f"  stop     aiogpu stop --socket {runtime_directory}/b.sock",
    ]


def test_a_unit_has_the_same_options(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--head", "--systemd", "--drain=5", "--num-gpus=2"]
    monkeypatch.setattr(sys, "argv", ["aiogpu", "start", *arguments])
    ran = given(*arguments)
    command = f"{sys.executable} -P -m aiogpu start --head --drain=5 "
    assert f"ExecStart={command}" in ran.output
    assert " --num-gpus=2 --block\n" in ran.output
    assert "\nTimeoutStopSec=27\n" in ran.output
    assert not plans


@pytest.mark.parametrize(
    ("arguments", "variable", "at"),
    [
        ([], None, "aiogpu/node.sock"),
        ([], "auto", "aiogpu/node.sock"),
        ([], "local", "aiogpu/node.sock"),
        ([], "{}/b.sock", "b.sock"),
        (["--socket={}/c.sock"], "{}/b.sock", "c.sock"),
        (["--address=unix:{}/c.sock"], None, "c.sock"),
    ],
)
def test_stop_selects_a_node(
    runtime_directory: Path, arguments: list[str], variable: str | None, at: str
) -> None:
    here = str(runtime_directory)
    ran = CliRunner().invoke(
        stop,
        [argument.format(here) for argument in arguments],
        env={"AIOGPU_ADDRESS": variable and variable.format(here)},
    )
    assert (ran.exit_code, ran.output) == (0, f"No node runs at {here}/{at}.\n")


def test_stop_by_force_does_not_drain(runtime_directory: Path) -> None:
    assert runtime_directory
    ran = CliRunner().invoke(stop, ["--force", "--drain=1"])
    assert ran.exit_code == 2
    assert "exclude each other" in ran.output


# The unit that `aiogpu start --systemd` prints.


ODD = ["/opt/py thon/bin/python", "-m", "aiogpu", '{"a b": 50%}', "$HOME", "c:\\d", ""]


def settings(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value for name, _, value in lines if not name.startswith("#")}


def test_a_unit_has_notification_and_time_to_drain() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "/a b:/c", "HOME": "/h"}
    text = unit(ODD, environ, opens_within=120, ends_within=52.4)
    wanted = {
        "Type": "notify",
        "KillMode": "mixed",
        "Delegate": "yes",
        "OOMPolicy": "continue",
        "RestartPreventExitStatus": "2",
        "TimeoutStartSec": "120",
        "TimeoutStopSec": "52",
        "ExecStart": '"/opt/py thon/bin/python" -m aiogpu "{\\"a b\\": 50%%}" $$HOME '
        '"c:\\\\d" ""',
    }
    assert settings(text).items() >= wanted.items()
    # Relevant variables are kept.
    assert re.findall(r"^Environment=(.*)$", text, re.MULTILINE) == [
        '"PYTHONPATH=/a b:/c"',
        "CUDA_VISIBLE_DEVICES=",
    ]
    plain = unit(ODD, {}, opens_within=120, ends_within=52.4)
    assert "Environment" not in settings(plain)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ("it's", '"it\'s"'),
        ("tab\there", '"tab\\there"'),
        ("line\nbreak", '"line\\nbreak"'),
        ("100%", '"100%%"'),
        (";", '";"'),
    ],
)
def test_words_of_a_unit_are_quoted(word: str, read: str) -> None:
    assert quoted(word) == read


def test_systemd_accepts_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "aiogpu.service"
    path.write_text(unit(["/bin/sh", *ODD[1:]], {}, opens_within=1, ends_within=1))
    ran = subprocess.run(
        [analyze, "verify", "--user", "--man=no", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in ran.stderr:
        pytest.skip("systemd-analyze does not work here")
    assert (ran.returncode, ran.stderr) == (0, "")
