"""The unit that `aiogpu start --systemd` prints is one, and means what was asked."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from aiogpu.daemon.start import quoted, unit

ODD = ["/opt/py thon/bin/python", "-m", "aiogpu", '{"a b": 50%}', "$HOME", "c:\\d", ""]


def made(**environ: str) -> str:
    return unit(ODD, environ, opens_within=120, ends_within=52.4)


def settings(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value for name, _, value in lines if not name.startswith("#")}


def test_it_is_notified_and_given_time_to_drain() -> None:
    found = settings(made())
    assert found["Type"] == "notify"
    assert found["KillMode"] == "mixed"
    assert found["Delegate"] == "yes"
    assert found["OOMPolicy"] == "continue"
    assert found["RestartPreventExitStatus"] == "2"
    assert (found["TimeoutStartSec"], found["TimeoutStopSec"]) == ("120", "52")
    assert "Environment" not in found


def test_words_arrive_as_they_were() -> None:
    assert settings(made())["ExecStart"] == (
        '"/opt/py thon/bin/python" -m aiogpu "{\\"a b\\": 50%%}" $$HOME "c:\\\\d" ""'
    )


def test_variables_that_matter_are_kept() -> None:
    text = made(CUDA_VISIBLE_DEVICES="", PYTHONPATH="/a b:/c", HOME="/h", LANG="C")
    assert re.findall(r"^Environment=(.*)$", text, re.MULTILINE) == [
        '"PYTHONPATH=/a b:/c"',
        "CUDA_VISIBLE_DEVICES=",
    ]


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
def test_how_words_are_quoted(word: str, read: str) -> None:
    assert quoted(word) == read


def test_systemd_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
