"""Ctrl-C, Ctrl-\\ and a closed terminal: for a program, a node and IPython.

Ctrl-C once is orderly, twice is at once; whatever it is, nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pexpect
import pytest

import aiogpu
from tests.cli.box import Box
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
        self.noted = place / "noted"
        self.run = place / "run"
        self.run.mkdir()
        variables = environment(PS1=PROMPT, XDG_RUNTIME_DIR=str(self.run), TERM="dumb")
        self.terminal = pexpect.spawn(
            "bash", ["--norc", "--noprofile", "-i"], env=variables, encoding="utf8"
        )
        self._command = [sys.executable, str(program), *arguments, str(self.noted)]

    def start(self) -> None:
        """Run the program until it says that all is going on."""
        self.terminal.expect_exact(PROMPT, timeout=60)
        self.terminal.sendline(shlex.join(self._command))
        self.terminal.expect_exact("all run", timeout=60)

    def prompt(self) -> str:
        """What was written until the prompt is back."""
        self.terminal.expect_exact(PROMPT, timeout=LIMIT)
        return str(self.terminal.before)

    def end(self) -> None:
        """Hang up on what is still there."""
        if not self.terminal.closed:
            if not self.terminal.terminated:
                self.terminal.kill(signal.SIGKILL)
                self.terminal.wait()
            self.terminal.close()

    def status(self) -> int:
        """How the program has ended, as shells tell it."""
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
def test_once_is_orderly(loop: str, tmp_path: Path) -> None:
    with shell(tmp_path, PROGRAM, loop, "-") as opened:
        opened.terminal.sendintr()
        written = opened.prompt()
        assert "on its way out" in written
        assert "KeyboardInterrupt" in written
        assert "never retrieved" not in written
        # The processes of the shell itself are there as well.
        rest = [p for p in processes_of(str(opened.run)) if "bash" not in p]
        assert (rest, os.listdir(opened.run)) == ([], [])
        words = opened.noted.read_text().split()
        assert sorted(words) == ["begun"] * 2 + ["stopped"] * 2, "`finally` has run"
        status = opened.status()
    (tmp_path / "twin").mkdir()
    with shell(tmp_path / "twin", PLAIN) as twin:
        twin.terminal.sendintr()
        twin.prompt()
        assert status == twin.status() == 130


def test_twice_is_at_once(tmp_path: Path) -> None:
    """One of its tasks would have a minute to stop."""
    with shell(tmp_path, PROGRAM, "asyncio", "deaf") as opened:
        opened.terminal.sendintr()
        opened.terminal.expect_exact("on its way out", timeout=LIMIT)
        opened.terminal.sendintr()
        opened.prompt()
        assert opened.status() == 130


def test_ctrl_backslash(tmp_path: Path) -> None:
    with shell(tmp_path, PROGRAM, "uvloop", "deaf") as opened:
        opened.terminal.sendcontrol("\\")
        opened.prompt()
        assert opened.status() == 131


def test_a_closed_terminal(tmp_path: Path) -> None:
    """The shell and all in its foreground are hung up on."""
    # pexpect gives a shell three tenths of a second to end, which is too little on a
    # busy machine; what counts is that all of it is gone afterwards.
    hasty = suppress(pexpect.ExceptionPexpect)
    with shell(tmp_path, PROGRAM, "uvloop", "deaf") as opened, hasty:
        opened.terminal.close(force=False)


# `aiogpu start --block`.


def blocked(here: Box) -> pexpect.spawn:
    """A shell with a node in its foreground."""
    terminal = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**here.variables, "PS1": PROMPT, "TERM": "dumb"},
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


async def shown(terminal: pexpect.spawn, text: str) -> None:
    """Wait beside the loop until the terminal shows it."""
    await asyncio.to_thread(terminal.expect_exact, text)


@pytest.mark.either_loop
async def test_ctrl_c_drains_and_ctrl_c_ends(here: Box, gate: Gate) -> None:
    terminal = await asyncio.to_thread(blocked, here)
    try:
        async with aiogpu.init(address=here.place.socket):
            running = tasks.gated.remote(gate.path, "one")
            await gate.entered("one")
            terminal.sendintr()
            await shown(terminal, "SIGINT: no new work from now on")
            await shown(terminal, "what runs has 30 s to end")
            terminal.sendintr()
            await shown(terminal, "SIGINT again: at once")
            with pytest.raises(aiogpu.errors.NodeError):
                await running
        await shown(terminal, PROMPT)
        terminal.sendline("echo status=$?")
        await shown(terminal, "status=0\r")
        assert here.files == []
    finally:
        terminal.close()


# IPython in a terminal: what the cell awaits is stopped [B15].


@pytest.mark.either_loop
@pytest.mark.usefixtures("no_leaks")
async def test_an_interrupted_cell_frees_its_gpu(gate: Gate) -> None:
    prompt = r"In \[\d+\]: "
    ipython = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        encoding="utf8",
        timeout=60,
        env={**environment(), "TERM": "dumb", "IPYTHONDIR": f"{gate.path}.ipython"},
    )
    with ipython:
        await ipython.expect(prompt, async_=True)
        for cell in (
            "import aiogpu",
            "from tests.contract import tasks",
            "node = await aiogpu.init(num_cpus=1, num_gpus=1)",
        ):
            ipython.sendline(cell)
            await ipython.expect(prompt, async_=True)
        ipython.sendline(
            f"await tasks.gated.options(num_gpus=1).remote({gate.path!r}, 'a')"
        )
        await gate.entered("a")
        ipython.sendintr()
        await ipython.expect("KeyboardInterrupt", async_=True)
        await ipython.expect(prompt, async_=True)
        ipython.sendline("await tasks.add.options(num_gpus=1).remote(40, 2)")
        await ipython.expect(r"Out\[\d+\]: 42", async_=True)
        ipython.sendline("await aiogpu.shutdown()")
        await ipython.expect(prompt, async_=True)
        ipython.sendline("exit()")
        await ipython.expect(pexpect.EOF, async_=True)
