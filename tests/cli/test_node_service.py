"""Real nodes: started by the command, shared, stopped, killed, started anew."""

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
from tests.cli.box import LIMIT, Box
from tests.contract import tasks
from tests.faults.leftovers import processes_of
from tests.support.gate import Gate
from tests.support.until import until


def test_from_start_to_stop(here: Box) -> None:
    out, err = here.run("start", "--head", "--num-cpus=2", "--num-gpus=3")
    node = here.node
    assert node is not None
    assert err == ""
    assert os.stat(here.place.socket).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(here.place.socket)).st_mode & 0o777 == 0o700
    told = re.sub(r"memory: [\w.]+", "memory: M", out)
    assert told == (
        f"The node runs: pid {node.pid}, {{CPU: 2, memory: M, GPU: 3}}.\n"
        f"  address  {here.place.socket}\n"
        f"  logs     {here.place.logs}\n"
        f'  join     aiogpu.init(address="auto"), or AIOGPU_ADDRESS=auto\n'
        f"  stop     aiogpu stop\n"
    )
    assert os.getsid(node.pid) == node.pid, "no terminal's, and no shell's"
    assert os.readlink(f"/proc/{node.pid}/cwd") == "/"
    assert Path(f"/proc/{node.pid}/comm").read_text() == "aiogpu-node\n"
    command = Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")
    assert {b"aiogpu.daemon", here.place.socket.encode()} <= set(command)

    out, err = here.run("stop", "--drain=5")

    said = f"the node at {here.place.socket} (pid {node.pid})"
    assert err == f"Stopping {said}; what runs has 5.0 s to end.\n"
    assert re.fullmatch(rf"Stopped {re.escape(said)} in [\d.]+ s\.\n", out)
    assert processes_of(here.directory) == []
    assert here.files == []
    log = Path(f"{here.place.logs}/node.log").read_text()
    assert f"ready at {here.place.socket}" in log
    assert "what runs has 5.0 s to end" in log

    out, _ = here.run("stop")
    assert out == f"No node runs at {here.place.socket}.\n"


def test_a_start_that_fails_says_why(here: Box) -> None:
    _, err = here.run("start", "--head", "--preload=nosuchmodule", code=1)
    assert "'nosuchmodule', which cannot be imported" in err
    _, err = here.run(
        "start", "--head", "--num-gpus=3", CUDA_VISIBLE_DEVICES="7", code=2
    )
    assert "num_gpus=3, but CUDA_VISIBLE_DEVICES='7' names 1 device" in err
    os.chmod(f"{here.directory}/aiogpu", 0o755)
    _, err = here.run("start", "--head", code=1)
    assert "has mode 0755" in err
    os.chmod(f"{here.directory}/aiogpu", 0o700)
    assert processes_of(here.directory) == []
    assert here.files == []


@contextmanager
def given_its_number(here: Box, node: Record) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a dead node's number, as if the kernel had reused it.

    Only the start time tells: it even has the pidfile open.
    """
    pidfile = Path(here.place.pidfile)
    with (
        pidfile.open() as opened,
        subprocess.Popen(["sleep", "600"], stdin=opened) as victim,
    ):
        try:
            pidfile.write_text(json.dumps({**node._asdict(), "pid": victim.pid}))
            yield victim
        finally:
            victim.kill()


def test_of_two_starts_at_once_one_wins(here: Box) -> None:
    both = [here.begin("start", "--head", "--num-gpus=1") for _ in range(2)]
    heard = [command.communicate(timeout=LIMIT) for command in both]
    assert sorted(command.returncode for command in both) == [0, 1]
    node = here.node
    assert node is not None
    winner = next(out for out, err in heard if not err)
    loser = next(err for _, err in heard if err)
    assert f"pid {node.pid}" in winner
    assert f"a node runs at {here.place.socket} already (pid {node.pid})" in loser

    os.kill(node.pid, signal.SIGKILL)
    here.wait_for_the_end(5)
    # Its own directory goes with it; what is met at the place stays, and is stale.
    assert here.files == ["aiogpu/node.pid", "aiogpu/node.sock"]

    with given_its_number(here, node) as victim:
        out, _ = here.run("stop", "--force")
        assert out == f"No node runs at {here.place.socket}.\n"
        assert victim.poll() is None
        here.run("start", "--head", "--num-gpus=1")
        assert victim.poll() is None
    node = here.node
    assert node is not None
    # A drain request is left that the node does not live to read.
    os.kill(node.pid, signal.SIGSTOP)
    asking = here.begin("stop", "--drain=0")
    ends = time.monotonic() + LIMIT
    while not os.path.exists(here.place.drain_file):
        assert time.monotonic() < ends
    out, err = here.run("stop", "--force")
    assert out.startswith(f"Killed the node at {here.place.socket}")
    assert err == ""
    asking.communicate(timeout=LIMIT)
    here.wait_for_the_end(5)
    assert here.files == []


# A node that is asked to end while programs use it: drained, then stopped.


async def answered() -> None:
    """Ask for work, and for more, for as long as it is done."""
    while True:
        assert await tasks.add.remote(1) == 2


async def until_refused() -> None:
    """Ask for work until the node takes no more; it has answered until then."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(aiogpu.errors.NodeClosedError, match="takes no new work"):
            await answered()


async def stopped(here: Box, *arguments: str) -> tuple[str, str]:
    """Run `aiogpu stop` beside the loop."""
    return await asyncio.to_thread(here.run, "stop", *arguments)


