"""`aiogpu debug` in a terminal: pdb in a task of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.cli.sandbox import LIMIT, Sandbox

SCRIPT = """
import asyncio, sys, threading, aiogpu

class Slow:
    def __radd__(self, other):
        threading.Event().wait()

@aiogpu.remote(num_cpus=0, run_timeout=1)
def train(steps, slow=Slow):
    total = 0
    for step in range(steps):
        breakpoint()
        total += step
    return total

@aiogpu.remote(num_cpus=0)
async def idle():
    await asyncio.Event().wait()

async def main():
    address = sys.argv[1]
    options = {"num_cpus": 1} if address == "local" else {}
    async with aiogpu.init(address=address, **options):
        task, other = train.remote(3), idle.remote()
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line == "cancel\\n":
                task.cancel()
            elif line == "unlimited\\n":
                task = train.options(run_timeout=None, name="free").remote(1)
            elif line == "await\\n":
                print("result", await task, flush=True)

asyncio.run(main())
"""


class Program:
    """A program with a task that waits at a breakpoint."""

    def __init__(self, process: subprocess.Popen[str], sandbox: Sandbox) -> None:
        self.process = process
        self.sandbox = sandbox
        self.said = self.hear()

    def hear(self) -> str:
        """Return the next line that says how to attach a debugger."""
        assert self.process.stderr is not None
        while "aiogpu debug" not in (line := self.process.stderr.readline()):
            assert line, "the program has ended"
        return line

    def debug(self, *options: str) -> pexpect.spawn[str]:
        """Run the command that the program has printed, in a terminal."""
        words = self.said.split("aiogpu debug ")[1].split()
        return pexpect.spawn(
            sys.executable,
            ["-m", "aiogpu", "debug", *words, *options],
            env={**self.sandbox.variables, "TERM": "dumb", "COLUMNS": "200"},  # type: ignore[arg-type]
            encoding="utf-8",
            timeout=LIMIT,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def result(self) -> str:
        assert self.process.stdout is not None
        self.tell("await")
        return self.process.stdout.readline()


@pytest.fixture(params=["local", "auto"])
def program(
    sandbox: Sandbox, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Program]:
    """The program, with a node inside it or on a shared node."""
    if request.param == "auto":
        sandbox.run("start", "--head", "--num-cpus=1", "--num-gpus=0")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-u", str(script), request.param],
        env=sandbox.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Program(process, sandbox)
        finally:
            process.kill()


def ended(terminal: pexpect.spawn[str]) -> int | None:
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus


def test_a_session_in_a_terminal(program: Program) -> None:
    """It takes longer than the task's `run_timeout`, while the person thinks."""
    assert "waits at script.py:12 in train for a debugger" in program.said
    shown, _ = program.sandbox.run("why", "train")
    assert "waits for a debugger at script.py:12 in train" in shown
    terminal = program.debug()
    terminal.expect(r"-> total \+= step\r\n\(Pdb\) ")
    _, error = program.sandbox.run("debug", "train", code=1)
    assert "is in a debugger already" in error
    terminal.sendline("import time; time.sleep(1.1)")
    terminal.expect(r"\(Pdb\) ")
    terminal.sendline("total = 100")
    terminal.expect(r"\(Pdb\) ")
    terminal.sendintr()  # gives up a line
    terminal.expect(r"\(Pdb\) ")
    terminal.sendline("c")
    terminal.expect(r"-> total \+= step\r\n\(Pdb\) ")
    terminal.sendline("p step, total")
    terminal.expect(r"\(1, 100\)\r\n\(Pdb\) ")
    terminal.sendeof()
    terminal.expect(r"train \(task \d+\) (goes on|has ended)\.")
    assert ended(terminal) == 0
    assert program.result() == "result 103\n"


def test_the_end_of_the_terminal_lets_the_task_go_on(program: Program) -> None:
    terminal = program.debug()
    terminal.expect(r"\(Pdb\) ")
    terminal.close(force=True)
    assert program.result() == "result 3\n"


def test_a_cancel_ends_the_prompt(program: Program) -> None:
    terminal = program.debug()
    terminal.expect(r"\(Pdb\) ")
    program.tell("cancel")
    terminal.expect(r"ended by KeyboardInterrupt: task \d+ was cancelled")
    terminal.expect(r"train \(task \d+\) (has ended|is being stopped)\.")
    assert ended(terminal) == 0


def test_ctrl_c_while_the_task_runs_leaves_it(program: Program) -> None:
    program.tell("unlimited")
    program.said = program.hear()
    terminal = program.debug()
    terminal.expect(r"\(Pdb\) ")
    terminal.sendline("!step = slow()")
    terminal.expect(r"\(Pdb\) ")
    terminal.sendline("c")
    while "runs on" not in program.sandbox.run("why", "free")[0]:
        pass
    terminal.sendintr()
    terminal.expect(r"free \(task \d+\) goes on\.")
    assert ended(terminal) == 0


def test_what_cannot_be_debugged(program: Program) -> None:
    for arguments, code, words in (
        (["idle"], 1, "waits for no debugger: write `breakpoint()`"),
        (["nobody"], 1, "no task and no actor named 'nobody'"),
        ([""], 2, "it is empty"),
        (["train", "--listen", "many"], 2, "'many' is no port"),
        (["train", "--listen", "0.0.0.0:5678"], 2, "ssh -L 5678:127.0.0.1:5678"),
        (["train", "--any-host"], 2, "--any-host needs --listen"),
    ):
        _, error = program.sandbox.run("debug", *arguments, code=code)
        assert words in error
    terminal = program.debug()
    terminal.expect(r"\(Pdb\) ")
    terminal.sendline("q")
    assert ended(terminal) == 0
    assert program.result() == "result 3\n"
    number = program.said.split("aiogpu debug ")[1].split()[0]
    _, error = program.sandbox.run("debug", number, code=1)
    assert "s ago: it finished" in error
