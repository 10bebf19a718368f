"""Views of a real node, which another process than theirs has."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest

import aiogpu
from aiogpu.api.session import current_session
from aiogpu.cli import connect
from aiogpu.engines.local import LocalEngine
from tests.contract import tasks
from tests.contract.actor_classes import Counter
from tests.support.gate import Gate
from tests.support.program import environment, start

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[str]:
    """A node of this process, which others may ask; gives its socket."""
    path = f"{place}/node.sock"
    async with aiogpu.init(address="local", num_cpus=2, num_gpus=1):
        engine = current_session().engine
        assert isinstance(engine, LocalEngine)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        await engine.serve(listening)
        yield path


async def view(*arguments: str) -> tuple[int, str, str]:
    """What a command prints that is run in a process of its own."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiogpu", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, err = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode is not None
    return program.returncode, out.decode(), err.decode()


def failing(source: str, *arguments: str) -> str:
    """What a program says that fails."""
    with start(source, *arguments) as program:
        _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    return err


async def test_a_node_is_seen_from_outside(tmp_path: Path, gate: Gate) -> None:
    async with served(tmp_path) as path:
        actor = Counter.options(name="tally").remote()
        await actor.add.remote()
        with pytest.raises(KeyError):
            await tasks.fail.remote(KeyError, "x")
        running = tasks.gated.options(num_gpus=0.75).remote(gate.path, "runs")
        await gate.entered("runs")
        waiting = tasks.gated.options(num_gpus=0.5).remote(gate.path, "waits")
        here = await aiogpu.status()
        number = next(task.id for task in here.tasks if task.state == "waiting")
        told, listed, why, unknown = await asyncio.gather(
            view("status", "--json", "--address", path),
            view("list", "actors", "--address", path),
            view("why", str(number), "--address", path),
            view("why", "999999", "--address", path),
        )
        assert (told[0], listed[0], why[0]) == (0, 0, 0), (told, listed, why)
        seen = json.loads(told[1])
        assert seen["resources"]["GPU"] == {"total": 1.0, "free": 0.25}
        (device,) = seen["devices"]
        assert [one["task"] for one in device["holders"]] == ["gated"]
        assert seen["waiting"]["tasks"] == 1
        assert [one["error"] for one in seen["failures"]] == ["KeyError"]
        assert [one["name"] for one in seen["actors"]] == ["tally"]
        assert listed[1].splitlines()[1].split()[1:4] == ["tally", "Counter", "alive"]
        assert why[1].startswith(f"gated (task {number}) has waited")
        assert "0.75 of GPU 0: held by gated" in why[1]
        assert unknown[0] == 1
        assert "this node has no task 999999" in unknown[2]
        gate.release("runs")
        await gate.entered("waits")
        gate.release("waits")
        await asyncio.gather(running, waiting)
        after = await aiogpu.status()
        assert len(after.actors) == len(here.actors), "a view has left something"


async def test_a_socket_that_nobody_listens_on_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    code, out, err = await view("status", "--address", path)
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: no node can be reached at {path}: Connection ref")
    assert "aiogpu start --head" in err
    assert os.path.exists(path)


async def test_a_node_that_does_not_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as path:
        monkeypatch.setattr(current_session().engine, "status", asyncio.Event().wait)
        asked = """
            import sys
            from aiogpu.cli import connect
            connect.ask(sys.argv[1], lambda node: node.status(), 0.1)
        """
        told = await asyncio.to_thread(failing, asked, path)
        assert f"the node at {path} has not answered within 0.1 s" in told


async def test_who_never_lets_anybody_join_is_not_waited_for(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as no_answer_error:
        no_answer_error.bind(path)
        no_answer_error.listen()
        with pytest.raises(click.ClickException, match=r"not answered within 0\.1 s"):
            async with connect.joined(path, 0.1):
                pass