@pytest.mark.either_loop
async def test_what_runs_ends_and_what_is_new_is_refused(here: Box, gate: Gate) -> None:
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2", "--num-gpus=1")
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.options(num_gpus=1).remote(gate.path, "one")
        await gate.entered("one")
        # It waits until the first one gives its GPU back, and was there before.
        waiting = tasks.add.options(num_gpus=1).remote(40, 2)
        stopping = asyncio.create_task(stopped(here))
        await until_refused()
        told, _ = await asyncio.to_thread(here.run, "status")
        assert told.startswith("is being stopped: no new work; what runs has ")
        gate.release("one")
        assert await asyncio.gather(running, waiting) == ["one", 42]
        out, _ = await stopping
        assert out.startswith("Stopped the node")
        with pytest.raises(aiogpu.errors.NodeError):
            await tasks.add.remote(1)
    assert here.files == []
    here.wait_for_the_end(0)


@pytest.mark.either_loop
@pytest.mark.slow
async def test_what_does_not_end_in_time_is_ended(here: Box, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--drain=0.05")
    await asyncio.to_thread(here.run, *start)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        await stopped(here)
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert here.files == []


@pytest.mark.either_loop
async def test_a_second_signal_ends_it_at_once(here: Box, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--cancel-grace=60")
    await asyncio.to_thread(here.run, *start)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        stopping = asyncio.create_task(stopped(here))
        await until_refused()
        node = here.node
        assert node is not None
        os.kill(node.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            await stopping
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert here.files == []


@pytest.mark.either_loop
async def test_a_drain_request_does_not_outlive_its_node(here: Box, gate: Gate) -> None:
    """`aiogpu stop --drain` leaves the seconds in a file; the next node ignores it."""
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
    first = here.node
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    asking = here.begin("stop", "--drain=0")
    await until(lambda: os.path.exists(here.place.drain_file))
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(asking.communicate, timeout=LIMIT)
    assert os.path.exists(here.place.drain_file), "the node never read it"
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2", "--drain=60")
    second = here.node
    assert second is not None
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        os.kill(second.pid, signal.SIGTERM)
        await until_refused()
        gate.release("one")
        assert await running == "one"
        await asyncio.to_thread(here.wait_for_the_end, 20)
    assert here.files == []


@pytest.mark.either_loop
async def test_a_killed_node_takes_all_along(here: Box, gate: Gate) -> None:
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        node = here.node
        assert node is not None
        os.kill(node.pid, signal.SIGKILL)
        with pytest.raises(aiogpu.NodeDiedError):
            await running
        await asyncio.to_thread(here.wait_for_the_end, 5)
    assert here.files == ["aiogpu/node.pid", "aiogpu/node.sock"]


TOLD = "for its program's own limit: it holds 0.5 of at most 0.5 GPU"


@pytest.mark.either_loop
async def test_limits_are_seen_by_those_who_wait(here: Box, gate: Gate) -> None:
    limits = ("--max-waiting=2", "--max-share", '{"GPU": 0.5}')
    start = ("start", "--head", "--num-cpus=4", "--num-gpus=1", *limits)
    await asyncio.to_thread(here.run, *start)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.options(num_gpus=0.5).remote(gate.path, "a")
        await gate.entered("a")
        waiting = tasks.add.options(num_gpus=0.5).remote(1, 2)
        why = await waiting.why()
        assert TOLD in str(why)
        where = f"--address={here.place.socket}"
        (task,) = (await aiogpu.status()).waiting
        told, _ = await asyncio.to_thread(here.run, "why", str(task.id), where)
        assert TOLD in " ".join(told.split())
        with pytest.raises(
            aiogpu.errors.LimitError, match=r"has 2 tasks .* \(max_waiting\)"
        ):
            await tasks.add.remote(1)
        gate.release("a")
        assert await asyncio.gather(running, waiting) == ["a", 3]
        assert await tasks.add.remote(1) == 2
        with pytest.raises(aiogpu.InfeasibleError, match="lets this program hold"):
            await tasks.add.options(num_gpus=1).remote(1)


# A start that is interrupted, or whose node dies on its way, leaves nothing.


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


@pytest.mark.slow
def test_a_start_is_interrupted(here: Box, tmp_path: Path) -> None:
    command, _ = begun(here, tmp_path)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=LIMIT)
    assert (out, err.strip()) == ("", "Interrupted.")
    assert command.returncode == 130
    here.wait_for_the_end(5)
    assert here.files == []


@pytest.mark.slow
def test_it_is_stopped_before_it_is_ready(here: Box, tmp_path: Path) -> None:
    command, node = begun(here, tmp_path)
    out, _ = here.run("stop")
    assert f"(pid {node.pid})" in out
    _, err = command.communicate(timeout=LIMIT)
    assert err == "Error: the node was asked to stop before it was ready.\n"
    assert command.returncode == 1
    here.wait_for_the_end(5)
    assert here.files == []


@pytest.mark.slow
def test_its_node_is_killed_on_its_way(here: Box, tmp_path: Path) -> None:
    command, node = begun(here, tmp_path)
    os.kill(node.pid, signal.SIGKILL)
    _, err = command.communicate(timeout=LIMIT)
    assert "the node ended before it was ready (SIGKILL)" in err
    assert here.place.logs in err
    assert command.returncode == 1
    here.wait_for_the_end(5)
