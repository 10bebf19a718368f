"""`aiogpu run` on a real node: exit codes, signals, leftovers, a terminal."""

from __future__ import annotations

import asyncio
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

import aiogpu
from tests.support.program import environment
from tests.support.program import run as run_program

LIMIT = 30.0


PROMPT = "READY> "


SERVE = """
import asyncio, socket, sys
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine

async def main():
    options = NodeOptions(num_cpus=2, num_gpus=2)
    engine = LocalEngine(options, asyncio.get_running_loop())
    await engine.open()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen()
    await engine.serve(listening)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a node with two GPUs."""
    path = str(tmp_path_factory.mktemp("node") / "s")
    with running_node(path):
        yield path


class running_node:
    """A node on a socket within a block."""

    def __init__(self, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, path],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def line(node: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "aiogpu", "run", f"--socket={node}", *arguments]


def run(node: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line(node, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )


def start(node: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line(node, *arguments),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_run_passes_gpu_input_and_exit_code(node: str) -> None:
    shell = ("sh", "-c", "cat; echo $CUDA_VISIBLE_DEVICES $*; exit 3", "sh")
    ended = run(node, "--num-gpus", "0.5", *shell, "--num-gpus", "7", input="in ")
    assert ended.stdout == "in 0 --num-gpus 7\n", "options after it are its own"
    assert (ended.stderr, ended.returncode) == ("", 3)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nosuchcommand"], 127, "nosuchcommand: No such file"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        (["--num-gpus=5", "true"], 125, "lacks GPU 5 of 2"),
        (["--num-gpus=1.5", "true"], 125, "num_gpus=1.5"),
        (["--gpu-memory=share", "--num-gpus=0.5", "true"], 125, "how much memory"),
        (["--resources={", "true"], 125, "is not JSON"),
        ([], 125, "Missing argument"),
        (["--num-gpu=1", "true"], 125, "No such option '--num-gpu'"),
        (["--timeout=1m", "true"], 125, "'1m' is not a valid number of seconds"),
        (["--gpu-memory=6G", "true"], 125, "such as 64GiB or 500MB, or in bytes"),
        (["--address=local", "true"], 125, "a node inside a program"),
        (["--socket=/no/such/node.sock", "true"], 125, "aiogpu start"),
        (["sh", "-c", "kill -USR1 $$"], -signal.SIGUSR1, ""),
    ],
)
def test_exit_codes_of_run(
    node: str, arguments: list[str], code: int, text: str
) -> None:
    ended = run(node, *arguments)
    assert ended.returncode == code, ended
    assert text in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_run_forwards_signals(node: str, number: signal.Signals) -> None:
    source = (
        f"trap 'echo got; exit 7' {int(number)}; echo up; while :; do sleep 0.05; done"
    )
    with start(node, "--", "sh", "-c", source) as process:
        assert read(process) == "up"
        process.send_signal(number)
        assert read(process) == "got"
        assert process.wait(LIMIT) == 7


@pytest.mark.slow
def test_a_signal_ends_a_run_that_waits(node: str) -> None:
    with start(node, "--num-gpus=2", "--", "sh", "-c", "echo up; read x") as holder:
        assert read(holder) == "up"
        ended = run(node, "--timeout=0.2", "true")
        assert (ended.returncode, ended.stdout) == (124, "")
        with start(node, "--name=second", "--", "echo", "ran") as second:
            wait_until_lease_waits(node, "second")
            second.terminate()
            assert second.wait(LIMIT) == -signal.SIGTERM
        holder.communicate("\n")
    assert run(node, "--num-gpus=2", "true").returncode == 0


def test_processes_left_by_the_command_hold_the_lease(node: str) -> None:
    source = "(read x; echo late) <&3 & echo left; exit 5"
    with start(
        node, "--num-gpus=2", "--", "sh", "-c", "exec 3<&0; " + source
    ) as process:
        assert read(process) == "left"
        assert process.stderr is not None
        assert "sh has ended, but processes" in process.stderr.readline()
        assert run(node, "--timeout=0.2", "true").returncode == 124
        assert process.communicate("\n")[0] == "late\n"
        assert process.returncode == 5


@pytest.mark.slow
def test_a_signal_ends_the_processes_left_by_the_command(node: str) -> None:
    source = "trap '' TERM; sleep 600 & echo left; exit 5"
    with start(node, "--", "sh", "-c", source) as process:
        assert read(process) == "left"
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 5


def test_the_commands_processes_hold_the_lease_after_a_kill_of_run(node: str) -> None:
    source = "sh -c 'echo up; read x <&3' & wait"
    with start(
        node, "--num-gpus=2", "--", "sh", "-c", "exec 3<&0; " + source
    ) as process:
        assert read(process) == "up"
        process.kill()
        process.wait()
        assert run(node, "--timeout=0.3", "true").returncode == 124
        assert process.stdin is not None
        process.stdin.close()
        assert run(node, "--num-gpus=2", "--timeout=20", "true").returncode == 0


