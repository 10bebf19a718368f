"""SIGTERM to a program that runs by `aiogpu.run`, as Slurm and Kubernetes end one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.gate import Gate
from tests.support.program import start

PROGRAM = """
    import sys, aiogpu
    from tests.support.gate import pass_gate, pass_gate_softly
    @aiogpu.remote
    def plain(path, told):
        try:
            pass_gate(path, "plain")
        finally:
            open(told + "/plain", "w").close()
    @aiogpu.remote
    async def softly(path, told):
        try:
            await pass_gate_softly(path, "softly")
        finally:
            open(told + "/softly", "w").close()
    async def main():
        path, told = sys.argv[1:]
        try:
            async with aiogpu.init(num_cpus=2, log_to_driver=False):
                a, b = plain.remote(path, told), softly.remote(path, told)
                await a
                await b
        finally:
            print("the program's finally", flush=True)
    try:
        aiogpu.run(main())
    finally:
        print("the end", flush=True)
"""


@pytest.mark.usefixtures("no_leaks")
async def test_it_ends_as_by_ctrl_c(gate: Gate, tmp_path: Path) -> None:
    program = start(PROGRAM, gate.path, str(tmp_path))
    await gate.entered("plain", "softly")
    program.send_signal(signal.SIGTERM)
    out, errors = await asyncio.to_thread(program.communicate, timeout=60)
    assert out == "the program's finally\nthe end\n"
    assert program.returncode == 128 + signal.SIGTERM
    assert errors == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "softly"]


STUBBORN = """
    import asyncio, os, signal, sys, aiogpu
    async def main():
        print("runs", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("holds on", flush=True)
            await asyncio.Event().wait()
    aiogpu.run(main())
"""


async def test_a_second_one_ends_it_at_once() -> None:
    program = start(STUBBORN)
    assert program.stdout is not None
    for told in ("runs", "holds on"):
        assert await asyncio.to_thread(program.stdout.readline) == f"{told}\n"
        program.send_signal(signal.SIGTERM)
    await asyncio.to_thread(program.communicate, timeout=60)
    assert program.returncode == -signal.SIGTERM


OWN = """
    import asyncio, signal, aiogpu
    async def main():
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
        print("runs", flush=True)
        await heard.wait()
        print("heard", flush=True)
    aiogpu.run(main())
"""


async def test_a_program_may_handle_it_itself() -> None:
    program = start(OWN)
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "runs\n"
    program.send_signal(signal.SIGTERM)
    out, _ = await asyncio.to_thread(program.communicate, timeout=60)
    assert (out, program.returncode) == ("heard\n", 0)
