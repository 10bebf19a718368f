"""Output of tasks: tagged, in time, and never at the loop's expense."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import aiogpu
from aiogpu.cli.views.logs import timeline
from aiogpu.engines.remote import RemoteEngine
from aiogpu.runtime.output import FILE, FULL
from tests.cli.sandbox import open_sandbox
from tests.contract import tasks
from tests.contract.node_here import node_here
from tests.contract.report_tasks import Logs, fail, flood, log_by_child, parent, talk
from tests.support.gate import Gate, pass_gate
from tests.support.program import run, start
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


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
        await tasks.output.options(name="one\n\x1b[31mtwo").remote(["x"])
        assert capsys.readouterr().out == f"(one??[31mtwo pid={pid}) x\n"


async def test_lines_come_on_their_stream_while_the_task_runs(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = tasks.mixed_output.remote(gate.path)
        await gate.entered("printed")
        pid = gate.pids["printed"]
        stdout = stderr = ""
        async with asyncio.timeout(60):
            while "stdout" not in stdout:
                await asyncio.sleep(0)
                out, err = capsys.readouterr()
                stdout, stderr = stdout + out, stderr + err
        assert stdout == f"(mixed_output pid={pid}) to stdout\n"
        gate.release("printed")
        await handle
        out, err = capsys.readouterr()
        assert out == f"(mixed_output pid={pid}) unfinished\n"
        assert stderr + err == f"(mixed_output pid={pid}) to stderr\n"


async def test_raw_bytes_name_their_worker(capsys: pytest.CaptureFixture[str]) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for round_ in range(20):
            await tasks.raw_output.remote(f"a {round_}\nrest")
            lines = rf"\(worker-1 pid=\d+\) a {round_}\n\(worker-1 pid=\d+\) rest\n"
            assert re.fullmatch(lines, capsys.readouterr().out)
        await tasks.raw_output.options(num_gpus=1).remote("from a fresh process\n")
        assert "from a fresh process\n" in capsys.readouterr().out


async def test_late_lines_of_a_task_have_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A thread of the task may print between the task's answer and its end."""

    def chatter() -> None:
        def print_lines() -> None:
            for number in range(1000):
                print(number)

        threading.Thread(target=print_lines, daemon=True).start()

    async with aiogpu.init(num_cpus=1):
        task = aiogpu.remote(chatter)
        for _ in range(10):
            await task.remote()
    names = {
        line.partition(" pid=")[0] for line in capsys.readouterr().out.splitlines()
    }
    assert names <= {"(chatter", "(worker-1"}


async def test_log_to_driver_hides_output(capsys: pytest.CaptureFixture[str]) -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        await tasks.output.remote(["x"])
        await tasks.raw_output.remote("y\n")
    assert capsys.readouterr() == ("", "")


async def test_lines_of_tasks_are_not_mixed(capsys: pytest.CaptureFixture[str]) -> None:
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
    """Blocks every write until `is_free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait(60)
        return super().write(text)


def slow_stdout(monkeypatch: pytest.MonkeyPatch) -> SlowTerminal:
    """Replace this program's stdout by a slow terminal."""
    # Not in a fixture: pytest replaces stdout itself after the fixtures.
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


async def test_a_slow_terminal_slows_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_stdout(monkeypatch)
    lines = 30_000
    async with aiogpu.init(num_cpus=2) as session:
        printing = tasks.flood.remote(lines)
        waited = asyncio.ensure_future(printing)
        results = [await tasks.add.remote(i) for i in range(500)]
        assert results == list(range(1, 501))
        assert not waited.done()
        console = session._session._engine._supervisor._parts.console  # type: ignore[attr-defined]
        await until(lambda: console._waiting > FULL)
        for _ in range(200):
            await tasks.add.remote(1)
        # At most one read of the socket comes after the pause.
        assert console._waiting < 2 * FULL
        terminal.is_free.set()
        await waited
        assert terminal.getvalue().count("\n") == lines


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("result", int),
        ("error", ValueError),
        ("death", aiogpu.WorkerDiedError),
        ("actor", aiogpu.ActorDiedError),
    ],
)
async def test_a_blocked_terminal_holds_no_gpu(
    how: str, kind: type, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core learns of the end at once, before the task's caller."""
    terminal = slow_stdout(monkeypatch)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=2, num_gpus=1):
        if how == "actor":
            actor = tasks.PrintsAndEnds.options(num_gpus=1).remote()
            printing: Any = actor.end.remote()
        else:
            printing = tasks.print_and_end.options(num_gpus=1).remote(how)
        printing = asyncio.ensure_future(printing)
        other = tasks.gated.options(num_gpus=1).remote(gate.path, "other")
        await gate.entered("other")  # this task has the GPU
        assert not printing.done()
        gate.release("other")
        assert await other == "other"
        assert not printing.done()
        terminal.is_free.set()
        (outcome,) = await asyncio.gather(printing, return_exceptions=True)
        assert type(outcome) is kind
        assert "a line\n" in terminal.getvalue()


