"""Places where another user could put files of his own in the place of a node's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu.errors import NodeError, NodeStartError
from tests.cli.sandbox import Sandbox, open_sandbox
from tests.contract import tasks

pytestmark = pytest.mark.either_loop
OTHER = 54321


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")


def give_away(path: Path) -> None:
    """As after `su` or `sudo -E`: the variable names another user's directory."""
    os.chown(path, OTHER, OTHER)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def open_to_a_group(path: Path) -> None:
    os.chown(path, -1, OTHER)
    path.chmod(0o770)


PLACES = pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        pytest.param(give_away, "belongs to uid 54321", marks=as_root),
        (open_to_all, r"all users may write to .* \(mode 0777\)"),
        pytest.param(
            open_to_a_group,
            r"group 54321 may write to .* \(mode 0770\)",
            marks=as_root,
        ),
    ],
    ids=["owner", "mode", "group"],
)
Spoil = Callable[[Path], None]


@pytest.mark.whole
@PLACES
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
@pytest.mark.parametrize("depth", [0, 1], ids=["itself", "above"])
async def test_no_node_opens_in_a_place_that_others_control(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    depth: int,
    spoil: Spoil,
    problem: str,
) -> None:
    with open_sandbox() as sandbox:
        top = Path(sandbox.directory, "top")
        place = top.joinpath(*["below"] * depth)
        place.mkdir(parents=True)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setenv(variable, str(place))
        spoil(top)
        with pytest.raises(NodeStartError) as caught:
            await aiogpu.init(num_cpus=1)
        assert str(caught.value).startswith(f"{place} is not safe: ")
        assert re.search(problem, str(caught.value))
        assert str(top) in str(caught.value)
        assert list(place.iterdir()) == []
        # The remedy: a directory of this user.
        monkeypatch.setenv("XDG_RUNTIME_DIR", sandbox.directory)
        async with aiogpu.init(num_cpus=1):
            assert await tasks.add.remote(1, 2) == 3


@PLACES
def test_no_service_starts_in_a_place_that_others_control(
    sandbox_with_top: tuple[Sandbox, Path], spoil: Spoil, problem: str
) -> None:
    sandbox, top = sandbox_with_top
    spoil(top)
    _, err = sandbox.run("start", "--head", XDG_RUNTIME_DIR=str(top), code=1)
    assert re.search(problem, err), err
    _, err = sandbox.run(*("start", "--head", f"--socket={top}/d/node.sock"), code=1)
    assert re.search(problem, err), err
    logs = f"--log-dir={top}/logs"
    _, err = sandbox.run("start", "--head", logs, code=1)
    assert re.search(problem, err), err
    assert "another place by --log-dir" in err


@PLACES
async def test_no_program_joins_a_node_in_a_place_that_others_control(
    sandbox_with_top: tuple[Sandbox, Path], spoil: Spoil, problem: str
) -> None:
    sandbox, top = sandbox_with_top
    inner = {"XDG_RUNTIME_DIR": str(top)}
    sandbox.run("start", "--head", "--num-cpus=1", **inner)
    address = f"{top}/aiogpu/node.sock"
    try:
        spoil(top)
        with pytest.raises(NodeError) as caught:
            await aiogpu.init(address=address)
        assert re.search(problem, str(caught.value))
        for command in ("status", "stop"):
            _, err = sandbox.run(command, code=1, **inner)
            assert re.search(problem, err), err
    finally:
        os.chown(top, os.geteuid(), os.getegid())
        top.chmod(0o700)
        sandbox.run("stop", "--force", **inner)


@pytest.fixture
def sandbox_with_top() -> Iterator[tuple[Sandbox, Path]]:
    with open_sandbox() as sandbox:
        top = Path(sandbox.directory, "top")
        top.mkdir()
        yield sandbox, top
