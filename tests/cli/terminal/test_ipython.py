"""Ctrl-C in a terminal's IPython stops what the cell awaits [B15]."""

from __future__ import annotations

import sys

import pexpect
import pytest

from tests.support.gate import Gate
from tests.support.program import environment

PROMPT = r"In \[\d+\]: "
LIMIT = 60


@pytest.mark.either_loop
@pytest.mark.usefixtures("no_leaks")
async def test_an_interrupted_cell_frees_its_gpu(gate: Gate) -> None:
    shell = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        encoding="utf8",
        timeout=LIMIT,
        env={**environment(), "TERM": "dumb", "IPYTHONDIR": f"{gate.path}.ipython"},
    )
    with shell:
        await shell.expect(PROMPT, async_=True)
        for cell in (
            "import aiogpu",
            "from tests.contract import tasks",
            "node = await aiogpu.init(num_cpus=1, num_gpus=1)",
        ):
            shell.sendline(cell)
            await shell.expect(PROMPT, async_=True)
        shell.sendline(
            f"await tasks.gated.options(num_gpus=1).remote({gate.path!r}, 'a')"
        )
        await gate.entered("a")
        shell.sendintr()
        await shell.expect("KeyboardInterrupt", async_=True)
        await shell.expect(PROMPT, async_=True)
        shell.sendline("await tasks.add.options(num_gpus=1).remote(40, 2)")
        await shell.expect(r"Out\[\d+\]: 42", async_=True)
        shell.sendline("await aiogpu.shutdown()")
        await shell.expect(PROMPT, async_=True)
        shell.sendline("exit()")
        await shell.expect(pexpect.EOF, async_=True)
