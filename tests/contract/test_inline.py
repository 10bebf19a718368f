"""What is special where tasks run in the calling process."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pdb
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = pytest.mark.usefixtures("no_leaks")

VISIBLE = "CUDA_VISIBLE_DEVICES"
seen: list[object] = []
"""What the tasks of this module, which are this module's own, have seen."""


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(
        address="inline", num_cpus=2, num_gpus=2, cancel_grace=0.1
    ) as session:
        yield session


@aiogpu.remote
def note(what: object) -> None:
    seen.append(what)


@aiogpu.remote
async def note_softly(what: object) -> None:
    seen.append(("begin", what))
    await asyncio.sleep(0)
    seen.append(("end", what))


@aiogpu.remote
def note_place() -> None:
    seen.append((os.getpid(), threading.current_thread()))


@aiogpu.remote
async def note_loop() -> None:
    seen.append((asyncio.get_running_loop(), threading.current_thread()))


async def test_tasks_run_in_this_process_and_thread(node: aiogpu.types.Node) -> None:
    await note_place.remote()
    await note_loop.remote()
    here = threading.current_thread()
    assert seen == [(os.getpid(), here), (asyncio.get_running_loop(), here)]


async def test_one_after_the_other_in_order(node: aiogpu.types.Node) -> None:
    """Whatever their priority; and nothing runs inside `.remote()`."""
    handles = [
        note.remote(1),
        note_softly.options(priority=-1).remote(2),
        note.options(priority=5).remote(3),
        note_softly.remote(4),
    ]
    assert seen == []
    await asyncio.gather(*handles)
    assert seen == [1, ("begin", 2), ("end", 2), 3, ("begin", 4), ("end", 4)]


async def test_the_first_remote_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """[B5] Where the variable says so, a program needs no change."""
    monkeypatch.setenv("AIOGPU_ADDRESS", "inline")
    assert await tasks.pid.remote() == os.getpid()
    await aiogpu.shutdown()


async def test_the_program_has_its_turn_between_two_tasks(
    node: aiogpu.types.Node,
) -> None:
    handles = [note.remote(name) for name in "ab"]
    handles[0].add_done_callback(lambda _: seen.append("between"))
    await asyncio.gather(*handles)
    assert seen == ["a", "between", "b"]


async def test_a_monkeypatch_is_seen(
    node: aiogpu.types.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "pass_gate", lambda path, name: f"patched {name}")
    assert await tasks.gated.remote("no path", "a") == "patched a"


async def test_a_trace_function_is_called(node: aiogpu.types.Node) -> None:
    """So coverage is measured, and the breakpoints of any debugger work."""
    code = note.__wrapped__.__code__
    lines: list[int] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is code and event == "line":
            lines.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await note.remote(1)
    finally:
        sys.settrace(before)
    assert lines == [code.co_firstlineno + 2]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_breakpoint_stops_in_the_task(
    kind: str, node: aiogpu.types.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    prompt = pdb.Pdb(stdin=io.StringIO("p a * b\nc\n"), stdout=out, nosigint=True)
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: prompt.set_trace(sys._getframe(1))
    )

    @aiogpu.remote
    def plain(a: int, b: int) -> int:
        breakpoint()
        return a + b

    @aiogpu.remote
    async def coroutine(a: int, b: int) -> int:
        await asyncio.sleep(0)
        breakpoint()
        return a + b

    task = plain if kind == "plain" else coroutine
    before = sys.gettrace()
    assert await task.remote(6, 7) == 13
    sys.settrace(before)
    assert f"{kind}()\n" in out.getvalue()
    assert "(Pdb) 42\n" in out.getvalue()


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_debugger_finds_the_frames_after_the_end(
    kind: str, node: aiogpu.types.Node
) -> None:
    """As `pytest --pdb` does; the worker's text is the cause all the same."""

    def plain(local: str) -> None:
        raise KeyError(local)

    async def coroutine(local: str) -> None:
        await asyncio.sleep(0)
        plain(local)

    with pytest.raises(KeyError, match="found") as caught:
        await aiogpu.remote(locals()[kind]).remote("found")
    names = [entry.name for entry in caught.traceback]
    expected = ["plain"] if kind == "plain" else ["coroutine", "plain"]
    assert names[-len(expected) :] == expected
    assert "engines/inline" not in " ".join(str(e.path) for e in caught.traceback)
    assert caught.traceback[-1].frame.f_locals["local"] == "found"
    assert "raise KeyError(local)" in str(caught.value.__cause__)
    assert "engines/inline" not in str(caught.value.__cause__)


