"""Nodes inside programs, and how commands find them: by pid, by address, or alone.

`tests/contract/test_viewers.py` tests the answers of such a node.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiogpu.cli import connect
from aiogpu.cli.main import main
from tests.cli.sandbox import LIMIT, Sandbox

NOBODY = 65534
SCRIPT = """
import asyncio, sys, aiogpu
from aiogpu.api.session import find_session

@aiogpu.remote
def train():
    pass

async def main():
    nodes = int(sys.argv[1])
    async with aiogpu.init(address="local", num_cpus=2, num_gpus=2):
        async with aiogpu.lease(num_gpus=1, name="held"):
            waiting = train.options(num_gpus=2, name="waits").remote()
            while not (await aiogpu.status()).waiting_count:
                await asyncio.sleep(0)
            print(find_session().engine._supervisor.directory, flush=True)
            if nodes == 2:
                await asyncio.to_thread(asyncio.run, second_main())
            await asyncio.to_thread(sys.stdin.readline)
            waiting.cancel()

async def second_main():
    async with aiogpu.init(address="local", num_cpus=1, num_gpus=0):
        print("second node", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


class Program:
    """A program with a node inside it.

    Attributes:
        pid: the process.
        directory: the directory of its node.
        address: the address of its node.
    """

    def __init__(self, process: subprocess.Popen[str], nodes: int) -> None:
        self.process = process
        self.pid = process.pid
        assert process.stdout is not None
        self.directory = process.stdout.readline().strip()
        assert os.path.isdir(self.directory)
        if nodes == 2:
            assert process.stdout.readline() == "second node\n"
        self.address = f"{self.directory}/node.sock"


@contextmanager
def program(
    sandbox: Sandbox, name: str, nodes: int = 1, **variables: str
) -> Iterator[Program]:
    """A program with this name, which ends without an error at the end of the block."""
    script = Path(sandbox.directory, name)
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", str(script), str(nodes)],
        env={**sandbox.variables, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Program(process, nodes)
            if process.poll() is None:
                _, errors = process.communicate("\n" * nodes, timeout=LIMIT)
                assert process.returncode == 0, errors
                assert "Traceback" not in errors
        finally:
            process.kill()


Command = Callable[..., tuple[str, str]]


@pytest.fixture
def run(
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Run an `aiogpu` command in this process; return its stdout and stderr."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", sandbox.directory)
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)

    def run(*arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["aiogpu", *arguments])
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, (out, err)
        return out, err

    return run


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines()]


def test_commands_list_all_nodes_and_select_one(sandbox: Sandbox, run: Command) -> None:
    with program(sandbox, "train.py") as train, program(sandbox, "serve.py") as serve:
        # Two programs and no service.
        out, err = run("status")
        assert err == ""
        head, first, second, advice = rows(out)
        assert head == [
            "PID",
            "PROGRAM",
            "SINCE",
            "RUN",
            "WAIT",
            "FREE",
            "GPUS",
            "ADDRESS",
        ]
        for row, each, name in (
            (first, train, "train.py"),
            (second, serve, "serve.py"),
        ):
            assert row[:2] == [str(each.pid), name]
            assert row[-6:] == ["1", "1", "1", "of", "2", each.address]
        assert advice[-4:] == ["such", "as", "--pid", f"{train.pid}."]
        data = json.loads(run("status", "--json", "--check")[0])
        assert data["healthy"] is True
        assert [each["pid"] for each in data["nodes"]] == [train.pid, serve.pid]
        assert data["nodes"][1]["status"]["waiting"]["tasks"] == 1
        out, _ = run("list", "nodes", "--name", "serve*", AIOGPU_ADDRESS="auto")
        assert [row[0] for row in rows(out)] == ["PID", str(serve.pid)]
        listed = json.loads(run("list", "nodes", "--limit", "1", "--json")[0])
        assert (listed["left_out"], len(listed["nodes"])) == (1, 1)
        # Commands about one node name both, and do nothing.
        for view in (["list", "tasks"], ["why", "1"], ["top"]):
            out, err = run(*view, code=2)
            assert out == ""
            assert err.startswith(
                f"Error: this user has 2 nodes; choose one by --pid or --address, "
                f"such as --pid {train.pid}.\n"
            )
            assert f"{serve.pid}  serve.py" in err
        _, err = run("logs", code=1)
        assert "A node of `aiogpu start --head` writes them beside its socket" in err
        # A node is selected by pid or address.
        for choice in (f"--pid={serve.pid}", f"--address={serve.address}"):
            assert run("status", choice)[0].startswith("CPU      2 of 2 free\n")
            assert "held" in run("list", "tasks", choice)[0]
            assert run("top", choice)[0].startswith("CPU")
            assert "1 of GPU 0: held by held" in run("why", "waits", choice)[0]
            err = run("logs", choice, code=1)[1]
            assert "is inside a program and keeps no log" in err
            events = json.loads(run("timeline", "-", choice)[0])["traceEvents"]
            assert {event["ph"] for event in events} == {"M"}, "nothing has run"
        _, err = sandbox.run("run", f"--address={serve.address}", "true", code=125)
        assert "takes no work" in err
        # A shell completes pids and tasks.
        out, _ = run(
            _AIOGPU_COMPLETE="bash_complete",
            COMP_WORDS=f"aiogpu why --pid {str(serve.pid)[0]}",
            COMP_CWORD="3",
        )
        assert f"plain,{serve.pid}" in out.splitlines()
        out, _ = run(
            _AIOGPU_COMPLETE="bash_complete",
            COMP_WORDS=f"aiogpu why --pid {serve.pid} w",
            COMP_CWORD="4",
        )
        assert out == "plain,waits\n"
        # A command about one node does not touch the other.
        out, _ = run("cancel", "waits", f"--pid={serve.pid}")
        assert out.startswith("cancelled waits (task ")
        assert "waits" not in run("list", "tasks", f"--pid={serve.pid}")[0]
        assert "waits" in run("list", "tasks", f"--pid={train.pid}")[0]
        # A service is a third node, and the default.
        sandbox.run("start", "--head", "--num-gpus=1", "--num-cpus=1")
        assert sandbox.node is not None
        out, err = run("list", "tasks", "--json")
        assert json.loads(out)["tasks"] == []
        assert err == (
            f"node of `aiogpu start`; this user's other nodes: --pid {train.pid} "
            f"(train.py), --pid {serve.pid} (serve.py)\n"
        )
        service, *others = rows(run("list", "nodes")[0])[1:]
        assert service[:3] == [str(sandbox.node.pid), "aiogpu", "start"]
        assert service[-1] == sandbox.place.socket
        assert [row[0] for row in others] == [str(train.pid), str(serve.pid)]
        for choice in ("--address=auto", f"--pid={sandbox.node.pid}"):
            assert run("status", choice)[0].startswith("CPU      1 of 1 free\n")
        assert run("logs", "-n1") == ("", "")
        sandbox.run("stop")
    assert not any(name[:7] == "aiogpu-" for name in os.listdir(sandbox.directory))


