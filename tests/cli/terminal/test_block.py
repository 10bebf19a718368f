"""`aiogpu start --block` in a terminal: Ctrl-C drains, once more ends at once."""

from __future__ import annotations

import asyncio
import shlex
import sys

import pexpect
import pytest

import aiogpu
from tests.cli.box import Box, box
from tests.contract import tasks
from tests.support.gate import Gate

LIMIT = 60
PROMPT = "READY> "


def blocked(here: Box) -> pexpect.spawn:
    """A shell with a node in its foreground."""
    terminal = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        env={**here.variables, "PS1": PROMPT, "TERM": "dumb"},
        encoding="utf8",
        timeout=LIMIT,
        dimensions=(40, 200),
    )
    terminal.expect_exact(PROMPT)
    start = [sys.executable, "-m", "aiogpu", "start", "--head", "--block"]
    terminal.sendline(shlex.join([*start, "--num-gpus=1", "--cancel-grace=60"]))
    terminal.expect(r"The node runs: pid \d+, \{CPU: ")
    terminal.expect_exact("stop     aiogpu stop")
    return terminal


def status(terminal: pexpect.spawn) -> int:
    """How the node has ended, as shells tell it."""
    terminal.expect_exact(PROMPT)
    terminal.sendline("echo status=$?")
    terminal.expect(r"status=(\d+)\r")
    return int(terminal.match.group(1))


async def shown(terminal: pexpect.spawn, text: str) -> None:
    """Wait beside the loop until the terminal shows it."""
    await asyncio.to_thread(terminal.expect_exact, text)


@pytest.mark.either_loop
async def test_ctrl_c_drains_and_ctrl_c_ends(gate: Gate) -> None:
    with box() as here:
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
            assert await asyncio.to_thread(status, terminal) == 0
            assert here.files == []
        finally:
            terminal.close()
