"""The node's directory: where it is made, and when it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiogpu.errors import NodeStartError
from aiogpu.runtime.directories import LONGEST, create_directory, remove_directory


def test_the_runtime_directory_is_preferred(runtime_directory: Path) -> None:
    path = Path(create_directory())
    assert path.parent == runtime_directory
    assert path.name.startswith("aiogpu-")
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "node.sock").touch()
    remove_directory(str(path))
    assert not path.exists()
    remove_directory(str(path))


def test_one_that_is_too_long_for_a_socket_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_directory: Path
) -> None:
    # Bytes count, not characters.
    long = tmp_path / ("ä" * (LONGEST // 2))
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setenv("TMPDIR", str(runtime_directory))
    path = create_directory()
    assert os.path.dirname(path) == str(runtime_directory)
    remove_directory(path)


@pytest.mark.parametrize("unset", [None, ""])
def test_without_a_runtime_directory_the_temporary_one_serves(
    unset: str | None, monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    if unset is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", unset)
    monkeypatch.setenv("TMPDIR", str(runtime_directory))
    path = create_directory()
    assert os.path.dirname(path) == str(runtime_directory)
    remove_directory(path)


def test_no_place_at_all_is_told_with_all_that_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: str, _mode: int) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr("os.mkdir", refuse)
    with pytest.raises(NodeStartError, match="XDG_RUNTIME_DIR or TMPDIR") as caught:
        create_directory()
    assert "/run/user/1, /var/tmp, /tmp: [Errno 13]" in str(caught.value)