async def test_values_are_copies(node: aiogpu.types.Node) -> None:
    """Else a test would pass here whose program fails in workers."""
    mine: list[object] = [1]

    @aiogpu.remote
    def change(given: list[object]) -> list[object]:
        given.append(2)
        mine.append(3)
        return mine

    assert await change.remote(mine) == [1, 3]
    assert mine == [1]
    back = await tasks.echo.remote(mine)
    assert (back, back is mine) == ([1], False)


async def test_a_function_sent_by_value_lives_as_long_as_in_a_worker(
    node: aiogpu.types.Node,
) -> None:
    def make() -> Any:
        count = 0

        def counting() -> int:
            nonlocal count
            count += 1
            return count

        return counting

    reused = aiogpu.remote(make())
    assert [await reused.remote() for _ in range(3)] == [1, 2, 3]
    isolated = aiogpu.remote(num_gpus=1)(make())
    assert [await isolated.remote() for _ in range(3)] == [1, 1, 1]


async def test_a_plain_function_has_no_loop(node: aiogpu.types.Node) -> None:
    """As in a worker: it may run one of its own."""
    loop = asyncio.get_running_loop()

    @aiogpu.remote
    def run_one() -> int:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return asyncio.run(asyncio.sleep(0, 5)) + aiogpu.run(asyncio.sleep(0, 6))

    assert await run_one.remote() == 11
    assert asyncio.get_running_loop() is loop


variable: ContextVar[str] = ContextVar("variable", default="unset")


@aiogpu.remote
def read_variable() -> str:
    return variable.get()


@aiogpu.remote
async def read_variable_softly() -> str:
    before = variable.get()
    variable.set("the task's")
    return before


async def test_context_variables_are_not_inherited(node: aiogpu.types.Node) -> None:
    variable.set("the program's")

    assert await read_variable_softly.remote() == "unset"
    assert await read_variable.remote() == "unset"
    assert variable.get() == "the program's"


@pytest.mark.parametrize("ends", ["well", "badly"])
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_the_surroundings_are_there_and_taken_off(
    kind: str, ends: str, node: aiogpu.types.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "before")
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.delenv("AIOGPU_TEST_B", raising=False)
    found: list[object] = []

    def plain(is_bad: bool) -> list[object]:
        found = [
            os.environ.get(name)
            for name in ("CUDA_VISIBLE_DEVICES", "AIOGPU_TEST_A", "AIOGPU_TEST_B")
        ]
        os.environ["AIOGPU_TEST_A"] = "spoilt"
        context = aiogpu.get_runtime_context()
        assert (context.task_name, context.worker_id) == ("named", 1)
        if is_bad:
            raise LookupError(found)
        return found

    async def coroutine(is_bad: bool) -> list[object]:
        await asyncio.sleep(0)
        return plain(is_bad)

    function = plain if kind == "plain" else coroutine
    variables = {"AIOGPU_TEST_A": "a", "AIOGPU_TEST_B": "b"}
    task = aiogpu.remote(num_gpus=2, name="named", runtime_env={"env_vars": variables})(
        function
    )
    try:
        found = await task.remote(ends == "badly")  # type: ignore[assignment]
    except LookupError as error:
        found = error.args[0]
    assert found == ["0,1", "a", "b"]
    names = (VISIBLE, "AIOGPU_TEST_A", "AIOGPU_TEST_B")
    assert [os.environ.get(name) for name in names] == ["before", "before", None]
    context = aiogpu.get_runtime_context()
    assert (context.node_id, context.worker_id, context.task_id) == ("", 0, 0)
    assert (context.task_name, context.assigned_resources) == ("", {})
    assert aiogpu.get_gpu_ids() == []


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_coroutine_cannot_end_the_program(
    kind: type[BaseException], node: aiogpu.types.Node
) -> None:
    @aiogpu.remote
    async def fail() -> None:
        await asyncio.sleep(0)
        raise kind

    with pytest.raises(aiogpu.TaskError, match=kind.__name__):
        await fail.remote()
    assert await tasks.add.remote(1) == 2


