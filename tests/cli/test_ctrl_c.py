"""Ctrl-C, Ctrl-\\ and a closed terminal: for a program, a node and IPython.

The first Ctrl-C ends in order, the second one at once; nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pexpect
import pytest

import aiogpu
from tests.cli.sandbox import Sandbox
from tests.contract import tasks
from tests.faults.leftovers import processes_of, wait_until_gone
from tests.support.gate import Gate
from tests.support.program import environment

LIMIT = 3.0
"""Seconds until the prompt is back."""


PROMPT = "READY> "


PROGRAM = """
    import asyncio, sys
    import aiogpu
    from tests.contract import phase_tasks, tasks
    from tests.support.gate import Gate

    async def main():
        deaf, place = sys.argv[2] == "deaf", sys.argv[3]
        grace = 60 if deaf else 20
        async with Gate.open() as gate, aiogpu.init(
            num_cpus=4, num_gpus=1, cancel_grace=grace
        ):
            handles = [
                phase_tasks.loop.remote(gate.path, "plain", place),
                phase_tasks.coroutine.remote(gate.path, "coroutine", place),
                tasks.start_sleeper.options(num_gpus=1).remote(gate.path, "sleeper"),
            ]
            if deaf:
                task = phase_tasks.swallowing
                handles.append(task.remote(gate.path, "deaf", place))
            await gate.entered("plain", "coroutine", "sleeper", *["deaf"] * deaf)
            print("all run", flush=True)
            try:
                await asyncio.gather(*handles)
            finally:
                print("on its way out", flush=True)

    {"uvloop": aiogpu.run, "asyncio": asyncio.run}[sys.argv[1]](main())
