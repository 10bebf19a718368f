"""`aiogpu status`, `list` and `why` on pictures of nodes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len
from rich.console import Group

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.main import cli
from aiogpu.cli.status import sections
from aiogpu.cli.tables import plain
from aiogpu.observe.status import NodeStatus, TaskStatus
from tests.cli.pictures import BUSY, IDLE, JOB, stand_in


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views find a busy node."""
    stand_in(monkeypatch, BUSY)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views find a node that has nothing to do."""
    stand_in(monkeypatch, IDLE)


@pytest.mark.usefixtures("busy")
def test_a_pipe_gets_what_print_shows() -> None:
    result = ran("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{BUSY}\n"


@pytest.mark.usefixtures("busy")
def test_json_is_one_object_with_the_keys_in_their_order() -> None:
    told = json.loads(ran("status", "--json").stdout)
    assert list(told) == [
        *("version", "aiogpu", "healthy", "problems", "resources", "devices"),
        *("workers", "tasks", "waiting", "reservation", "clients", "actors"),
        *("failures", "draining", "placements", "outages"),
    ]
    assert told["version"] == 1
    assert told["resources"]["GPU"] == {"total": 3.0, "free": 0.25}
    assert told["waiting"]["tasks"] == 3
    assert told["reservation"]["devices"] == {"GPU": [1]}
    assert told["healthy"] is False
    assert told["problems"] == [f"GPU 2 is set aside: {BUSY.devices[2].aside}"]
    assert [one["pid"] for one in told["tasks"]] == [101, 102, 103, None]
    first = told["devices"][0]
    assert [one["task"] for one in first["holders"]] == ["Model 'serve'", "train"]
    assert first["others"] == [{"pid": 13, "name": "Xorg", "memory": 2 << 30}]
    assert told["devices"][2]["others"] is None


@pytest.mark.usefixtures("idle")
def test_json_of_an_idle_node() -> None:
    told = json.loads(ran("status", "--json").stdout)
    assert told["healthy"] is True
    assert told["reservation"] is None
    assert told["waiting"] == {"tasks": 0, "shapes": 0, "first": []}


def test_check_tells_scripts_of_a_device_that_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for picture, code in ((BUSY, 3), (IDLE, 0)):
        stand_in(monkeypatch, picture)
        with cli.make_context("aiogpu", ["status", "--check"]) as context:
            assert cli.invoke(context) == code
    stand_in(monkeypatch, BUSY)
    with cli.make_context("aiogpu", ["status"]) as context:
        assert cli.invoke(context) == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_shows_one_picture_after_the_other(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    class Ended(Exception):
        pass

    stand_in(monkeypatch, IDLE, BUSY)
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
    """A node with more than a screen shows, and with ugly names."""
    tasks = tuple(
        TaskStatus(n, "データ\x1b[2J" * 9, "running", {"CPU": 1.0}, n, None)
        for n in range(20)
    )
    return replace(BUSY, tasks=tasks)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("picture", [IDLE, BUSY, many()], ids=["idle", "busy", "many"])
def test_a_terminal_of_any_width_can_be_read(width: int, picture: NodeStatus) -> None:
    lines = list(plain(Group(*sections(picture)), width))
    assert all(cell_len(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    told = "\n".join(lines)
    for device in picture.devices:
        assert f"{device.kind} {device.id}" in told
    assert ("WAIT  ASK FOR" in told) is (picture is not IDLE)


def test_a_terminal_sees_sections() -> None:
    told = list(plain(Group(*sections(many())), 80))
    assert told[:5] == [
        "CPU      4 of 8 free",
        "GPU      0.25 of 3 free",
        "workers  2 busy, 1 idle",
        "tasks    20 running, 3 waiting",
        "GPU 2 is set aside: XID 79 (the GPU has fallen off the bus)",
    ]
    assert "and 12 more" in told
    assert "kept for train (task 12): GPU 1 and CPU 1" in told


@pytest.mark.usefixtures("busy")
def test_lists() -> None:
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
def test_what_is_listed_can_be_chosen(
    question: list[str], ids: list[int], left_out: int
) -> None:
    told = json.loads(ran("list", *question, "--json").stdout)
    assert list(told) == ["version", "left_out", question[0]]
    assert [one["id"] for one in told[question[0]]] == ids
    assert told["left_out"] == left_out


@pytest.mark.parametrize(
    ("what", "state", "first"),
    [("tasks", "wating", "waiting, expecting"), ("gpus", "idle", "free, shared")],
)
def test_a_state_that_there_is_not_is_bad_input(
    what: str, state: str, first: str
) -> None:
    result = ran("list", what, "--state", state)
    assert result.exit_code == 2
    assert f"{what} are never {state!r}. There are: {first}" in result.stderr


@pytest.mark.usefixtures("busy")
def test_what_is_not_listed_is_said_beside_the_list() -> None:
    result = ran("list", "tasks", "--limit", "3")
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr == "and 3 more\n"
    result = ran("list", "workers", "--state", "ending")
    assert (result.stdout, result.stderr) == ("", "There are no workers that fit.\n")


@pytest.mark.usefixtures("busy")
def test_why_by_number_by_name_and_of_several() -> None:
    told = "train (task 7) runs on worker 2 (pid 102).\n"
    assert ran("why", "7").stdout == told
    assert ran("why", "whole").stdout.startswith("whole (task 8) runs")
    assert ran("why", "serve").stdout.startswith("Model 'serve' (task 1) runs")
    several = ran("why", "train").stdout.splitlines()
    assert [line.split()[0] for line in several] == ["TASK", "7", "12"]


@pytest.mark.usefixtures("busy")
def test_why_of_what_is_not_there() -> None:
    result = ran("why", "nobody")
    assert result.exit_code == 1
    assert (
        "no task and no actor named 'nobody' waits or runs; the first" in result.stderr
    )
    assert isinstance(ran("why", "99").exception, aiogpu.errors.NoSuchTaskError)
    assert ran("why", "").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list"], "Missing argument"),
        (["list", "tsks"], "'tsks' is not one of"),
        (["list", "tasks", "--limit", "0"], "0 is not in the range"),
        (["status", "--interval", "0"], "0.0 is not in the range"),
        (["top", "--interval", "soon"], "'soon' is not a valid number of seconds"),
        (["why"], "Missing argument 'TASK'"),
        (["status", "--address", "inline"], "which only that program can ask"),
    ],
    ids=" ".join,
)
def test_bad_input_is_named(arguments: list[str], said: str) -> None:
    result = ran(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("view", [["status"], ["list", "gpus"], ["why", "1"], ["top"]])
def test_a_view_starts_no_node(
    view: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOGPU_ADDRESS", "local")
    result = ran(*view)
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: no node runs: there is no socket {tmp_path}/"
        f"aiogpu/node.sock. Start one by `aiogpu start --head`, or name "
        f"another node by --address.\n"
    )


@pytest.mark.parametrize("address", ["ray", "ray://host:10001"])
def test_a_ray_cluster_is_not_taken_for_a_socket(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", address)
    result = ran("status")
    assert result.exit_code == 1
    assert f"{address!r} is a Ray cluster, which Ray's own `ray" in result.stderr


def test_what_is_no_socket_is_said(tmp_path: object) -> None:
    result = ran("status", "--address", str(tmp_path))
    assert f"{tmp_path} is no socket" in result.stderr


def test_where_no_node_is_named_it_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given, meant in (("inline", "auto"), ("", "auto"), ("/run/x", "/run/x")):
        monkeypatch.setenv("AIOGPU_ADDRESS", given)
        assert connect.default_address() == meant


@pytest.mark.parametrize("command", ["completion", "list", "status", "top", "why"])
def test_help_has_examples_on_lines_of_their_own(command: str) -> None:
    told = ran(command, "--help").stdout
    assert "\n  Examples:\n" in told
    assert f" {command}" in told