async def test_a_plain_function_that_ends_too_late(node: aiogpu.types.Node) -> None:
    """It cannot be interrupted. What waited behind it beyond its time never runs."""

    @aiogpu.remote(timeout=0.02)
    def slow() -> None:
        time.sleep(0.05)

    late = slow.remote()
    behind = note.options(timeout=0.03).remote("behind")
    after = note.options(timeout=60).remote("after")
    with pytest.raises(aiogpu.TaskTimeoutError, match=r"slow .* 0\.02 s"):
        await late
    with pytest.raises(aiogpu.TaskTimeoutError, match=r"note .* 0\.03 s"):
        await behind
    await after
    assert seen == ["after"]


@aiogpu.remote(retry_exceptions=True, max_retries=-1)
async def never_well() -> None:
    seen.append(os.environ[VISIBLE])
    os.environ[VISIBLE] = "spoilt"
    await asyncio.sleep(0)
    raise LookupError


async def test_a_retried_task_can_be_stopped(node: aiogpu.types.Node) -> None:
    seconds = 0.05
    while len(seen) < 2:
        with pytest.raises(aiogpu.TaskTimeoutError):
            await never_well.options(timeout=seconds).remote()
        seconds *= 2
    assert set(seen) == {""}
    for steps in range(12):
        handle = never_well.remote()
        for _ in range(steps):
            await asyncio.sleep(0)
        handle.cancel()
        assert await tasks.add.remote(1) == 2, steps
    found = await aiogpu.available_resources()
    assert {"CPU": 2.0, "GPU": 2.0}.items() <= found.items()


@aiogpu.remote
def cancel_it() -> None:
    (handle,) = seen
    assert isinstance(handle, aiogpu.Handle)
    assert handle.cancel()


async def test_a_handle_that_its_own_task_cancels(node: aiogpu.types.Node) -> None:
    handle = cancel_it.remote()
    seen.append(handle)
    with pytest.raises(asyncio.CancelledError):
        await handle
    assert await tasks.add.remote(1) == 2


async def test_cancelling_it_before_its_first_step(node: aiogpu.types.Node) -> None:
    """The coroutine was made and never begun; nobody warns of that."""
    loop = asyncio.get_running_loop()
    handle = note_softly.remote("never")
    loop.call_soon(handle.cancel)
    with pytest.raises(asyncio.CancelledError):
        await handle
    assert await tasks.add.remote(1) == 2
    assert seen == []


never: list[asyncio.Event] = []
"""What is waited for; unheld, the collector would take it with the task that waits."""


@aiogpu.remote
async def stubborn() -> None:
    for _ in range(3):
        try:
            seen.append("begin")
            never[:] = [asyncio.Event()]
            await never[0].wait()
        except asyncio.CancelledError:
            seen.append("cancelled")


async def test_a_coroutine_that_does_not_end_is_left_behind(
    node: aiogpu.types.Node, caplog: pytest.LogCaptureFixture
) -> None:
    others = asyncio.all_tasks()
    handle = stubborn.options(num_gpus=2).remote()
    after = tasks.where.options(num_gpus=2).remote()
    while not seen:
        await asyncio.sleep(0)
    handle.cancel()
    assert (await aiogpu.available_resources())["GPU"] == 0.0
    assert (await after)["ids"] == [0, 1]
    # The collector may find meanwhile what another test has left behind.
    (record,) = (one for one in caplog.records if one.name != "asyncio")
    assert "stubborn was cancelled 0.1 s ago and runs on" in record.getMessage()
    assert seen == ["begin", "cancelled", "begin", "cancelled", "begin"]
    (left,) = asyncio.all_tasks() - others
    left.cancel()
    await asyncio.wait([left])


async def test_a_shutdown_is_bounded_and_leaves_the_loop_as_it_was() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks()
    async with aiogpu.init(address="inline", num_cpus=1, cancel_grace=0.05):
        handle = stubborn.remote()
        waiting = note.remote("never")
        while not seen:
            await asyncio.sleep(0)
        assert loop.get_task_factory() is not None
    for ended in (handle, waiting):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await ended
    (left,) = asyncio.all_tasks() - others
    left.cancel()
    await asyncio.wait([left])
    assert loop.get_task_factory() is None
    assert VISIBLE not in os.environ or os.environ[VISIBLE] != ""
    assert "never" not in seen


async def test_a_task_factory_of_the_programs_own(node: aiogpu.types.Node) -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        made.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    @aiogpu.remote
    async def start_one() -> None:
        await asyncio.create_task(asyncio.sleep(0))

    loop.set_task_factory(factory)
    try:
        await start_one.remote()
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)
    assert "sleep" in made


