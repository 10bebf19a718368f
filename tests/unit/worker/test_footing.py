"""Where a worker's next task begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.worker.environment import TaskStateReset


@pytest.fixture(autouse=True)
def mask() -> Iterator[int]:
    mask = os.umask(0o027)
    yield 0o027
    os.umask(mask)


def test_it_is_put_back(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called = []
    task_state = TaskStateReset(lambda: called.append("handler"))
    task_state.find()
    os.chdir("/")
    os.umask(0)
    task_state.restore()
    assert Path.cwd() == tmp_path
    assert os.umask(mask) == mask
    assert called == ["handler"]


def test_a_closed_directory_is_left_alone(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task has closed all descriptors; the rest is put back all the same."""
    monkeypatch.chdir(tmp_path)
    task_state = TaskStateReset(lambda: None)
    task_state.find()
    os.close(task_state._directory)
    os.chdir("/")
    for _ in range(2):
        os.umask(0)
        task_state.restore()
        assert os.umask(mask) == mask
    assert Path.cwd() == Path("/")


def test_one_that_has_found_nothing_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the zygote, where tasks are rehearsed."""
    task_state = TaskStateReset(lambda: None)
    monkeypatch.chdir(tmp_path)
    task_state.restore()
    assert Path.cwd() == tmp_path
