"""Real services: started by the command, shared, stopped, killed, restarted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aiogpu
from aiogpu.daemon.place import Record
from tests.cli.sandbox import LIMIT, Sandbox
from tests.contract import tasks
from tests.faults.leftovers import processes_of
from tests.support.gate import Gate
from tests.support.waits import until


def test_start_and_stop_of_a_service(sandbox: Sandbox) -> None:
    out, err = sandbox.run("start", "--head", "--num-cpus=2", "--num-gpus=3")
    node = sandbox.node
    assert node is not None
    assert err == ""
    assert os.stat(sandbox.place.socket).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(sandbox.place.socket)).st_mode & 0o777 == 0o700
    printed = re.sub(r"memory: [\w.]+", "memory: M", out)
    assert printed == (
        f"The node runs: pid {node.pid}, {{CPU: 2, memory: M, GPU: 3}}.\n"
        f"  address  {sandbox.place.socket}\n"
        f"  logs     {sandbox.place.logs}\n"
        f'  join     aiogpu.init(address="auto"), or AIOGPU_ADDRESS=auto\n'
        f"  stop     aiogpu stop\n"
    )
    assert os.getsid(node.pid) == node.pid, "the node has a session of its own"
    assert os.readlink(f"/proc/{node.pid}/cwd") == "/"
    assert Path(f"/proc/{node.pid}/comm").read_text() == "aiogpu-node\n"
    command = Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")
    assert {b"-P", sandbox.place.socket.encode()} <= set(command)

    out, err = sandbox.run("stop", "--drain=5")

    node_name = f"the node at {sandbox.place.socket} (pid {node.pid})"
    assert err == f"Stopping {node_name}; running tasks have 5.0 s to end.\n"
    assert re.fullmatch(rf"Stopped {re.escape(node_name)} in [\d.]+ s\.\n", out)
    assert processes_of(sandbox.directory) == []
    assert sandbox.files == []
    log = Path(f"{sandbox.place.logs}/node.log").read_text()
    assert f"ready at {sandbox.place.socket}" in log
    assert "running tasks have 5.0 s to end" in log

    out, _ = sandbox.run("stop")
    assert out == f"No node runs at {sandbox.place.socket}.\n"


def test_a_start_that_fails_reports_the_reason(sandbox: Sandbox) -> None:
    _, err = sandbox.run("start", "--head", "--preload=nosuchmodule", code=1)
    assert "'nosuchmodule', which cannot be imported" in err
    _, err = sandbox.run(
        "start", "--head", "--num-gpus=3", CUDA_VISIBLE_DEVICES="7", code=2
    )
    assert "num_gpus=3, but CUDA_VISIBLE_DEVICES='7' names 1 device" in err
    os.chmod(f"{sandbox.directory}/aiogpu", 0o755)
    _, err = sandbox.run("start", "--head", code=1)
    assert "has mode 0755" in err
    os.chmod(f"{sandbox.directory}/aiogpu", 0o700)
    assert processes_of(sandbox.directory) == []
    assert sandbox.files == []


@contextmanager
def process_with_the_pid_of(
    sandbox: Sandbox, node: Record
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a dead node's pid, as if the kernel had reused the number.

    Only the start time differs: the process even has the pidfile open.
    """
    pidfile = Path(sandbox.place.pidfile)
    with (
        pidfile.open() as opened,
        subprocess.Popen(["sleep", "600"], stdin=opened) as process,
    ):
        try:
            pidfile.write_text(json.dumps({**node._asdict(), "pid": process.pid}))
            yield process
        finally:
            process.kill()


