"""A node is stopped or killed, and another runs in its place: the program is told how
to go on, and can."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aiogpu
from tests.contract import served, tasks
from tests.contract.raw_client import Service

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]


@aiogpu.remote
async def endless() -> None:
    await asyncio.Event().wait()


@pytest.fixture
def place(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where `address="auto"` finds a node, as long as there is one."""
    with tempfile.TemporaryDirectory(prefix="ags-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        Path(directory, "aiogpu").mkdir(mode=0o700)
        yield f"{directory}/aiogpu/node.sock"


@contextmanager
def running(path: str) -> Iterator[Service]:
    assert served.forker is not None
    Path(path).unlink(missing_ok=True)  # as a node that is started does
    options: dict[str, object] = {"num_cpus": 1, "log_to_driver": False}
    node = Service(path, served.forker.fork(path, options))
    try:
        yield node
    finally:
        node.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("is_usual", [True, False])
async def test_the_next_node_is_joined_as_the_error_says(
    number: int, is_usual: bool, place: str
) -> None:
    path = place if is_usual else f"{Path(place).parent}/other.sock"
    address = "auto" if is_usual else path
    with running(path) as node:
        await aiogpu.init(address=address, log_to_driver=False)
        assert await tasks.add.remote(1, 2) == 3
        waiting = endless.remote()
        node.end(number)
        told = f"`await aiogpu.init(address={address!r})` joins it"
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await waiting
        assert told in str(error.value)
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await tasks.add.remote(1, 2)
        assert told in str(error.value)
    with running(path):
        await aiogpu.init(address=address, log_to_driver=False)
        assert await tasks.add.remote(1, 2) == 3
        await aiogpu.shutdown()
