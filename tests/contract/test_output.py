"""[B13] What tasks print: tagged, in time, and never at the loop's expense."""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.runtime.output import FULL
from tests.contract import tasks
from tests.support.gate import Gate
from tests.support.program import run

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


async def test_lines_come_tagged_before_the_await_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=1):
        pid = await tasks.pid.remote()
        for round_ in range(20):
            await tasks.output.remote([f"round {round_}", "ünï"])
            out, err = capsys.readouterr()
            assert out == f"(output pid={pid}) round {round_}\n(output pid={pid}) ünï\n"
            assert err == ""
        await tasks.output.options(name="embed").remote(["x"])
        assert capsys.readouterr().out == f"(embed pid={pid}) x\n"


async def test_lines_come_while_the_task_runs(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = tasks.mixed_output.remote(gate.path)
        await gate.entered("printed")
        pid = gate.pids["printed"]
        seen = ""
        async with asyncio.timeout(60):
            while "stdout" not in seen:
                await asyncio.sleep(0)
                seen += capsys.readouterr().out
        assert seen == f"(mixed_output pid={pid}) to stdout\n"
        gate.release("printed")
        await handle
        out, _ = capsys.readouterr()
        assert out == f"(mixed_output pid={pid}) unfinished\n"


async def test_stderr_goes_to_stderr(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = tasks.mixed_output.remote(gate.path)
        await gate.entered("printed")
        gate.release("printed")
        await handle
        assert capsys.readouterr().err == (
            f"(mixed_output pid={gate.pids['printed']}) to stderr\n"
        )


async def test_raw_bytes_carry_the_workers_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=1):
        for round_ in range(20):
            await tasks.raw_output.remote(f"a {round_}\nrest")
            out = capsys.readouterr().out
            assert re.fullmatch(
                rf"\(worker-1 pid=\d+\) a {round_}\n\(worker-1 pid=\d+\) rest\n", out
            )


async def test_raw_bytes_of_an_isolated_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        await tasks.raw_output.options(num_gpus=1).remote("from a fresh process\n")
        assert "from a fresh process\n" in capsys.readouterr().out


async def test_it_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        await tasks.output.remote(["x"])
        await tasks.raw_output.remote("y\n")
    assert capsys.readouterr() == ("", "")


async def test_lines_of_several_tasks_are_not_mixed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=3):
        lines = [f"{i} " + "z" * 200 for i in range(200)]
        await asyncio.gather(*(tasks.output.remote(lines) for _ in range(3)))
    written = capsys.readouterr().out.splitlines()
    assert len(written) == 600
    assert all(re.fullmatch(r"\(output pid=\d+\) \d+ z{200}", line) for line in written)


@pytest.mark.parametrize("way", ["close", "replace"])
async def test_a_task_cannot_spoil_the_output_of_the_next(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=1):
        await tasks.spoil_stdout.remote(way)
        await tasks.output.remote(["x"])
        assert capsys.readouterr().out.endswith(") x\n")


class SlowTerminal(io.StringIO):
    """Blocks every write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait()
        return super().write(text)


async def test_a_slow_terminal_slows_the_task_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    lines = 100_000
    async with aiogpu.init(num_cpus=2) as session:
        printing = tasks.flood.remote(lines)
        waited = asyncio.ensure_future(printing)
        results = [await tasks.add.remote(i) for i in range(500)]
        assert results == list(range(1, 501))
        assert not waited.done()
        console = session._session._engine._supervisor._parts.console  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while console._waiting <= FULL:
                await asyncio.sleep(0)
        for _ in range(200):
            await tasks.add.remote(1)
        # One read of the socket at most comes after the pause.
        assert console._waiting < 2 * FULL
        terminal.is_free.set()
        await waited
        assert terminal.getvalue().count("\n") == lines


@pytest.mark.parametrize("how", ["result", "error", "death", "actor"])
async def test_a_blocked_terminal_holds_no_gpu(
    how: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[B2] [B26] The core hears of the end at once; who waits for it does not."""
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        printing: Any
        if how == "actor":
            actor = tasks.PrintsAndEnds.options(num_gpus=1).remote()
            printing = asyncio.ensure_future(actor.end.remote())
        else:
            task = tasks.print_and_end.options(num_gpus=1)
            printing = asyncio.ensure_future(task.remote(how))
        other = tasks.gated.options(num_gpus=1).remote(gate.path, "other")
        async with asyncio.timeout(60):
            await gate.entered("other")  # it has the GPU
        assert not printing.done()
        gate.release("other")
        async with asyncio.timeout(60):
            assert await other == "other"
        assert not printing.done()
        terminal.is_free.set()
        async with asyncio.timeout(60):
            (told,) = await asyncio.gather(printing, return_exceptions=True)
        assert (
            type(told)
            is {
                "result": int,
                "error": ValueError,
                "death": aiogpu.WorkerDiedError,
                "actor": aiogpu.ActorDiedError,
            }[how]
        )
        assert "a line\n" in terminal.getvalue()