def test_commands_use_the_only_living_node(sandbox: Sandbox, run: Command) -> None:
    with program(sandbox, "train.py") as train, program(sandbox, "serve.py") as serve:
        serve.process.kill()
        serve.process.wait()
        # As if its zygote, which removes the directory, had been killed as well.
        leftover = Path(sandbox.directory, "aiogpu-0123456789ab")
        leftover.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{leftover}/node.sock")
        Path(sandbox.directory, "aiogpu-abcdefabcdef").mkdir(0o700)
        assert run("status")[0].startswith("CPU      2 of 2 free\n")
        assert [row[0] for row in rows(run("list", "nodes")[0])[1:]] == [str(train.pid)]
        _, err = run("status", f"--address={leftover}/node.sock", code=1)
        assert "no node can be reached" in err
        _, err = run("status", f"--pid={serve.pid}", code=1)
        assert f"there is no process {serve.pid}" in err


def test_pid_finds_a_node_in_another_runtime_directory(
    sandbox: Sandbox, run: Command
) -> None:
    """The program has another runtime directory than the command."""
    elsewhere = Path(sandbox.directory, "elsewhere")
    elsewhere.mkdir()
    with program(
        sandbox, "far.py", 2, XDG_RUNTIME_DIR="", TMPDIR=str(elsewhere)
    ) as far:
        assert far.directory.startswith(f"{elsewhere}/")
        _, err = run("status", code=1)
        assert (
            f"there is no socket {sandbox.place.socket}, and no socket of a program in"
            in err
        )
        out, _ = run("status", f"--pid={far.pid}")
        assert [row[1] for row in rows(out)[1:3]] == ["far.py", "far.py"]
        _, err = run("list", "tasks", f"--pid={far.pid}", code=2)
        assert f"process {far.pid} has 2 nodes; choose one by --address, such" in err
        run("list", "tasks", f"--address={far.address}")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--pid=0"], 2, "0 is not in the range x>=1"),
        (["--pid=me"], 2, "'me' is not a valid whole number"),
        (["--pid={self}", "--address=auto"], 2, "exclude each other: give one"),
        (["--pid={self}"], 1, "has no node that answers commands"),
    ],
    ids=["zero", "word", "both", "none"],
)
def test_a_bad_choice_of_a_node_is_explained(
    run: Command, arguments: list[str], code: int, message: str
) -> None:
    words = [each.format(self=os.getpid()) for each in arguments]
    _, err = run("status", *words, code=code)
    assert message in err


def test_a_directory_that_others_can_reach_is_refused(
    sandbox: Sandbox, run: Command
) -> None:
    with program(sandbox, "train.py") as train:
        os.chmod(train.directory, 0o770)
        choices = [[f"--pid={train.pid}"], [f"--address={train.address}"], []]
        for choice in choices:
            _, err = run("status", *choice, code=1)
            assert f"{train.directory} has mode 0770, so other users have access" in err
        if os.geteuid() == 0:
            os.chmod(train.directory, 0o700)
            os.chown(train.directory, NOBODY, NOBODY)
            _, err = run("status", f"--address={train.address}", code=1)
            assert f"{train.directory} belongs to uid {NOBODY}" in err
            _, err = run("status", code=1)
            assert train.directory not in err, "nodes of other users are not listed"
            os.chown(train.directory, 0, 0)
        os.chmod(train.directory, 0o700)
        run("status")


def test_a_node_that_does_not_answer_is_listed(
    sandbox: Sandbox, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "LISTED_WITHIN", 1.5)
    with program(sandbox, "train.py") as train, program(sandbox, "serve.py") as serve:
        os.kill(train.pid, signal.SIGSTOP)
        out, _ = run("status")
        assert [row[0] for row in rows(out)[1:3]] == [str(train.pid), str(serve.pid)]
        assert rows(out)[1][-3:] == ["does", "not", "answer"]
        os.kill(train.pid, signal.SIGCONT)