async def test_items_wait_for_earlier_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_stdout(monkeypatch)

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
        numbers = [await first]
        async for number in stream:
            numbers.append(number)
            assert f"line {number}\n" in terminal.getvalue()
        assert numbers == list(range(50))


class BrokenTerminal(io.StringIO):
    """Fails every write, as a closed pipe does."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


async def test_a_broken_terminal_harms_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenTerminal())
    async with aiogpu.init(num_cpus=1):
        await tasks.output.remote(["x"])
        assert await tasks.add.remote(1) == 2


async def test_last_output_is_that_of_the_crashed_task_alone() -> None:
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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flushed_line_is_read_before_it_ends(
    stream: str, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    @aiogpu.remote(max_retries=0)
    def load(path: str, is_fatal: bool) -> None:
        print("loading ...", end=" ", flush=True, file=getattr(sys, stream))
        pass_gate(path, "loading")
        if is_fatal:
            os._exit(3)
        print("done", file=getattr(sys, stream))

    async with aiogpu.init(num_cpus=1):
        lost = load.remote(gate.path, True)
        await gate.entered("loading")
        gate.release("loading")
        with pytest.raises(aiogpu.WorkerDiedError) as caught:
            await lost
        assert caught.value.last_output == ("loading ... ",)
        gate.forget("loading")
        loaded = load.remote(gate.path, False)
        await gate.entered("loading")
        gate.release("loading")
        await loaded
    output = re.sub(r"pid=\d+", "", getattr(capsys.readouterr(), stream[3:]))
    assert output == "(load ) loading ... \n(load ) loading ... done\n"


async def test_last_output_of_an_actor_covers_its_whole_life() -> None:
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

    aiogpu.run(main())
"""


def test_lines_of_an_unbuffered_program_are_not_torn() -> None:
    output = run(TORN, PYTHONUNBUFFERED="1")
    lines = re.findall(r"^(?:d{30}|\(flood pid=\d+\) t{30})$", output, re.MULTILINE)
    assert len(lines) == output.count("\n")
    assert sum("flood" in line for line in lines) == 10_000