"""


PLAIN = """
    import asyncio, sys

    async def main():
        print("all run", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("on its way out", flush=True)

    asyncio.run(main())
"""


class Shell:
    """A shell with a program in its foreground."""

    def __init__(self, place: Path, source: str, *arguments: str) -> None:
        program = place / "program.py"
        program.write_text(textwrap.dedent(source))
        self.notes = place / "notes"
        self.run = place / "run"
        self.run.mkdir()
        variables = environment(PS1=PROMPT, XDG_RUNTIME_DIR=str(self.run), TERM="dumb")
        self.terminal = pexpect.spawn(
            "bash", ["--norc", "--noprofile", "-i"], env=variables, encoding="utf8"
        )
        self._command = [sys.executable, str(program), *arguments, str(self.notes)]

    def start(self) -> None:
        """Start the program, and wait until all its tasks run."""
        self.terminal.expect_exact(PROMPT, timeout=60)
        self.terminal.sendline(shlex.join(self._command))
        self.terminal.expect_exact("all run", timeout=60)

    def prompt(self) -> str:
        """Wait for the prompt; return the output before it."""
        self.terminal.expect_exact(PROMPT, timeout=LIMIT)
        return str(self.terminal.before)

    def end(self) -> None:
        """Kill the shell if it still runs."""
        if not self.terminal.closed:
            if not self.terminal.terminated:
                self.terminal.kill(signal.SIGKILL)
                self.terminal.wait()
            self.terminal.close()

    def status(self) -> int:
        """The exit status of the program, as the shell shows it."""
        self.terminal.sendline("echo status=$?")
        self.terminal.expect(r"status=(\d+)\r", timeout=LIMIT)
        return int(self.terminal.match.group(1))


@contextmanager
def shell(place: Path, source: str, *arguments: str) -> Iterator[Shell]:
    short = Path("/tmp") / f"agc-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    short.symlink_to(place)
    try:
        opened = Shell(short, source, *arguments)
        try:
            opened.start()
            yield opened
        finally:
            opened.end()
        wait_until_gone(2.0, str(opened.run))
    finally:
        short.unlink()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_ctrl_c_ends_a_program_in_order(loop: str, tmp_path: Path) -> None:
    with shell(tmp_path, PROGRAM, loop, "-") as opened:
        opened.terminal.sendintr()
        written = opened.prompt()
        assert "on its way out" in written
        assert "KeyboardInterrupt" in written
        assert "never retrieved" not in written
        # The shell has this runtime directory, too.
        rest = [p for p in processes_of(str(opened.run)) if "bash" not in p]
        assert (rest, os.listdir(opened.run)) == ([], [])
        words = opened.notes.read_text().split()
        assert sorted(words) == ["begun"] * 2 + ["stopped"] * 2, "`finally` has run"
        status = opened.status()
    (tmp_path / "twin").mkdir()
    with shell(tmp_path / "twin", PLAIN) as twin:
        twin.terminal.sendintr()
        twin.prompt()
        assert status == twin.status() == 130


def test_a_second_ctrl_c_ends_a_program_at_once(tmp_path: Path) -> None:
    """A task that ignores the cancel would have a minute to stop."""
    with shell(tmp_path, PROGRAM, "asyncio", "deaf") as opened:
        opened.terminal.sendintr()
        opened.terminal.expect_exact("on its way out", timeout=LIMIT)
        opened.terminal.sendintr()
        opened.prompt()
        assert opened.status() == 130


def test_ctrl_backslash_ends_a_program_at_once(tmp_path: Path) -> None:
    with shell(tmp_path, PROGRAM, "uvloop", "deaf") as opened:
        opened.terminal.sendcontrol("\\")
        opened.prompt()
        assert opened.status() == 131


def test_a_closed_terminal_ends_a_program(tmp_path: Path) -> None:
    """The shell and its foreground program get SIGHUP."""
    # pexpect gives a shell three tenths of a second to end, too little on a busy
    # machine; the test checks that all processes are gone afterwards.
    hasty = suppress(pexpect.ExceptionPexpect)
    with shell(tmp_path, PROGRAM, "uvloop", "deaf") as opened, hasty:
        opened.terminal.close(force=False)


# `aiogpu start --block`.


def blocking_start(sandbox: Sandbox) -> pexpect.spawn:
    """A shell with a service in its foreground."""
    terminal = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**sandbox.variables, "PS1": PROMPT, "TERM": "dumb"},
        encoding="utf8",
        timeout=60,
        dimensions=(40, 200),
    )
    terminal.expect_exact(PROMPT)
    start = [sys.executable, "-m", "aiogpu", "start", "--head", "--block"]
    terminal.sendline(shlex.join([*start, "--num-gpus=1", "--cancel-grace=60"]))
    terminal.expect(r"The node runs: pid \d+, \{CPU: ")
    terminal.expect_exact("stop     aiogpu stop")
    return terminal


async def wait_for_text(terminal: pexpect.spawn, text: str) -> None:
    """Wait in a thread until the terminal shows the text."""
    await asyncio.to_thread(terminal.expect_exact, text)


@pytest.mark.either_loop
async def test_ctrl_c_drains_a_service_and_a_second_one_ends_it(
    sandbox: Sandbox, gate: Gate
) -> None:
    terminal = await asyncio.to_thread(blocking_start, sandbox)
    try:
        async with aiogpu.init(address=sandbox.place.socket):
            running = tasks.gated.remote(gate.path, "one")
            await gate.entered("one")
            terminal.sendintr()
            await wait_for_text(terminal, "SIGINT: no new work from now on")
            await wait_for_text(terminal, "running tasks have 30 s to end")
            terminal.sendintr()
            await wait_for_text(terminal, "SIGINT again: at once")
            with pytest.raises(aiogpu.errors.NodeError):
                await running
        await wait_for_text(terminal, PROMPT)
        terminal.sendline("echo status=$?")
        await wait_for_text(terminal, "status=0\r")
        assert sandbox.files == []
    finally:
        terminal.close()


# IPython in a terminal: Ctrl-C stops the awaited task.


IPYTHON_PROMPT = r"In \[\d+\]: "


@asynccontextmanager
async def ipython(gate: Gate, *cells: str) -> AsyncIterator[pexpect.spawn]:
    """IPython in a terminal, after some cells."""
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        encoding="utf8",
        timeout=60,
        env={**environment(), "TERM": "dumb", "IPYTHONDIR": f"{gate.path}.ipython"},
    )
    with terminal:
        await terminal.expect(IPYTHON_PROMPT, async_=True)
        for cell in cells:
            terminal.sendline(cell)
            await terminal.expect(IPYTHON_PROMPT, async_=True)
        yield terminal
        terminal.sendline("await aiogpu.shutdown()")
        await terminal.expect(IPYTHON_PROMPT, async_=True)
        terminal.sendline("exit()")
        await terminal.expect(pexpect.EOF, async_=True)


async def interrupt(terminal: pexpect.spawn) -> None:
    """Press Ctrl-C, and wait for the prompt."""
    terminal.sendintr()
    await terminal.expect("KeyboardInterrupt", async_=True)
    await terminal.expect(IPYTHON_PROMPT, async_=True)


@pytest.mark.either_loop
@pytest.mark.usefixtures("no_leaks")
async def test_an_interrupted_ipython_cell_frees_its_gpu(gate: Gate) -> None:
    async with ipython(
        gate,
        "import aiogpu",
        "from tests.contract import tasks",
        "node = await aiogpu.init(num_cpus=1, num_gpus=1)",
    ) as terminal:
        terminal.sendline(
            f"await tasks.gated.options(num_gpus=1).remote({gate.path!r}, 'a')"
        )
        await gate.entered("a")
        await interrupt(terminal)
        terminal.sendline("await tasks.add.options(num_gpus=1).remote(40, 2)")
        await terminal.expect(r"Out\[\d+\]: 42", async_=True)
        await terminal.expect(IPYTHON_PROMPT, async_=True)


@pytest.mark.either_loop
@pytest.mark.usefixtures("no_leaks")
async def test_ctrl_c_in_ipython_among_thousands_of_calls_leaves_the_node_usable(
    gate: Gate,
) -> None:
    """The calls are being submitted, or being answered."""
    async with ipython(
        gate,
        "import aiogpu, asyncio",
        "from tests.contract.interrupted_cells import gather, submit",
        "from tests.contract import tasks",
        "node = await aiogpu.init(num_cpus=2)",
    ) as terminal:
        for at in range(0, 4000, 800):
            for cell in ("submit", "gather"):
                terminal.sendline(f"await {cell}({at})")
                await terminal.expect(r"\nbegun\r", async_=True)
                await interrupt(terminal)
                terminal.sendline("await tasks.add.remote(40, 2)")
                await terminal.expect(r"Out\[\d+\]: 42", async_=True)
                await terminal.expect(IPYTHON_PROMPT, async_=True)
