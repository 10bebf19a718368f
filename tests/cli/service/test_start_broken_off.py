"""A start that is interrupted, or whose node dies on its way, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from aiogpu.daemon.place import Record
from tests.cli.box import LIMIT, Box

pytestmark = pytest.mark.slow


def begun(here: Box, tmp_path: Path) -> tuple[subprocess.Popen[str], Record]:
    """A start whose node imports for ever, and that node."""
    os.mkfifo(tmp_path / "never")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'never')!r})\n")
    path = os.pathsep.join([str(tmp_path), here.variables["PYTHONPATH"]])
    command = here.begin("start", "--head", "--preload=endless", PYTHONPATH=path)
    ends = time.monotonic() + LIMIT
    while (node := here.node) is None:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < ends
    return command, node


def test_ctrl_c(here: Box, tmp_path: Path) -> None:
    command, _ = begun(here, tmp_path)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=LIMIT)
    assert (out, err.strip()) == ("", "Interrupted.")
    assert command.returncode == 130
    here.wait_for_the_end(5)
    assert here.files == []


def test_it_is_stopped_before_it_is_ready(here: Box, tmp_path: Path) -> None:
    command, node = begun(here, tmp_path)
    out, _ = here.run("stop")
    assert f"(pid {node.pid})" in out
    _, err = command.communicate(timeout=LIMIT)
    assert err == "Error: the node was asked to stop before it was ready.\n"
    assert command.returncode == 1
    here.wait_for_the_end(5)
    assert here.files == []


def test_its_node_is_killed(here: Box, tmp_path: Path) -> None:
    command, node = begun(here, tmp_path)
    os.kill(node.pid, signal.SIGKILL)
    _, err = command.communicate(timeout=LIMIT)
    assert "the node ended before it was ready (SIGKILL)" in err
    assert here.place.logs in err
    assert command.returncode == 1
    here.wait_for_the_end(5)