def test_one_of_two_concurrent_starts_wins(sandbox: Sandbox) -> None:
    both = [sandbox.start("start", "--head", "--num-gpus=1") for _ in range(2)]
    outputs = [command.communicate(timeout=LIMIT) for command in both]
    assert sorted(command.returncode for command in both) == [0, 1]
    node = sandbox.node
    assert node is not None
    winner = next(out for out, err in outputs if not err)
    loser = next(err for _, err in outputs if err)
    assert f"pid {node.pid}" in winner
    assert f"a node runs at {sandbox.place.socket} already (pid {node.pid})" in loser

    os.kill(node.pid, signal.SIGKILL)
    sandbox.wait_until_ended(5)
    # The node's own directory is gone; the pidfile and the socket stay, and are stale.
    assert sandbox.files == ["aiogpu/node.pid", "aiogpu/node.sock"]

    with process_with_the_pid_of(sandbox, node) as process:
        out, _ = sandbox.run("stop", "--force")
        assert out == f"No node runs at {sandbox.place.socket}.\n"
        assert process.poll() is None
        sandbox.run("start", "--head", "--num-gpus=1")
        assert process.poll() is None
    node = sandbox.node
    assert node is not None
    # The node dies before it reads the drain request.
    os.kill(node.pid, signal.SIGSTOP)
    stopping_command = sandbox.start("stop", "--drain=0")
    ends = time.monotonic() + LIMIT
    while not os.path.exists(sandbox.place.drain_file):
        assert time.monotonic() < ends
    out, err = sandbox.run("stop", "--force")
    assert out.startswith(f"Killed the node at {sandbox.place.socket}")
    assert err == ""
    stopping_command.communicate(timeout=LIMIT)
    sandbox.wait_until_ended(5)
    assert sandbox.files == []


# Stopping a node while programs use it.


async def work() -> None:
    """Run tasks one after the other, until an error."""
    while True:
        assert await tasks.add.remote(1) == 2