def test_output_is_written_after_the_loop_has_ended() -> None:
    output = run(
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
    assert "x" * 100 in output


async def test_cancel_works_while_output_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has ended, but the result waits for the output."""
    terminal = slow_stdout(monkeypatch)
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        printed = tasks.output.options(num_gpus=1).remote(["x"])
        behind = tasks.output.options(num_gpus=1, timeout=60).remote(["y"])
        async with asyncio.timeout(60):
            while (await aiogpu.status()).workers[0].pid == 0:
                await asyncio.sleep(0)
            pid = (await aiogpu.status()).workers[0].pid
            while psutil.pid_exists(pid):
                await asyncio.sleep(0)
        assert printed.cancel()
        terminal.is_free.set()
        await behind  # this task had the GPU although the terminal was blocked
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


# On a node that programs have joined, each sees the output of its own tasks


def logged(place: Path) -> list[str]:
    begin, *lines = (place / FILE).read_text().splitlines()
    assert "client=0 task=0 out (node pid=" in begin
    return sorted(line.rpartition(") ")[2] for line in lines)


async def test_lines_come_before_the_result_and_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node_here(tmp_path, logs=tmp_path) as here:
        async with aiogpu.init(address=here.path):
            pid = await aiogpu.remote(talk).remote("hello")
            out, err = capsys.readouterr()
            assert f"(talk pid={pid}) hello\n" in out
            assert f"pid={pid}) hello raw\n" in out
            assert err == f"(talk pid={pid}) hello on stderr\n"
            pid = await aiogpu.remote(parent).remote("child")
            assert f"(talk pid={pid}) child\n" in capsys.readouterr().out
        async with here.join():
            await aiogpu.remote(talk).remote("secret")
        assert capsys.readouterr() == ("", "")
    words, kinds = ("hello", "child", "secret"), ("", " on stderr", " raw")
    assert logged(tmp_path) == sorted(word + kind for word in words for kind in kinds)


async def test_a_slow_terminal_slows_only_the_task_of_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_here(tmp_path) as here, aiogpu.init(address=here.path):
        terminal = slow_stdout(monkeypatch)
        flooding = aiogpu.remote(flood).remote(6000)
        clients = here.engine._supervisor.clients
        assert clients is not None
        await until(lambda: clients.routes._paused)
        (client,) = clients.by_id.values()
        assert client.is_slow
        assert not flooding.done()
        terminal.is_free.set()
        assert await flooding == 6000
        monkeypatch.undo()
        assert not clients.routes._paused
        assert terminal.getvalue().count("x" * 1000) == 6000


async def test_a_timeline_lists_what_has_run(tmp_path: Path) -> None:
    async with node_here(tmp_path) as here:
        async with here.join() as node:
            await asyncio.gather(*(aiogpu.remote(talk).remote("a") for _ in range(8)))
            with pytest.raises(KeyError):
                await aiogpu.remote(fail).remote()
            remote = node._session._engine
            assert isinstance(remote, RemoteEngine)
            spans = await remote.timeline()
        assert [span.name for span in spans].count("talk") == 8
        assert all(span.queued <= span.started <= span.ended for span in spans)
        assert {span.client for span in spans} == {remote.client}
        ended = {span.name: span.outcome for span in spans}
        assert ended == {"talk": "finished", "fail": "failed"}
        out = tmp_path / "out.json"
        arguments = [str(out), "--address", here.path]
        written = await asyncio.to_thread(CliRunner().invoke, timeline, arguments)
        assert written.exit_code == 0, written.output
        events = json.loads(out.read_text())["traceEvents"]
        assert sum(event["name"] == "talk" for event in events) == 8
        assert len(here.engine.spans()) == 9


# Records of `logging` in tasks are shown from the program's level on

LOGGING = """
    import logging, sys
    import aiogpu

    @aiogpu.remote
    def logs():
        log = logging.getLogger("lib")
        log.debug("a debug line")
        log.info("an info line")
        log.warning("a warning line")

    @aiogpu.remote(max_calls=1)
    def configures():
        own = dict(format="own %(levelname)s %(message)s", level=logging.DEBUG)
        logging.basicConfig(**own)
        logging.debug("nothing")
        logging.basicConfig(**own, force=True)
        logging.debug("format")

    async def main():
        async with aiogpu.init(OPTIONS):
            await logs.remote()
            await configures.remote()

    BEFORE
    aiogpu.run(main())
"""
CONFIGURE = "logging.basicConfig(format='by %(aiogpu_task_name)s: %(message)s', level="


def shown(before: str, options: str = "num_cpus=1", **variables: str) -> list[str]:
    """Run a program whose handler has its own format; return the lines it shows."""
    source = LOGGING.replace("OPTIONS", options).replace("BEFORE", before)
    program = start(source, **variables)
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, ""), err
    return [re.sub(r"pid=\d+", "pid=N", line) for line in err.splitlines()]


FORCED = "(configures pid=N) own DEBUG format"
LEVELS = [
    ("", ["(logs pid=N) a warning line", FORCED]),
    (
        f"{CONFIGURE}logging.INFO)",
        ["by logs: an info line", "by logs: a warning line", FORCED],
    ),
    (
        f"{CONFIGURE}logging.DEBUG); logging.getLogger('lib').setLevel(logging.INFO)",
        [
            *("by logs: an info line", "by logs: a warning line"),
            *("by configures: nothing", FORCED),
        ],
    ),
    (f"{CONFIGURE}logging.ERROR)", [FORCED]),
]


@pytest.mark.parametrize(
    ("before", "lines"), LEVELS, ids=["none", "info", "lib", "error"]
)
def test_a_task_logs_what_the_program_logs(before: str, lines: list[str]) -> None:
    assert shown(before) == lines


def test_programs_of_one_node_log_at_their_own_levels() -> None:
    with open_sandbox() as here:
        here.run("start", "--head", "--num-cpus=1")
        joined = {**here.variables, "AIOGPU_ADDRESS": "auto"}
        for before, lines in LEVELS[1:3]:
            assert shown(before, "", **joined) == lines
        logged, _ = here.run("logs")
    assert logged.count("an info line") == 2


class Kept(logging.Handler):
    """A handler that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    logger = logging.getLogger("lib")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
async def test_a_program_handles_the_records_of_its_tasks(
    address: str, kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        actor: Any = aiogpu.remote(num_gpus=1)(Logs).remote()
        pid = await actor.talk.remote()
        first, second, third = kept.records
        origin = (first.name, first.levelname, first.process)
        assert origin == ("lib.part", "WARNING", pid)
        assert (first.msg, first.args) == ("%s of %d", ("one", 2))
        assert first.__dict__["aiogpu_task"] > 0
        assert (
            first.__dict__.items()
            >= {
                "mine": {"a": (1,)},
                "aiogpu_task_name": "Logs.talk",
                "aiogpu_devices": (0,),
            }.items()
        )
        assert (second.getMessage(), second.__dict__["mine"]) == ("<Strange>",) * 2
        assert third.exc_text is not None
        assert third.exc_text.endswith("KeyError: 'x'")
        kept.records.clear()
        await aiogpu.remote(log_by_child).remote()
        # Only results for the program itself wait for the output before them.
        await until(lambda: len(kept.records) == 3)
        assert [r.levelname for r in kept.records] == ["WARNING", "ERROR", "ERROR"]
        assert {r.__dict__["aiogpu_devices"] for r in kept.records} == {()}
        kept.records.clear()
        logging.getLogger("lib.part").addFilter(lambda record: record.lineno < 0)
        await actor.talk.remote()
        logging.getLogger("lib.part").filters.clear()
    async with aiogpu.init(address=address, num_cpus=1, log_to_driver=False):
        await aiogpu.remote(Logs().talk).remote()
    assert kept.records == []
    assert capsys.readouterr() == ("", "")
