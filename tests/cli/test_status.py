"""`aiogpu status`, `list` and `why`, on fake nodes and on a real one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import click
import pexpect
import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

import aiogpu
from aiogpu.api.session import find_session
from aiogpu.cli import connect
from aiogpu.cli.main import cli
from aiogpu.cli.views.status import KINDS, data_of, sections
from aiogpu.cli.views.tables import WIDE, Column, Table, plain, text
from aiogpu.cli.views.top import render_body
from aiogpu.core.model.text import printable
from aiogpu.engines.local import LocalEngine
from aiogpu.observe.snapshot import snapshot
from aiogpu.observe.status import IdleEndStatus, NodeStatus, TaskStatus, UnendedStatus
from aiogpu.wire.messages import socket_path
from tests.cli.status_examples import BUSY, IDLE, JOB, answer_with
from tests.contract import tasks
from tests.contract.actor_classes import Counter
from tests.core.builders import World
from tests.support.gate import Gate
from tests.support.program import environment


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find a busy node."""
    answer_with(monkeypatch, BUSY)


@pytest.mark.usefixtures("busy")
def test_status_in_a_pipe_is_plain_text() -> None:
    result = ran("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{BUSY}\n"


@pytest.mark.usefixtures("busy")
def test_status_as_json_has_ordered_keys() -> None:
    told = json.loads(ran("status", "--json").stdout)
    assert list(told) == [
        *("version", "aiogpu", "healthy", "problems", "resources", "devices"),
        *("workers", "tasks", "waiting", "reservation", "clients", "actors"),
        *("failures", "draining", "placements", "outages", "unended", "ended_idle"),
    ]
    assert told["version"] == 1
    assert told["resources"]["GPU"] == {"total": 3.0, "free": 0.25}
    assert told["waiting"]["tasks"] == 3
    assert told["reservation"]["devices"] == {"GPU": [1]}
    assert told["healthy"] is False
    assert told["problems"] == [f"GPU 2 is set aside: {BUSY.devices[2].aside}"]
    assert [each["pid"] for each in told["tasks"]] == [101, 102, 103, None]
    first = told["devices"][0]
    assert [each["task"] for each in first["holders"]] == ["Model 'serve'", "train"]
    assert first["others"] == [{"pid": 13, "name": "Xorg", "memory": 2 << 30}]
    assert told["devices"][2]["others"] is None


def test_status_as_json_of_an_idle_node(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, IDLE)
    told = json.loads(ran("status", "--json").stdout)
    assert told["healthy"] is True
    assert told["reservation"] is None
    assert told["waiting"] == {"tasks": 0, "shapes": 0, "first": []}


def test_check_fails_if_a_device_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for picture, code in ((BUSY, 3), (IDLE, 0)):
        answer_with(monkeypatch, picture)
        with cli.make_context("aiogpu", ["status", "--check"]) as context:
            assert cli.invoke(context) == code
    answer_with(monkeypatch, BUSY)
    with cli.make_context("aiogpu", ["status"]) as context:
        assert cli.invoke(context) == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_prints_the_status_again_and_again(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    class Ended(Exception):
        pass

    answer_with(monkeypatch, IDLE, BUSY)
    shown: list[str] = []

    async def sleep(_seconds: float) -> None:
        shown.append("slept")
        if len(shown) == 2:
            raise Ended

    monkeypatch.setattr("asyncio.sleep", sleep)
    options = ["--watch", *["--json"] * as_json]
    result = ran("status", *options)
    assert isinstance(result.exception, Ended)
    if as_json:
        first, second = map(json.loads, result.stdout.splitlines())
        assert (first["healthy"], second["healthy"]) == (True, False)
    else:
        assert result.stdout == f"{IDLE}\n\n{BUSY}\n\n"


def many() -> NodeStatus:
    """A node with more tasks than a screen has lines, and with ugly names."""
    tasks = tuple(
        TaskStatus(n, "データ\x1b[2J" * 9, "running", {"CPU": 1.0}, n, None)
        for n in range(20)
    )
    return replace(BUSY, tasks=tasks)


def test_status_fits_a_terminal_of_any_width() -> None:
    for width, picture in product([40, 60, 100, 140, 200], [IDLE, BUSY, many()]):
        lines = list(plain(Group(*sections(picture)), width))
        assert all(cell_len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
        told = "\n".join(lines)
        for device in picture.devices:
            assert f"{device.kind} {device.id}" in told
        assert ("WAIT  ASK FOR" in told) is (picture is not IDLE)


def test_status_in_a_terminal_has_sections() -> None:
    told = list(plain(Group(*sections(many())), 80))
    assert told[:5] == [
        "CPU      4 of 8 free",
        "GPU      0.25 of 3 free",
        "workers  2 busy, 1 idle",
        "tasks    20 running, 3 waiting",
        "GPU 2 is set aside: XID 79 (the GPU has fallen off the bus)",
    ]
    assert "and 12 more" in told
    assert "kept for train (task 12): device GPU 1 and 1 CPU" in told


@pytest.mark.usefixtures("busy")
def test_list_shows_each_kind() -> None:
    assert ran("list", "tasks").stdout.splitlines() == [
        "TASK  NAME           STATE    PID  PROGRAM        ASKS FOR             WHY",
        "   1  Model 'serve'  running  101                 {GPU: 0.5}",
        "   7  train          running  102  train.py 4711  {CPU: 1, GPU: 0.25}",
        "   8  whole          leased   103                 {CPU: 1, GPU: 1}",
        "  12  train          waiting                      {CPU: 1, GPU: 1}     "
        "waits for GPU 1 (free by device: 0: 0.25, 1: 0, 2: set aside)",
    ]
    assert ran("list", "actors").stdout.splitlines() == [
        "ACTOR  NAME   CLASS  STATE    PID  HELD BY  CALLS  PROGRAM",
        "    1  serve  Model  alive    101        2      3",
        "    9         Cache  pending             1         train.py 4711",
    ]
    assert ran("list", "clients").stdout.splitlines() == [
        "PROGRAM                  PID        ID  RUN  WAIT  HOLDS"
        "                WEIGHT  MAY HAVE",
        "the node's own program                    2     0  {CPU: 1, GPU: 1.5}",
        "train.py                4711  67108864    1     3  {CPU: 1, GPU: 0.25}       2"
        "  100 tasks, 50 % of GPU",
        "notebook                4712  67108873    0     0                             "
        "                          has left",
    ]
    assert ran("list", "workers").stdout.splitlines() == [
        "WORKER  PID  STATE  TASK",
        "     1  101  busy   Model 'serve'",
        "     2  102  busy   train",
        "     4  104  idle",
    ]
    assert ran("list", "gpus", "--state", "full").stdout.splitlines() == [
        "DEVICE  NAME                   STATE  FREE    MEMORY  BUSY  HELD BY",
        "GPU 1   NVIDIA A100-SXM4-40GB  full      0  0/40 GiB   0 %  1 whole",
    ]


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("question", "ids", "left_out"),
    [
        (["tasks"], [1, 7, 8, 12], 2),
        (["tasks", "--limit", "2"], [1, 7], 4),
        (["tasks", "--state", "waiting"], [12], 0),
        (["tasks", "--name", "tr*", "--limit", "1"], [7], 1),
        (["actors", "--name", "Ca?he"], [9], 0),
        (["actors", "--name", "serve", "--state", "alive"], [1], 0),
        (["workers", "--state", "idle"], [4], 0),
        (["gpus", "--name", "GPU 2"], [2], 0),
        (["clients", "--name", "*.py"], [JOB], 0),
        (["clients", "--state", "left"], [JOB + 9], 0),
        (["gpus", "--state", "free"], [], 0),
    ],
)
def test_list_filters_and_limits_rows(
    question: list[str], ids: list[int], left_out: int
) -> None:
    told = json.loads(ran("list", *question, "--json").stdout)
    assert list(told) == ["version", "left_out", question[0]]
    assert [each["id"] for each in told[question[0]]] == ids
    assert told["left_out"] == left_out


@pytest.mark.usefixtures("busy")
def test_list_says_how_many_rows_are_left_out() -> None:
    result = ran("list", "tasks", "--limit", "3")
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr == "and 3 more\n"
    result = ran("list", "workers", "--state", "ending")
    assert (result.stdout, result.stderr) == ("", "There are no matching workers.\n")
    for kind, state, first in (
        ("tasks", "wating", "waiting, expecting"),
        ("gpus", "idle", "free, shared"),
    ):
        result = ran("list", kind, "--state", state)
        assert result.exit_code == 2
        message = f"{kind} have no state {state!r}. The states are: {first}"
        assert message in result.stderr


@pytest.mark.usefixtures("busy")
def test_why_takes_a_number_or_a_name() -> None:
    told = "train (task 7) runs on worker 2 (pid 102).\n"
    assert ran("why", "7").stdout == told
    assert ran("why", "whole").stdout.startswith("whole (task 8) runs")
    assert ran("why", "serve").stdout.startswith("Model 'serve' (task 1) runs")
    several = ran("why", "train").stdout.splitlines()
    assert [line.split()[0] for line in several] == ["TASK", "7", "12"]


@pytest.mark.usefixtures("busy")
def test_list_shows_ended_tasks_by_state() -> None:
    def listed(*more: str) -> list[int]:
        told = json.loads(ran("list", "tasks", "--json", *more).stdout)
        return [each["task"] for each in told["tasks"]]

    assert listed("--state", "failed") == [6, 5]
    assert listed("--state", "failed", "--name", "tr*") == [5]
    assert listed("--state", "finished") == [4]
    assert listed("--state", "cancelled", "--limit", "1") == [3]
    result = ran("list", "actors", "--state", "failed")
    assert (result.exit_code, "actors have no state 'failed'" in result.stderr) == (
        2,
        True,
    )


@pytest.mark.usefixtures("busy")
def test_why_as_json_describes_the_last_ended_task() -> None:
    told = json.loads(ran("why", "load", "--json").stdout)
    assert told["version"] == 1
    (task,) = told["tasks"]
    assert (task["task"], task["state"], task["ended"]["state"]) == (
        *(6, "ended", "failed"),
    )
    assert task["ended"]["error"] == "torch.OutOfMemoryError"
    several = json.loads(ran("why", "train", "--json").stdout)["tasks"]
    assert [each["task"] for each in several] == [7, 12], "those that live go first"


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("line", "code", "message", "error"),
    [
        (
            "cancel 7 6",
            0,
            "cancelled train (task 7)\nload (task 6) has already ended",
            "",
        ),
        ("cancel whole", 1, "", "whole is held by a program (pid "),
        ("cancel serve", 1, "", "is an actor: to end it, run `aiogpu kill 1`"),
        (
            "cancel train",
            1,
            "",
            "2 tasks are named train: 7, 12. Give a number, or give --all",
        ),
        ("cancel --all train", 0, "cancelled train (task 7)\ncancelled", ""),
        ("cancel 99 7", 1, "cancelled train (task 7)", "has no task 99. `aiogpu li"),
        ("cancel nobody", 1, "", "no task and no actor named 'nobody' waits or runs"),
        ("cancel load", 0, "load (task 6) has already ended: failed 2.0 s ago\n", ""),
        ("cancel embed 4", 0, "embed (task 4) has already ended: finished", ""),
        ("cancel", 2, "", "Missing argument 'TASK...'"),
        ("kill 1", 0, "killed Model 'serve' (actor 1)", ""),
        ("kill 7", 1, "", "train is a task: to end it, run `aiogpu cancel 7`"),
        ("kill load", 1, "", "no task and no actor named 'load' waits or runs"),
        ("kill", 2, "", "Missing argument 'ACTOR...'"),
    ],
)
def test_cancel_and_kill_report_what_they_did(
    line: str, code: int, message: str, error: str
) -> None:
    result = ran(*line.split())
    assert result.exit_code == code
    assert result.stdout.startswith(message)
    assert error in result.stderr
    assert bool(result.stderr) is bool(error)


@pytest.mark.usefixtures("busy")
def test_why_of_an_unknown_task_is_an_error() -> None:
    result = ran("why", "nobody")
    assert result.exit_code == 1
    assert (
        "no task and no actor named 'nobody' waits or runs. `aiogpu list tasks` "
        "shows the tasks. Only the first"
    ) in result.stderr
    assert isinstance(ran("why", "99").exception, aiogpu.errors.NoSuchTaskError)
    for name in "Model.hang", "serve.hang":
        assert ran("why", name).stderr == (
            f"Error: no task and no actor named '{name}' waits or runs. Calls of "
            f"actors are not listed one by one, unless they have failed; `aiogpu why "
            f"1` explains the actor.\n"
        )
    assert ran("why", "").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "Missing argument"),
        (["list", "tsks"], "'tsks' is not one of"),
        (["list", "tasks", "--limit", "0"], "0 is not in the range"),
        (["status", "--interval", "0"], "0.0 is not in the range"),
        (["logs", "--client", "x"], "'x' is not a valid whole number"),
        (["top", "--interval", "soon"], "'soon' is not a valid number of seconds"),
        (["why"], "Missing argument 'TASK'"),
        (["status", "--address", "inline"], "Give the program's --pid"),
    ],
    ids=" ".join,
)
def test_bad_input_is_an_error(arguments: list[str], message: str) -> None:
    result = ran(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_view_starts_no_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOGPU_ADDRESS", "local")
    for view in (["status"], ["list", "gpus"], ["why", "1"], ["top"]):
        result = ran(*view)
        assert result.exit_code == 1
        assert result.stderr == (
            f"Error: no node runs: there is no socket {tmp_path}/"
            f"aiogpu/node.sock, and no socket of a program in {tmp_path}. "
            f"Start one by `aiogpu start --head`, or give another node by --address.\n"
        )
    for address in ("ray", "ray://host:10001"):
        monkeypatch.setenv("AIOGPU_ADDRESS", address)
        result = ran("status")
        assert result.exit_code == 1
        assert (
            f"{address!r} is a Ray cluster; use Ray's own command, such as `ray"
            in result.stderr
        )
    result = ran("status", "--address", str(tmp_path))
    assert f"{tmp_path} is a directory, not the socket" in str(result.exception)


def test_without_an_address_the_users_own_node_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for arguments, meant in (("inline", "auto"), ("", "auto"), ("/run/x", "/run/x")):
        monkeypatch.setenv("AIOGPU_ADDRESS", arguments)
        assert connect.default_address() == meant


# Placements.


def placements() -> NodeStatus:
    """Placements: one held and used, one waiting, one ending."""
    w = World(cpus=8, gpus=3)
    w.placement_group("held", {"GPU": 1, "CPU": 2}, {"GPU": 0.5})
    w.submit_in("held", "m", 0, num_gpus=0.25, num_cpus=1)
    w.placement_group("ends", {"GPU": 1})
    w.submit_in("ends", "n", num_gpus=1)
    w.placement_group("waits", {"GPU": 1}, strategy="SPREAD")
    w.cancel("ends")
    pids = {w.placement_groups["held"]: 4711}
    return snapshot(w.scheduler, pids, w.now)


def test_list_shows_placements_with_their_bundles() -> None:
    status = placements()
    kind = KINDS["placements"]
    entries = kind.entries(status)
    assert [(kind.names(each)[0], kind.state(each)) for each in entries] == [
        ("held", "ready"),
        ("ends", "removing"),
        ("waits", "waiting"),
    ]
    told = "\n".join(plain(kind.table(entries, status)))
    used = "{CPU: 2, GPU: 1} on GPU 0, used: {CPU: 1, GPU: 0.25}; {GPU: 0.5} on GPU 1"
    assert used in told
    assert "waits for GPU 1 (free by device: 0: 0, 1: 0.5, 2: 0)" in told


def test_status_shows_placements() -> None:
    told = "\n".join(plain(Group(*sections(placements())), 200))
    assert "placements" in told
    lines = Group(*render_body(placements(), "free", 200))
    assert "placements: 3" in list(plain(lines))
    printed = str(placements())
    assert "  0  held  PACK  ready  pid 4711, 1 in it" in printed
    assert "    bundle 1: {GPU: 0.5} on GPU 1" in printed
    assert "leases" not in printed


def test_placement_as_json_is_complete() -> None:
    status = placements()
    told = json.loads(json.dumps(data_of(status.placements[0])))
    assert len(told.pop("id")) > 0
    assert told == {
        "task": 0,
        "name": "held",
        "state": "ready",
        "strategy": "PACK",
        "bundles": [
            {
                "request": {"CPU": 2.0, "GPU": 1.0},
                "free": {"CPU": 1.0, "GPU": 0.75},
                "devices": {"GPU": [0]},
            },
            {"request": {"GPU": 0.5}, "free": {"GPU": 0.5}, "devices": {"GPU": [1]}},
        ],
        "members": 1,
        "client": 0,
        "pid": 4711,
        "reason": None,
        "detached": False,
    }
    waits = data_of(status.placements[2])
    assert waits["pid"] is None
    assert waits["bundles"][0]["devices"] == {}
    assert waits["reason"].startswith("waits for GPU 1")


# A real node.


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[str]:
    """A node of this process that commands can reach; yields its socket."""
    path = f"{place}/node.sock"
    async with aiogpu.init(address="local", num_cpus=2, num_gpus=1):
        engine = find_session().engine
        assert isinstance(engine, LocalEngine)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        await engine.serve(listening)
        yield path


async def view(*arguments: str) -> tuple[int, str, str]:
    """Run a command in a process; return exit code, stdout and stderr."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiogpu", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, err = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode is not None
    return program.returncode, out.decode(), err.decode()


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.either_loop
async def test_commands_show_a_real_node(tmp_path: Path, gate: Gate) -> None:
    async with served(tmp_path) as path:
        actor = Counter.options(name="tally").remote()
        await actor.add.remote()
        with pytest.raises(KeyError):
            await tasks.fail.remote(KeyError, "x")
        for wrong in "none", "the last":
            with pytest.raises(TypeError):
                await actor.add.remote(wrong)
        running = tasks.gated.options(num_gpus=0.75).remote(gate.path, "runs")
        await gate.entered("runs")
        waiting = tasks.gated.options(num_gpus=0.5).remote(gate.path, "waits")
        here = await aiogpu.status()
        number = next(task.id for task in here.tasks if task.state == "waiting")
        (counter,) = here.actors
        told, listed, why, unknown, called, of_call, actor_s = await asyncio.gather(
            view("status", "--json", "--address", path),
            view("list", "actors", "--address", path),
            view("why", str(number), "--address", path),
            view("why", "999999", "--address", path),
            view("why", "Counter.add", "--address", path),
            view("why", "tally.add", "--json", "--address", path),
            view("why", str(counter.id), "--address", path),
        )
        assert (told[0], listed[0], why[0]) == (0, 0, 0), (told, listed, why)
        seen = json.loads(told[1])
        assert seen["resources"]["GPU"] == {"total": 1.0, "free": 0.25}
        (device,) = seen["devices"]
        assert [each["task"] for each in device["holders"]] == ["gated"]
        assert seen["waiting"]["tasks"] == 1
        errors = [each["error"] for each in seen["failures"]]
        assert errors == ["TypeError", "TypeError", "KeyError"]
        assert [each["name"] for each in seen["actors"]] == ["tally"]
        assert listed[1].splitlines()[1].split()[1:4] == ["tally", "Counter", "alive"]
        assert why[1].startswith(f"gated (task {number}) has waited")
        assert "0.75 of GPU 0: held by gated" in why[1]
        assert unknown[0] == 1
        assert "this node has no task 999999" in unknown[2]
        assert "`aiogpu list tasks` shows" in unknown[2]
        first, *trace, last = called[1].splitlines()
        begin = f"Counter 'tally'.add (call of actor {counter.id}) failed "
        assert first.startswith(begin), called
        assert trace[0] == "  Traceback (most recent call last):"
        assert last.startswith("  TypeError: ")
        (ended,) = json.loads(of_call[1])["tasks"]
        assert ended["name"] == "Counter 'tally'.add"
        assert ended["ended"]["call"] is True
        head, line = actor_s[1].splitlines()
        assert head.startswith(f"Counter 'tally' (task {counter.id}) runs on worker ")
        assert line.startswith("  Counter 'tally'.add failed ")
        assert line.endswith("; `aiogpu why tally.add` shows the traceback")
        assert ended["ended"]["traceback"].rstrip().endswith(last.strip())
        gate.release("runs")
        await gate.entered("waits")
        gate.release("waits")
        await asyncio.gather(running, waiting)
        after = await aiogpu.status()
        assert len(after.actors) == len(here.actors), "a view has left something"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.either_loop
async def test_commands_end_tasks_and_actors_of_a_real_node(
    tmp_path: Path, gate: Gate
) -> None:
    async with served(tmp_path) as path:
        actor = Counter.options(name="tally").remote()
        await actor.add.remote()
        (listed,) = (await aiogpu.status()).actors
        # The second task waits: there is one GPU.
        blocked = tasks.gated_coroutine.options(num_gpus=1, max_retries=3)
        runs = blocked.remote(gate.path, "runs")
        await gate.entered("runs")
        waits = blocked.remote(gate.path, "waits")
        numbers = [
            str(task.id)
            for task in (await aiogpu.status()).tasks
            if task.name == "gated_coroutine"
        ]
        cancelled = await view("cancel", *numbers, "--address", path)
        assert cancelled == (
            0,
            "".join(f"cancelled gated_coroutine (task {each})\n" for each in numbers),
            "",
        )
        for handle in (runs, waits):
            with pytest.raises(aiogpu.TaskCancelledError, match=r"by `aiogpu cancel`"):
                await handle
        killed = await view("kill", "tally", "--address", path)
        name = f"Counter 'tally' (actor {listed.id})"
        assert killed == (0, f"killed {name}\n", "")
        with pytest.raises(aiogpu.ActorDiedError, match="was killed"):
            await actor.add.remote()
        while (await aiogpu.why(listed.id)).ended is None:
            await asyncio.sleep(0)  # its process has not gone yet
        told = await view("why", "tally", "--address", path)
        assert told[1].startswith(f"Counter 'tally' (task {listed.id}) cancelled ")
        again = await view("cancel", numbers[1], "gated_coroutine", "--address", path)
        assert again[0] == 0
        for line in again[1].splitlines():
            assert line.startswith("gated_coroutine (task ")
            assert ") has already ended: cancelled " in line
        killed = await view("kill", "tally", "--address", path)
        assert killed[0] == 0
        assert killed[1].startswith(f"{name} has already ended: cancelled ")


@pytest.mark.parametrize("is_service", [True, False], ids=["service", "program"])
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.either_loop
async def test_all_tasks_with_a_name_are_cancelled_but_leases_go_on(
    tmp_path: Path, gate: Gate, is_service: bool
) -> None:
    async with AsyncExitStack() as stack:
        if is_service:
            path = await stack.enter_async_context(served(tmp_path))
        else:
            await stack.enter_async_context(
                aiogpu.init(address="local", num_cpus=2, num_gpus=1)
            )
            engine = find_session().engine
            assert isinstance(engine, LocalEngine)
            path = socket_path(engine._supervisor.directory)
        lease = await stack.enter_async_context(
            aiogpu.lease(num_cpus=0.5, name="train")
        )
        train = tasks.gated.options(num_gpus=1, num_cpus=0, name="train")
        runs = train.remote(gate.path, "runs")
        await gate.entered("runs")
        waiting = [train.remote(gate.path, "waits") for _ in range(500)]
        other = tasks.gated.options(num_gpus=1, name="other").remote(gate.path, "other")
        code, out, err = await view("cancel", "train", "--address", path)
        assert (code, out) == (1, "")
        assert err.startswith("Error: 502 tasks are named train: ")
        assert ", and 494 more. Give a number, or give --all.\n" in err
        code, out, err = await view("cancel", "--all", "train", "--address", path)
        assert code == 1
        assert err.startswith(f"Error: train is held by a program (pid {os.getpid()})")
        lines = out.splitlines()
        assert len(lines) == 9
        assert all(line.startswith("cancelled train (task ") for line in lines[:-1])
        assert lines[-1] == "cancelled 493 more tasks named train"
        for handle in (runs, *waiting):
            with pytest.raises(aiogpu.TaskCancelledError, match=r"by `aiogpu cancel`"):
                await handle
        assert lease.ids is not None
        # No waiting task has started instead of the cancelled one.
        await gate.entered("other")
        assert "waits" not in gate.pids
        code, out, err = await view("cancel", "--all", "train", "--address", path)
        assert (code, out) == (1, ""), "the lease is left"
        gate.release("other")
        await other
    assert err.startswith("Error: train is held by a program")


def test_a_socket_without_a_listener_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as remaining:
        remaining.bind(path)
    result = ran("status", "--address", path)
    assert (result.exit_code, result.stdout) == (1, "")
    message = f"Error: no node can be reached at {path}: Connection ref"
    assert result.stderr.startswith(message)
    assert "aiogpu start --head" in result.stderr
    assert os.path.exists(path)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.either_loop
async def test_a_command_gives_up_on_a_node_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as path:
        monkeypatch.setattr(find_session().engine, "status", asyncio.Event().wait)
        with pytest.raises(click.ClickException) as error:
            await asyncio.to_thread(connect.ask, path, lambda node: node.status(), 0.1)
        told = f"the node at {path} has not answered within 0.1 s"
        assert told in str(error.value)


@pytest.mark.either_loop
async def test_a_command_gives_up_on_a_node_that_accepts_no_one(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as no_answer_error:
        no_answer_error.bind(path)
        no_answer_error.listen()
        with pytest.raises(click.ClickException, match=r"not answered within 0\.1 s"):
            async with connect.joined(path, 0.1):
                pass


# Tables for the width of a terminal, with or without colours.


TABLE = Table(
    [
        ("1", "train", "", "101", ""),
        ("20", Text("a-long-name", "red"), "", "", "waits for its turn"),
    ],
    Column("TASK", lambda row: row[0], is_number=True),
    Column("NAME", lambda row: row[1], least=4),
    Column("EMPTY", lambda row: row[2]),
    Column("PID", lambda row: row[3], is_number=True, rank=1),
    Column("WHY", lambda row: row[4], least=5, rank=2),
)


def told(table: Table, width: int = WIDE) -> list[str]:
    return list(plain(table, width))


def test_a_table_without_a_width_drops_only_empty_columns() -> None:
    assert told(TABLE) == [
        "TASK  NAME         PID  WHY",
        "   1  train        101",
        "  20  a-long-name       waits for its turn",
    ]


def test_a_narrow_table_cuts_the_widest_column_then_drops_the_least_important() -> None:
    assert told(TABLE, 30)[2] == "  20  a-long…       waits for…"
    assert told(TABLE, 20)[1:] == ["   1  train      101", "  20  a-long-n…"]
    assert told(TABLE, 12)[1:] == ["   1  train", "  20  a-lon…"]


def test_wide_characters_count_twice() -> None:
    table = Table(
        [("データ処理", "1")],
        Column("NAME", lambda row: row[0], least=4),
        Column("ID", lambda row: row[1]),
    )
    assert told(table)[1] == "データ処理  1"
    assert told(table, 11)[1] == "データ…  1"


def test_names_cannot_send_control_codes_to_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\nc\u202e") == "a?]0;title?b?c?"
    table = Table(["\x1b[2J"], Column("NAME", str))
    assert told(table)[1] == "?[2J"
    assert text("[red]a").plain == "[red]a"


def test_any_part_of_a_table_fits_any_width() -> None:
    for width in range(1, 80):
        assert all(cell_len(line) <= width for line in told(TABLE, width)), width
    assert list(plain(TABLE.part(0, 2))) == ["TASK  NAME   PID", "   1  train  101"]
    assert list(plain(TABLE.part(2, 9))) == ["20  a-long-name  waits for its turn"]
    segments = Console(width=12).render_lines(TABLE)[-1]
    assert [each.text for each in segments if each.style and each.style.color] == [
        "a-lon…"
    ]


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def shown(*arguments: str, columns: int, **variables: str) -> list[str]:
    """The lines that a command prints."""
    environ = environment(TERM="xterm-256color", **variables)
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        if name not in variables:
            environ.pop(name, None)
    program = pexpect.spawn(
        sys.executable,
        ["-m", "tests.cli.status_examples", "busy", *arguments],
        env=environ,  # type: ignore[arg-type]
        dimensions=(50, columns),
        encoding="utf-8",
        timeout=60,
    )
    try:
        program.expect(pexpect.EOF)
        told = program.before
        assert isinstance(told, str)
        assert told.endswith("\r\n"), "where a prompt would be"
        return told.splitlines()
    finally:
        program.close(force=True)


def test_tables_are_as_wide_as_the_terminal() -> None:
    lines = shown("status", columns=60)
    told = [COLOUR.sub("", line).rstrip() for line in lines]
    assert told == list(plain(Group(*sections(BUSY)), 60))
    assert any("\x1b[1;31m" in line and "set aside" in line for line in lines)


def test_colours_are_off_on_request() -> None:
    """An encoding without the characters is no failure."""
    variables = {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    lines = shown("list", "tasks", columns=60, **variables)
    assert "\x1b[3" not in "".join(lines)
    (cut,) = [line for line in lines if "whole" in line]
    assert "?" in cut


def test_status_names_what_has_not_ended_and_what_was_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = UnendedStatus(3, (4711,), ("D",), 12.0)
    lessee = UnendedStatus(4, (4712, 4713), ("S", "R"), 2.0, is_lease=True)
    idle = IdleEndStatus(5, 4714, 3 << 29, 1.0)
    answer_with(monkeypatch, replace(BUSY, unended=(left, lessee), ended_idle=(idle,)))
    text = ran("status").stdout
    named = (
        "worker 3 keeps what it holds: process 4711 (state D, waits in the kernel) has"
    )
    assert f"{named} not ended 12 s after SIGKILL\n" in text
    assert "processes 4712 (state S, sleeps), 4713 (state R, runs) have used" in text
    assert "idle worker 5 (pid 4714) was ended 1.0 s ago: it kept " in text
    told = json.loads(ran("status", "--json").stdout)
    assert told["unended"][0]["states"] == ["D"]
    assert told["ended_idle"][0]["used"] == 3 << 29
    # Processes with a returned lease may go on.
    assert [problem for problem in told["problems"] if "holds" in problem] == [
        f"{named} not ended 12 s after SIGKILL"
    ]
