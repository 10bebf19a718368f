"""`aiogpu stack` shows where the code of tasks and actors is, and disturbs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.cli.views import stack
from tests.cli.sandbox import LIMIT, Sandbox

NATIVE_LINE = "sum(range(10**12))  # one call, which does not look for signals"

SCRIPT = """
import asyncio, sys, threading, time, aiogpu

@aiogpu.remote(num_cpus=0)
def spin():
    count = 0
    while True:
        count += 1

@aiogpu.remote(num_cpus=0)
def sleep():
    helper = threading.Thread(target=time.sleep, args=(1000,), name="helper")
    helper.daemon = True
    helper.start()
    try:
        time.sleep(1000)  # the main thread
    except InterruptedError:
        raise SystemExit("disturbed")

@aiogpu.remote(num_cpus=0, cancel_grace=0)
def native():
    sum(range(10**12))  # one call, which does not look for signals

@aiogpu.remote(num_cpus=0)
class Server:
    def __init__(self, is_known):
        self.is_known = is_known
    async def outer(self):
        await self.inner()
    async def inner(self):
        await asyncio.Event().wait()
    async def ping(self):
        return 1

@aiogpu.remote(num_cpus=0)
def short():
    pass

@aiogpu.remote(num_cpus=0)
def wrong():
    raise ValueError

@aiogpu.remote(num_cpus=0)
class Idle:
    def ping(self):
        return 1

@aiogpu.remote(num_cpus=1)
def late():
    pass

async def main():
    address = sys.argv[1]
    options = {"num_cpus": 1} if address == "local" else {}
    async with aiogpu.init(address=address, **options):
        idle = Idle.options(name="idle").remote()
        server = Server.options(name="server").remote(True)
        await short.remote()
        await asyncio.gather(wrong.remote(), return_exceptions=True)
        tasks = [spin.remote(), sleep.remote(), native.remote(), server.outer.remote()]
        await asyncio.gather(idle.ping.remote(), server.ping.remote())
        async with aiogpu.lease(num_cpus=1, name="held"):
            while len([t for t in (await aiogpu.status()).tasks if t.worker]) < 5:
                await asyncio.sleep(0)
            waiting = late.remote()
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        print(sum(task.done() for task in tasks), await idle.ping.remote(), flush=True)
        for task in [*tasks, waiting]:
            task.cancel()

asyncio.run(main())
"""


@pytest.fixture(params=["local", "auto"])
def program(
    sandbox: Sandbox, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A program whose tasks run, with a node inside it or on a shared node."""
    if request.param == "auto":
        sandbox.run("start", "--head", "--num-cpus=1", "--num-gpus=0")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-u", str(script), request.param],
        env=sandbox.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_where_tasks_are(
    sandbox: Sandbox, program: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # asking again gives a new answer
        shown, _ = sandbox.run("stack", "spin")
        head, thread, *calls = shown.splitlines()
        assert head.startswith("spin (task ")
        assert thread == "thread MainThread:"
        assert "script.py:" in calls[0]
        assert calls[0].endswith("in spin")
        assert len(calls) == 2
    shown, _ = sandbox.run("stack", "sleep")
    assert "time.sleep(1000)  # the main thread" in shown
    assert "thread helper:" in shown
    shown, _ = sandbox.run("stack", "server")
    after = shown.partition("coroutine ")[2].splitlines()
    inner = [line for line in after if "in Server." in line]
    assert [line.rpartition(".")[2] for line in inner] == ["outer", "inner"]
    assert "    await self.inner()" in after
    shown, _ = sandbox.run("stack", "idle")
    assert shown.splitlines()[1] == "thread MainThread: no code of yours runs"
    for _ in range(2):  # a second answer replaces the first
        head, thread, *calls = sandbox.run("stack", "native")[0].splitlines()
        assert head.startswith("native (task ")
        assert thread == "thread MainThread, which runs native code:"
        assert [call.rpartition(" ")[2] for call in calls[::2]] == ["native"]
        assert calls[1] == f"    {NATIVE_LINE}"
    out, _ = program.communicate("\n", timeout=LIMIT)
    assert out == "0 1\n", "no task has ended by the questions, and the actor answers"


def test_what_has_no_stack(sandbox: Sandbox, program: subprocess.Popen[str]) -> None:
    for name, words in (
        ("held", "is a lease"),
        ("late", "does not run: late"),
        ("nobody", "no task and no actor named 'nobody'"),
        ("1000", "this node has no task 1000"),
        ("short", " s ago: it finished."),
        ("wrong", " s ago: it failed."),
        ("", "it is empty"),
    ):
        _, error = sandbox.run("stack", name, code=1 if name else 2)
        assert words in error


def test_an_outside_tool_shows_native_calls(
    sandbox: Sandbox, program: subprocess.Popen[str], tmp_path: Path
) -> None:
    tool = tmp_path / "bin" / stack.NATIVE
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "asked to $1 $2 $3"\n')
    tool.chmod(0o755)
    options = ("stack", "--native", "native")
    shown, _ = sandbox.run(*options, PATH=str(tool.parent))
    assert "asked to dump --native --pid" in shown
    _, error = sandbox.run(*options, PATH="/nowhere", code=1)
    assert "pip install 'aiogpu[py-spy]'" in error


def test_a_stopped_process_does_not_answer(
    sandbox: Sandbox, program: subprocess.Popen[str]
) -> None:
    shown, _ = sandbox.run("stack", "spin")
    pid = int(shown.splitlines()[0].rpartition(" ")[2])
    os.kill(pid, signal.SIGSTOP)
    _, error = sandbox.run("stack", "spin", code=1)
    assert "has not answered within 3 s" in error
    os.kill(pid, signal.SIGCONT)
    assert "in spin" in sandbox.run("stack", "spin")[0]