async def test_the_programs_own_asyncio_tasks_are_left_alone(gate: Gate) -> None:
    async with aiogpu.init(address="inline", num_cpus=1):
        handle = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        mine = asyncio.create_task(asyncio.Event().wait())
        gate.release("a")
        await handle
        await asyncio.sleep(0)
        assert not mine.done()
        mine.cancel()
        await asyncio.wait([mine])


async def test_status(node: aiogpu.types.Node, gate: Gate) -> None:
    assert (await aiogpu.status()).workers == ()
    first = tasks.gated_coroutine.options(num_gpus=0.5, name="first")
    running = first.remote(gate.path, "a")
    waiting = [note.options(priority=p, name=f"p{p}").remote(p) for p in (0, 5)]
    await gate.entered("a")
    status = await aiogpu.status()
    ((holder,), ()) = (device.holders for device in status.devices)
    assert (holder.share, holder.task, holder.pid) == (0.5, "first", os.getpid())
    (worker,) = status.workers
    assert (worker.pid, worker.state) == (os.getpid(), "busy")
    assert worker.task == "first"
    assert [(t.name, t.state) for t in status.tasks] == [
        ("first", "running"),
        ("p0", "waiting"),
        ("p5", "waiting"),
    ]
    assert [task.reason for task in status.waiting] == ["waits for its turn"] * 2
    gate.release("a")
    await asyncio.gather(running, *waiting)


@pytest.mark.parametrize("is_shown", [True, False])
async def test_output_has_no_prefix(
    is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    @aiogpu.remote
    async def print_softly() -> None:
        print("a")
        await asyncio.sleep(0)
        print("b", file=sys.stderr)

    async with aiogpu.init(address="inline", num_cpus=1, log_to_driver=is_shown):
        await tasks.output.remote(["x", "y"])
        await print_softly.remote()
        print("the program's own")
    out, err = capsys.readouterr()
    own = "the program's own\n"
    assert (out, err) == (f"x\ny\na\n{own}" if is_shown else own, "b\n" * is_shown)


async def test_preloaded_modules_are_imported_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preloaded_inline.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(address="inline", preload=["preloaded_inline"]):
        assert "preloaded_inline" in sys.modules
    with pytest.raises(aiogpu.errors.PreloadError, match="no_such_module"):
        await aiogpu.init(address="inline", preload=["no_such_module"])


def test_on_the_loop_of_another_thread() -> None:
    async def main() -> None:
        async with aiogpu.init(address="inline", num_cpus=1):
            await note_place.remote()

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    thread.join()
    assert seen == [(os.getpid(), thread)]


def test_one_whose_loop_has_gone_is_dropped() -> None:
    """It was left behind, with an asyncio task of its own; nothing is raised."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)

    async def main() -> None:
        async with aiogpu.init(address="inline", num_cpus=1, cancel_grace=0.01):
            handle = stubborn_parent.remote()
            while not seen:
                await asyncio.sleep(0)
            assert not handle.done()

    loop.run_until_complete(main())
    loop.close()
    gc.collect()
    assert seen == ["begin", "cancelled", "begin", "cancelled", "begin"]


@aiogpu.remote
async def stubborn_parent() -> None:
    other = asyncio.create_task(asyncio.Event().wait())
    await stubborn.__wrapped__()
    assert not other.done()


async def test_haste_gives_the_variables_back() -> None:
    """As at the interpreter's exit, where no loop runs any more."""
    before = dict(os.environ)
    async with aiogpu.init(address="inline", num_cpus=1) as session:
        handle = wait_for_ever.remote()
        while not seen:
            await asyncio.sleep(0)
        assert os.environ[VISIBLE] == ""
        session._session.close_now()
        assert dict(os.environ) == before
        handle.cancel()
        await asyncio.sleep(0)
    assert seen == ["begin", "end"]


@aiogpu.remote
async def wait_for_ever() -> None:
    seen.append("begin")
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("end")


async def test_the_program_ends_while_a_task_runs() -> None:
    async def main() -> None:
        await aiogpu.init(address="inline", num_cpus=1)
        handles = [wait_for_ever.remote(), note.remote("never")]
        while not seen:
            await asyncio.sleep(0)
        assert not any(handle.done() for handle in handles)

    before = dict(os.environ)
    thread = threading.Thread(target=aiogpu.run, args=[main()])
    thread.start()
    await asyncio.to_thread(thread.join)
    assert dict(os.environ) == before
    assert seen[:2] == ["begin", "end"]