async def until_refused() -> None:
    """Run tasks until the node refuses new work; all earlier ones succeed."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(aiogpu.errors.NodeClosedError, match="takes no new work"):
            await work()


async def stopped(sandbox: Sandbox, *arguments: str) -> tuple[str, str]:
    """Run `aiogpu stop` in a thread."""
    return await asyncio.to_thread(sandbox.run, "stop", *arguments)


@pytest.mark.either_loop
async def test_a_stopping_node_finishes_tasks_and_refuses_new_ones(
    sandbox: Sandbox, gate: Gate
) -> None:
    await asyncio.to_thread(
        sandbox.run, "start", "--head", "--num-cpus=2", "--num-gpus=1"
    )
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.options(num_gpus=1).remote(gate.path, "one")
        await gate.entered("one")
        # Submitted before the stop, waits for the GPU of the first task.
        waiting = tasks.add.options(num_gpus=1).remote(40, 2)
        stopping = asyncio.create_task(stopped(sandbox))
        await until_refused()
        out, _ = await asyncio.to_thread(sandbox.run, "status")
        assert out.startswith("is being stopped: no new work; running tasks have ")
        gate.release("one")
        assert await asyncio.gather(running, waiting) == ["one", 42]
        out, _ = await stopping
        assert out.startswith("Stopped the node")
        with pytest.raises(aiogpu.errors.NodeError):
            await tasks.add.remote(1)
    assert sandbox.files == []
    sandbox.wait_until_ended(0)


@pytest.mark.either_loop
@pytest.mark.slow
async def test_a_stopping_node_ends_tasks_that_exceed_the_drain(
    sandbox: Sandbox, gate: Gate
) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--drain=0.05")
    await asyncio.to_thread(sandbox.run, *start)
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        await stopped(sandbox)
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert sandbox.files == []


@pytest.mark.either_loop
async def test_a_second_sigterm_ends_a_service_at_once(
    sandbox: Sandbox, gate: Gate
) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--cancel-grace=60")
    await asyncio.to_thread(sandbox.run, *start)
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        stopping = asyncio.create_task(stopped(sandbox))
        await until_refused()
        node = sandbox.node
        assert node is not None
        os.kill(node.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            await stopping
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert sandbox.files == []


@pytest.mark.either_loop
async def test_a_drain_request_does_not_outlive_its_node(
    sandbox: Sandbox, gate: Gate
) -> None:
    """`aiogpu stop --drain` leaves the seconds in a file; the next node ignores it."""
    await asyncio.to_thread(sandbox.run, "start", "--head", "--num-cpus=2")
    first = sandbox.node
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    stopping_command = sandbox.start("stop", "--drain=0")
    await until(lambda: os.path.exists(sandbox.place.drain_file))
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(stopping_command.communicate, timeout=LIMIT)
    assert os.path.exists(sandbox.place.drain_file), "the node never read it"
    await asyncio.to_thread(
        sandbox.run, "start", "--head", "--num-cpus=2", "--drain=60"
    )
    second = sandbox.node
    assert second is not None
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        os.kill(second.pid, signal.SIGTERM)
        await until_refused()
        gate.release("one")
        assert await running == "one"
        await asyncio.to_thread(sandbox.wait_until_ended, 20)
    assert sandbox.files == []


@pytest.mark.either_loop
async def test_a_killed_node_leaves_no_process(sandbox: Sandbox, gate: Gate) -> None:
    await asyncio.to_thread(sandbox.run, "start", "--head", "--num-cpus=2")
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        node = sandbox.node
        assert node is not None
        os.kill(node.pid, signal.SIGKILL)
        with pytest.raises(aiogpu.NodeDiedError):
            await running
        await asyncio.to_thread(sandbox.wait_until_ended, 5)
    assert sandbox.files == ["aiogpu/node.pid", "aiogpu/node.sock"]


REASON = "for its program's own limit: it holds 0.5 of at most 0.5 GPU"


@pytest.mark.either_loop
async def test_a_waiting_task_is_explained_by_the_programs_limit(
    sandbox: Sandbox, gate: Gate
) -> None:
    limits = ("--max-waiting=2", "--max-share", '{"GPU": 0.5}')
    start = ("start", "--head", "--num-cpus=4", "--num-gpus=1", *limits)
    await asyncio.to_thread(sandbox.run, *start)
    async with aiogpu.init(address=sandbox.place.socket):
        running = tasks.gated.options(num_gpus=0.5).remote(gate.path, "a")
        await gate.entered("a")
        waiting = tasks.add.options(num_gpus=0.5).remote(1, 2)
        why = await waiting.why()
        assert REASON in str(why)
        where = f"--address={sandbox.place.socket}"
        (task,) = (await aiogpu.status()).waiting
        out, _ = await asyncio.to_thread(sandbox.run, "why", str(task.id), where)
        assert REASON in " ".join(out.split())
        with pytest.raises(
            aiogpu.errors.LimitError, match=r"has 2 unfinished tasks.* \(max_waiting\)"
        ):
            await tasks.add.remote(1)
        gate.release("a")
        assert await asyncio.gather(running, waiting) == ["a", 3]
        assert await tasks.add.remote(1) == 2
        with pytest.raises(aiogpu.InfeasibleError, match="this program may hold only"):
            await tasks.add.options(num_gpus=1).remote(1)


# A start that is interrupted, or whose node dies before it is ready, leaves nothing.


def start_that_hangs(
    sandbox: Sandbox, tmp_path: Path
) -> tuple[subprocess.Popen[str], Record]:
    """A start whose node imports for ever; returns the command and the node."""
    os.mkfifo(tmp_path / "never")
    (tmp_path / "endless.py").write_text(f"open({str(tmp_path / 'never')!r})\n")
    path = os.pathsep.join([str(tmp_path), sandbox.variables["PYTHONPATH"]])
    command = sandbox.start("start", "--head", "--preload=endless", PYTHONPATH=path)
    ends = time.monotonic() + LIMIT
    while (node := sandbox.node) is None:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < ends
    return command, node


@pytest.mark.slow
def test_ctrl_c_interrupts_a_start(sandbox: Sandbox, tmp_path: Path) -> None:
    command, _ = start_that_hangs(sandbox, tmp_path)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=LIMIT)
    assert (out, err.strip()) == ("", "Interrupted.")
    assert command.returncode == 130
    sandbox.wait_until_ended(5)
    assert sandbox.files == []


@pytest.mark.slow
def test_a_node_is_stopped_before_it_is_ready(sandbox: Sandbox, tmp_path: Path) -> None:
    command, node = start_that_hangs(sandbox, tmp_path)
    out, _ = sandbox.run("stop")
    assert f"(pid {node.pid})" in out
    _, err = command.communicate(timeout=LIMIT)
    assert err == "Error: the node was asked to stop before it was ready.\n"
    assert command.returncode == 1
    sandbox.wait_until_ended(5)
    assert sandbox.files == []


@pytest.mark.slow
def test_a_node_is_killed_before_it_is_ready(sandbox: Sandbox, tmp_path: Path) -> None:
    command, node = start_that_hangs(sandbox, tmp_path)
    os.kill(node.pid, signal.SIGKILL)
    _, err = command.communicate(timeout=LIMIT)
    assert "the node ended before it was ready (SIGKILL)" in err
    assert sandbox.place.logs in err
    assert command.returncode == 1
    sandbox.wait_until_ended(5)
