"""Whether an MPS server runs, and what tells it a worker's share."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from aiogpu.runtime.devices import binding as mps

GIB = 1 << 30
PID = "nvidia-cuda-mps-control.pid"


def runs(directory: Path) -> bool:
    return mps.runs({mps.PIPES: str(directory)})


def test_no_directory_no_server(tmp_path: Path) -> None:
    assert not runs(tmp_path / "none")
    assert not runs(tmp_path)
    assert not mps.runs({}, str(tmp_path))


def test_its_process_lives(tmp_path: Path) -> None:
    (tmp_path / PID).write_text(f"{os.getpid()}\n")
    assert runs(tmp_path)
    assert mps.runs({}, str(tmp_path)), "in the directory that NVIDIA chose"
    assert mps.runs({mps.PIPES: ""}, str(tmp_path))


def test_another_users_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    (tmp_path / PID).write_text("1")
    monkeypatch.setattr("os.kill", refuse)
    assert runs(tmp_path)


@pytest.mark.parametrize("text", ["", "0", "x", "-1", str(1 << 22), "9" * 30, "é"])
def test_its_process_has_gone(tmp_path: Path, text: str) -> None:
    (tmp_path / PID).write_text(text)
    assert not runs(tmp_path)
    os.mkfifo(tmp_path / "control")
    assert runs(tmp_path), "seen from a container"


def test_its_pipe_is_there(tmp_path: Path) -> None:
    (tmp_path / "control").write_text("")
    assert not runs(tmp_path), "a plain file"
    (tmp_path / "control").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        assert runs(tmp_path)


@pytest.mark.parametrize(
    ("parts", "limits", "told"),
    [
        (2500, (), {mps.THREADS: "25"}),
        (3333, (), {mps.THREADS: "33"}),
        (1, (), {mps.THREADS: "1"}),
        (10_000, (), {}),
        (0, (6 * GIB,), {mps.MEMORY: "0=6144M"}),
        (5000, (6 * GIB,), {mps.THREADS: "50", mps.MEMORY: "0=6144M"}),
        (10_000, (GIB, 0, 5), {mps.MEMORY: "0=1024M,2=1M"}),
    ],
)
def test_what_a_worker_may_use(
    parts: int, limits: tuple[int, ...], told: dict[str, str]
) -> None:
    assert mps.mps_variables(parts, limits, {}) == told


def test_what_the_user_has_set_stays() -> None:
    told = mps.mps_variables(2500, (GIB,), {mps.THREADS: "9"})
    assert told == {mps.MEMORY: "0=1024M"}
    assert mps.mps_variables(2500, (GIB,), {mps.MEMORY: ""}) == {mps.THREADS: "25"}