def test_the_command_continues_without_its_node(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with running_node(path) as service:
        process = start(path, "--", "sh", "-c", "echo up; read x; echo $x")
        with process:
            assert read(process) == "up"
            service.kill()
            service.wait()
            assert process.stderr is not None
            assert "sh goes on, but its lease is lost" in process.stderr.readline()
            assert process.communicate("done\n")[0] == "done\n"
            assert process.returncode == 0


def wait_until_lease_waits(node: str, name: str) -> None:
    """Wait until a lease with this name waits on the node."""
    source = """
        import asyncio, sys, aiogpu
        async def main():
            async with aiogpu.init(address=sys.argv[1], log_to_driver=False):
                names = ()
                while sys.argv[2] not in names:
                    names = [t.name for t in (await aiogpu.status()).waiting]
        asyncio.run(main())
    """
    run_program(source, node, name)


@pytest.fixture
def bash() -> Iterator[pexpect.spawn[str]]:
    """An interactive shell on a pseudo-terminal."""
    spawned = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env=environment(PS1=PROMPT, TERM="dumb"),
        encoding="utf8",
        dimensions=(24, 100),
        timeout=LIMIT,
    )
    spawned.expect_exact(PROMPT)
    yield spawned
    spawned.close(force=True)


def test_the_shell_keeps_job_control(node: str, bash: Any) -> None:
    source = "trap 'echo INT-$$; exit 9' INT; echo up; while :; do sleep 0.05; done"
    bash.sendline(shlex.join(line(node, "--", "sh", "-c", source)))
    bash.expect_exact("up\r\n")
    bash.sendcontrol("z")
    bash.expect_exact("Stopped")
    bash.expect_exact(PROMPT)
    bash.sendline("fg")
    bash.expect_exact("while :; do")
    bash.sendintr()
    bash.expect(r"INT-(\d+)\r\n")
    bash.expect_exact(PROMPT)
    # The command got the signal once.
    assert "INT-" not in bash.before
    bash.sendline("echo code=$?")
    bash.expect_exact("code=9\r\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_shell_loop_around_run(node: str, bash: Any) -> None:
    command = shlex.join(line(node, "--", "sh", "-c", "echo up; sleep 600"))
    bash.sendline(f"for i in 1 2; do {command}; done")
    bash.expect_exact("up\r\n")
    bash.sendintr()
    bash.expect_exact(PROMPT)
    assert "up" not in bash.before


def test_run_prints_why_it_waits(node: str, bash: Any) -> None:
    with start(node, "--num-gpus=2", "--", "sh", "-c", "echo up; read x") as holder:
        assert read(holder) == "up"
        bash.sendline(shlex.join(line(node, "--", "echo", "ran")))
        bash.expect(r"\raiogpu run: echo ran .*has waited .*for \{GPU: 1\}.*\x1b\[K")
        holder.communicate("\n")
        bash.expect_exact("\r\x1b[K")
        bash.expect_exact("ran\r\n")


@pytest.mark.slow
def test_the_shell_sees_a_stopped_command(node: str, bash: Any) -> None:
    command = shlex.join(
        line(node, "--", "sh", "-c", "echo up; kill -STOP $$; echo on")
    )
    bash.sendline(command)
    bash.expect_exact("up\r\n")
    bash.expect_exact("Stopped")
    bash.expect_exact(PROMPT)
    bash.sendline("fg")
    bash.expect_exact("on\r\n")
    bash.expect_exact(PROMPT)


def test_run_counts_as_a_program_of_the_node(node: str) -> None:
    """It has the limits and the share of a program; the node forgets it afterwards."""

    async def look() -> tuple[int, int]:
        async with aiogpu.init(address=node):  # from now on programs are counted
            while len((await aiogpu.status()).clients) > 1:
                await asyncio.sleep(0)  # those of earlier tests leave
            running = start(node, "--num-gpus=2", "--", "cat")
            while (await aiogpu.available_resources())["GPU"]:
                await asyncio.sleep(0)
            late = await asyncio.to_thread(run, node, "--timeout=0.01", "true")
            pids = [each.pid for each in (await aiogpu.status()).clients]
            assert running.pid in pids
            running.communicate()
            while len((await aiogpu.status()).clients) == len(pids):
                await asyncio.sleep(0)
            return late.returncode, len(pids)

    # This program, and the first command.
    assert asyncio.run(asyncio.wait_for(look(), LIMIT)) == (124, 2)