async def test_items_wait_for_the_lines_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    @aiogpu.remote
    def items() -> Iterator[int]:
        for number in range(50):
            print("line", number)
            yield number

    async with aiogpu.init(num_cpus=1):
        stream = items.remote()
        first = asyncio.ensure_future(anext(stream))
        for _ in range(200):
            assert await tasks.add.options(num_cpus=0).remote(1) == 2
        assert not first.done()
        terminal.is_free.set()
        assert await first == 0
        seen = 1
        async for number in stream:
            assert number == seen
            assert f"line {number}\n" in terminal.getvalue()
            seen += 1
        assert seen == 50


class BrokenTerminal(io.StringIO):
    """Fails every write, as a closed pipe does."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


async def test_a_broken_terminal_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenTerminal())
    async with aiogpu.init(num_cpus=1):
        await tasks.output.remote(["x"])
        assert await tasks.add.remote(1) == 2


async def test_a_name_is_one_line_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=1):
        pid = await tasks.pid.remote()
        await tasks.output.options(name="one\n\x1b[31mtwo").remote(["x"])
        assert capsys.readouterr().out == f"(one??[31mtwo pid={pid}) x\n"


async def test_the_last_output_of_a_crash_is_its_own() -> None:
    """[B38]"""
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        pid = await tasks.pid.remote()
        await tasks.output.remote(["printed before"])
        await tasks.raw_output.remote("written before\n")
        with pytest.raises(aiogpu.WorkerDiedError) as caught:
            await tasks.exit_at_once.remote(7)
        assert caught.value.pid == pid
        assert caught.value.last_output == ("last words",)
        assert "before" not in str(caught.value)
        *_, last = await asyncio.gather(
            *(tasks.output.remote([f"printed {n} before"]) for n in range(20)),
            tasks.exit_at_once.remote(7),
            return_exceptions=True,
        )
        assert isinstance(last, aiogpu.WorkerDiedError)
        assert last.last_output == ("last words",)


async def test_the_last_output_of_an_actor_is_all_of_its_life() -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):

        @aiogpu.remote
        class Talking:
            def say(self, what: str) -> None:
                print(what)

            def end(self) -> None:
                os._exit(3)

        actor = Talking.remote()
        await actor.say.remote("before")
        with pytest.raises(aiogpu.ActorDiedError) as caught:
            await actor.end.remote()
        cause = caught.value.__cause__
        assert isinstance(cause, aiogpu.WorkerDiedError)
        assert cause.last_output == ("before",)


TORN = """
    import asyncio
    import aiogpu

    @aiogpu.remote
    def flood():
        for _ in range(10_000):
            print("t" * 30)

    async def main():
        async with aiogpu.init(num_cpus=1):
            flooding = asyncio.ensure_future(flood.remote())
            while not flooding.done():
                for _ in range(5):
                    print("d" * 30)
                await asyncio.sleep(0)
            await flooding

    LOOP(main())
"""


@pytest.mark.parametrize("loop", ["asyncio.run", "aiogpu.run"])
def test_an_unbuffered_program_s_own_lines_are_not_torn(loop: str) -> None:
    told = run(TORN.replace("LOOP", loop), PYTHONUNBUFFERED="1")
    lines = re.findall(r"^(?:d{30}|\(flood pid=\d+\) t{30})$", told, re.MULTILINE)
    assert len(lines) == told.count("\n")
    assert sum("flood" in line for line in lines) == 10_000


def test_what_comes_after_the_loop_was_left_is_written_all_the_same() -> None:
    told = run(
        """
        import asyncio, aiogpu

        @aiogpu.remote
        def talk():
            print("x" * 100_000)

        async def main():
            await aiogpu.init(num_cpus=1)
            await talk.remote()
            unawaited = talk.remote()
            await asyncio.sleep(0)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        """,
        PYTHONUNBUFFERED="1",
    )
    assert "x" * 100 in told
