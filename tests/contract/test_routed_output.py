"""On a node that programs have joined, each sees what its own tasks print."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import aiogpu
from aiogpu.cli.logs import timeline
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine
from aiogpu.engines.remote import RemoteEngine
from aiogpu.runtime.output import FILE
from tests.support.until import until

pytestmark = pytest.mark.either_loop


@asynccontextmanager
async def service(place: Path) -> AsyncIterator[tuple[str, LocalEngine]]:
    """A node on this loop, which other programs can join."""
    path = str(place / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        engine = LocalEngine(
            NodeOptions(num_cpus=2, num_gpus=0), asyncio.get_running_loop()
        )
        await engine.open()
        try:
            await engine.serve(listening, str(place))
            yield path, engine
        finally:
            await engine.close()


def say(word: str) -> int:
    print(word)
    print(f"{word} on stderr", file=sys.stderr)
    os.write(1, f"{word} raw\n".encode())
    return os.getpid()


def parent(word: str) -> int:
    pid: int = aiogpu.get(aiogpu.remote(say).remote(word))
    return pid


def logged(place: Path) -> list[str]:
    lines = (place / FILE).read_text().splitlines()
    return sorted(line.rpartition(") ")[2] for line in lines)


async def test_lines_come_before_the_answer_and_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service(tmp_path) as (path, _):
        async with aiogpu.init(address=path):
            pid = await aiogpu.remote(say).remote("hello")
            out, err = capsys.readouterr()
            assert f"(say pid={pid}) hello\n" in out
            assert f"pid={pid}) hello raw\n" in out
            assert err == f"(say pid={pid}) hello on stderr\n"
            pid = await aiogpu.remote(parent).remote("child")
            assert f"(say pid={pid}) child\n" in capsys.readouterr().out
        async with aiogpu.init(address=path, log_to_driver=False):
            await aiogpu.remote(say).remote("secret")
        assert capsys.readouterr() == ("", "")
    words = ("hello", "child", "secret")
    told = [(word, f"{word} on stderr", f"{word} raw") for word in words]
    assert logged(tmp_path) == sorted(line for lines in told for line in lines)


class SlowTerminal(io.StringIO):
    """Blocks every write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait(20)
        return super().write(text)


def flood(lines: int) -> int:
    for _ in range(lines):
        print("x" * 1000)
    return lines


async def test_a_slow_terminal_slows_the_task_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = SlowTerminal()
    async with service(tmp_path) as (path, engine), aiogpu.init(address=path):
        monkeypatch.setattr(sys, "stdout", terminal)
        flooding = aiogpu.remote(flood).remote(6000)
        clients = engine._supervisor.clients
        assert clients is not None
        await until(lambda: clients.routes._paused)
        (one,) = clients.by_id.values()
        assert one.is_slow
        assert not flooding.done()
        terminal.is_free.set()
        assert await flooding == 6000
        monkeypatch.undo()
        assert not clients.routes._paused
        assert terminal.getvalue().count("x" * 1000) == 6000


def fail() -> None:
    raise KeyError("x")


async def test_what_has_run_is_written_down(tmp_path: Path) -> None:
    async with service(tmp_path) as (path, engine):
        async with aiogpu.init(address=path) as node:
            await asyncio.gather(*(aiogpu.remote(say).remote("a") for _ in range(8)))
            with pytest.raises(KeyError):
                await aiogpu.remote(fail).remote()
            remote = node._session._engine
            assert isinstance(remote, RemoteEngine)
            spans = await remote.timeline()
        assert [span.name for span in spans].count("say") == 8
        assert all(span.queued <= span.started <= span.ended for span in spans)
        assert {span.client for span in spans} == {remote.client}
        ended = {span.name: span.outcome for span in spans}
        assert ended == {"say": "finished", "fail": "failed"}
        out = tmp_path / "out.json"
        written = await asyncio.to_thread(
            CliRunner().invoke, timeline, [str(out), "--address", path]
        )
        assert written.exit_code == 0, written.output
        events = json.loads(out.read_text())["traceEvents"]
        assert sum(event["name"] == "say" for event in events) == 8
        assert len(engine.spans()) == 9
