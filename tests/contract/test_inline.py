"""The inline engine: tasks and actors run in the calling process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import io
import os
import pdb
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import handed_on, tasks
from tests.contract.actor_classes import Async, Broken, Counter, Groups, Threads
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

VISIBLE = "CUDA_VISIBLE_DEVICES"
seen: list[Any] = []
"""Notes of the tasks and actors of this module, which run in this process."""


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def engine_of(node: Node) -> Any:
    return node._session._engine  # type: ignore[attr-defined]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """A node of which nothing is held when the test is over."""
    before = os.environ.get(VISIBLE)
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=2, cancel_grace=0.1
    ) as session:
        yield session
        gc.collect()  # errors that the test caught hold its handles
        engine = engine_of(session)
        await until(lambda: not engine.calls and not engine.actors.all())
    assert os.environ.get(VISIBLE) == before
    assert aiogpu.get_runtime_context().worker_id == 0
    with pytest.raises(errors.MisuseError):
        aiogpu.exit_actor()


async def stop_left_behind(others: set[asyncio.Task[Any]]) -> None:
    """Stop the one asyncio task that a node has left behind."""
    (left,) = asyncio.all_tasks() - others
    left.cancel()
    await asyncio.wait([left])


@aiogpu.remote
def note(value: object) -> None:
    seen.append(value)


@aiogpu.remote
async def note_softly(value: object) -> None:
    seen.append(("begin", value))
    await asyncio.sleep(0)
    seen.append(("end", value))


async def test_tasks_see_a_monkeypatch(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "pass_gate", lambda path, name: f"patched {name}")
    assert await tasks.gated.remote("no path", "a") == "patched a"


async def test_a_trace_function_sees_the_lines_of_a_task(node: Node) -> None:
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
    kind: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    prompt = pdb.Pdb(stdin=io.StringIO("p a * b\nc\n"), stdout=out, nosigint=True)
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: prompt.set_trace(sys._getframe(1))
    )

    def plain(a: int, b: int) -> int:
        breakpoint()
        return a + b

    async def coroutine(a: int, b: int) -> int:
        await asyncio.sleep(0)
        breakpoint()
        return a + b

    function: Any = plain if kind == "plain" else coroutine
    before = sys.gettrace()
    assert await aiogpu.remote(function).remote(6, 7) == 13
    sys.settrace(before)
    assert f"{kind}()\n" in out.getvalue()
    assert "(Pdb) 42\n" in out.getvalue()


async def test_a_function_sent_by_value_lives_as_in_a_worker(node: Node) -> None:
    def make() -> Any:
        count = 0

        def counting() -> int:
            nonlocal count
            count += 1
            return count

        return counting

    reused, isolated = aiogpu.remote(make()), aiogpu.remote(num_gpus=1)(make())
    assert [await reused.remote() for _ in range(3)] == [1, 2, 3]
    assert [await isolated.remote() for _ in range(3)] == [1, 1, 1]


async def test_a_plain_function_has_no_loop(node: Node) -> None:
    """As in a worker: it may run a loop of its own."""
    loop = asyncio.get_running_loop()

    @aiogpu.remote
    def run_loops() -> int:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return asyncio.run(asyncio.sleep(0, 5)) + aiogpu.run(asyncio.sleep(0, 6))

    assert await run_loops.remote() == 11
    assert asyncio.get_running_loop() is loop


variable: ContextVar[str] = ContextVar("variable", default="unset")


@aiogpu.remote
def read_variable() -> str:
    return variable.get()


@aiogpu.remote
async def read_and_set_variable() -> str:
    before = variable.get()
    variable.set("the task's")
    return before


async def test_tasks_do_not_inherit_context_variables(node: Node) -> None:
    variable.set("the program's")
    assert await read_and_set_variable.remote() == "unset"
    assert await read_variable.remote() == "unset"
    assert variable.get() == "the program's"


async def test_a_plain_function_overruns_its_timeout(node: Node) -> None:
    """No code can interrupt it. A task behind it whose time is over never runs."""

    @aiogpu.remote(timeout=0.02)
    def slow() -> None:
        time.sleep(0.05)

    late = slow.remote()
    behind = note.options(timeout=0.03).remote("behind")
    after = note.options(timeout=60).remote("after")
    await raises(errors.TaskTimeoutError, late, match=r"slow .* 0\.02 s")
    await raises(errors.TaskTimeoutError, behind, match=r"note .* 0\.03 s")
    await after
    assert seen == ["after"]


async def test_a_plain_method_overruns_its_timeout(node: Node) -> None:
    @aiogpu.remote
    class Slow:
        @aiogpu.method(run_timeout=0.02)
        def work(self, seconds: float) -> float:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
            return seconds

    actor = Slow.remote()
    late, behind = actor.work.remote(0.05), actor.work.remote(0)
    await raises(errors.TaskTimeoutError, late, match=r"Slow\.work .* 0\.02 s: it ran")
    assert await behind == 0


@aiogpu.remote(retry_exceptions=True, max_retries=-1)
async def fail_for_ever() -> None:
    seen.append(os.environ[VISIBLE])
    os.environ[VISIBLE] = "spoilt"
    await asyncio.sleep(0)
    raise LookupError


async def test_a_retried_task_can_be_stopped(node: Node) -> None:
    seconds = 0.05
    while len(seen) < 2:
        await raises(
            errors.TaskTimeoutError, fail_for_ever.options(timeout=seconds).remote()
        )
        seconds *= 2
    assert set(seen) == {""}
    for steps in range(12):
        handle = fail_for_ever.remote()
        for _ in range(steps):
            await asyncio.sleep(0)
        handle.cancel()
        assert await tasks.add.remote(1) == 2, steps
    free = await aiogpu.available_resources()
    assert {"CPU": 1.0, "GPU": 2.0}.items() <= free.items()


awaited: list[asyncio.Event] = []
"""Holds the event of `stubborn`, or the collector would take event and task."""


@aiogpu.remote
async def stubborn() -> None:
    for _ in range(3):
        try:
            seen.append("begin")
            awaited[:] = [asyncio.Event()]
            await awaited[0].wait()
        except asyncio.CancelledError:
            seen.append("cancelled")


STUBBORN = ["begin", "cancelled", "begin", "cancelled", "begin"]
"""Notes of `stubborn` when its node gives up."""


async def test_a_shutdown_is_bounded_and_leaves_the_loop_as_it_was() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks()
    async with aiogpu.init(address="inline", num_cpus=1, cancel_grace=0.05):
        handle = stubborn.remote()
        await until(lambda: seen)
        assert loop.get_task_factory() is not None
    await raises(errors.NodeClosedError, handle)
    await stop_left_behind(others)
    assert loop.get_task_factory() is None
    assert VISIBLE not in os.environ or os.environ[VISIBLE] != ""


async def test_the_programs_task_factory_stays(node: Node) -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        made.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    @aiogpu.remote
    async def start_task() -> None:
        await asyncio.create_task(asyncio.sleep(0))

    loop.set_task_factory(factory)
    try:
        await start_task.remote()
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)
    assert "sleep" in made


async def test_the_programs_asyncio_tasks_run_on(gate: Gate) -> None:
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


@aiogpu.remote
async def stubborn_parent() -> None:
    other = asyncio.create_task(asyncio.Event().wait())
    await stubborn.__wrapped__()
    assert not other.done()


def test_a_task_whose_loop_is_closed_is_dropped() -> None:
    """The task was left behind, with an asyncio task of its own. Nothing is raised."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)

    async def main() -> None:
        async with aiogpu.init(address="inline", num_cpus=1, cancel_grace=0.01):
            handle = stubborn_parent.remote()
            await until(lambda: seen)
            assert not handle.done()

    loop.run_until_complete(main())
    loop.close()
    gc.collect()
    assert seen == STUBBORN


@aiogpu.remote
async def wait_for_ever() -> None:
    seen.append("begin")
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("end")


@aiogpu.remote
def note_place() -> None:
    seen.append((os.getpid(), threading.current_thread()))


@aiogpu.remote
async def note_loop() -> None:
    seen.append((asyncio.get_running_loop(), threading.current_thread()))


async def test_tasks_run_in_this_process_and_thread(node: Node) -> None:
    await note_place.remote()
    await note_loop.remote()
    here = threading.current_thread()
    assert seen == [(os.getpid(), here), (asyncio.get_running_loop(), here)]

    async def elsewhere() -> None:
        async with aiogpu.init(address="inline", num_cpus=1):
            await note_place.remote()

    thread = threading.Thread(target=asyncio.run, args=[elsewhere()])
    thread.start()
    await asyncio.to_thread(thread.join)
    assert seen[2:] == [(os.getpid(), thread)]


async def test_tasks_run_in_the_order_of_submission(node: Node) -> None:
    """Whatever their priority; nothing runs inside `.remote()`."""
    handles = [
        note.remote(1),
        note.options(priority=-1).remote(2),
        note.options(priority=5).remote(3),
    ]
    assert seen == []
    handles[0].add_done_callback(lambda _: seen.append("the program's turn"))
    await asyncio.gather(*handles)
    assert seen.index("the program's turn") < seen.index(3)
    assert [noted for noted in seen if type(noted) is int] == [1, 2, 3]


async def test_a_debugger_finds_the_frames_of_a_failed_task(node: Node) -> None:
    """As `pytest --pdb` does; the worker's text is the cause all the same."""

    def plain(local: str) -> None:
        raise KeyError(local)

    async def coroutine(local: str) -> None:
        await asyncio.sleep(0)
        plain(local)

    class Actor:
        def method(self, local: str) -> None:
            plain(local)

    actor = aiogpu.remote(Actor).remote()
    for call, expected in (
        (aiogpu.remote(plain).remote, ["plain"]),
        (aiogpu.remote(coroutine).remote, ["coroutine", "plain"]),
        (actor.method.remote, ["method", "plain"]),
    ):
        with pytest.raises(KeyError, match="found") as caught:
            await call("found")
        names = [entry.name for entry in caught.traceback]
        assert names[-len(expected) :] == expected
        assert "engines/inline" not in " ".join(str(e.path) for e in caught.traceback)
        assert caught.traceback[-1].frame.f_locals["local"] == "found"
        assert "raise KeyError(local)" in str(caught.value.__cause__)
        assert "engines/inline" not in str(caught.value.__cause__)
    error = await raises(
        errors.ActorDiedError, Broken.remote(OSError), match="OSError: no model"
    )
    trace = error.__cause__.__traceback__  # type: ignore[union-attr]
    assert trace.tb_frame.f_locals["kind"] is OSError  # type: ignore[union-attr]


async def test_values_are_copies(node: Node) -> None:
    """Otherwise a test would pass here whose program fails in workers."""
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
    counter = await Counter.remote()
    await counter.note.remote(mine)
    (kept,) = await counter.notes.remote()
    assert (kept, kept is mine) == ([1], False)


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_task_sees_its_own_context_and_variables(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (VISIBLE, "AIOGPU_TEST_A", "AIOGPU_TEST_B")
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.delenv("AIOGPU_TEST_B", raising=False)

    def plain(is_bad: bool) -> list[object]:
        values = [os.environ.get(name) for name in names]
        os.environ["AIOGPU_TEST_A"] = "spoilt"
        context = aiogpu.get_runtime_context()
        assert (context.task_name, context.worker_id > 0) == ("named", True)
        if is_bad:
            raise LookupError(values)
        return values

    async def coroutine(is_bad: bool) -> list[object]:
        await asyncio.sleep(0)
        return plain(is_bad)

    env = {"env_vars": {"AIOGPU_TEST_A": "a", "AIOGPU_TEST_B": "b"}}
    task = aiogpu.remote(num_gpus=2, name="named", runtime_env=env)(
        plain if kind == "plain" else coroutine
    )
    async with aiogpu.init(address="inline", num_gpus=2):
        monkeypatch.setenv(VISIBLE, "before")
        for is_bad in (False, True):
            try:
                values = await task.remote(is_bad)
            except LookupError as error:
                values = error.args[0]
            assert values == ["0,1", "a", "b"]
            assert [*map(os.environ.get, names)] == ["before", "before", None]
            context = aiogpu.get_runtime_context()
            assert (context.node_id, context.worker_id, context.task_id) == ("", 0, 0)
            assert (context.task_name, context.assigned_resources) == ("", {})
            assert aiogpu.get_gpu_ids() == []


@aiogpu.remote
def cancel_itself() -> None:
    (handle,) = seen
    assert handle.cancel()


async def test_a_task_cancelled_early_or_by_itself_ends(node: Node) -> None:
    """No warning about a coroutine that was made and never ran."""
    itself = cancel_itself.remote()
    seen.append(itself)
    await raises(asyncio.CancelledError, itself)
    early = note_softly.remote("never")
    asyncio.get_running_loop().call_soon(early.cancel)
    await raises(asyncio.CancelledError, early)
    assert await tasks.add.remote(1) == 2
    assert seen == [itself]


async def test_pytest_captures_what_tasks_print(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    @aiogpu.remote
    async def print_softly() -> None:
        print("a")
        await asyncio.sleep(0)
        print("b", file=sys.stderr)

    class Prints:
        def __init__(self) -> None:
            print("constructor")

        async def method(self) -> None:
            print("method")

    await tasks.output.remote(["x", "y"])
    await print_softly.remote()
    async with aiogpu.remote(Prints).remote() as actor:
        await actor.method.remote()
    out, err = capsys.readouterr()
    assert (out.split(), err) == ([*"xya", "constructor", "method"], "b\n")


async def test_a_coroutine_cannot_end_the_program(node: Node) -> None:
    @aiogpu.remote
    async def fail(kind: type[BaseException]) -> None:
        await asyncio.sleep(0)
        raise kind

    for kind in (SystemExit, KeyboardInterrupt, GeneratorExit):
        await raises(errors.TaskError, fail.remote(kind), match=kind.__name__)
    assert await tasks.add.remote(1) == 2


# Actors


def facts() -> tuple[Any, ...]:
    context = aiogpu.get_runtime_context()
    return context.task_name, aiogpu.get_gpu_ids(), os.environ.get(VISIBLE)


class Noting:
    """Notes in this process when the actor is gone."""

    def facts(self) -> tuple[Any, ...]:
        return facts()

    def __del__(self) -> None:
        seen.append("gone")


@aiogpu.remote
class Visited(Noting):
    """Notes in this process what becomes of the actor and its calls."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.background: asyncio.Task[None] | None = None

    async def facts_of_three(self) -> list[tuple[Any, ...]]:
        async def later() -> tuple[Any, ...]:
            await asyncio.sleep(0)
            return facts()

        before = facts()
        await asyncio.sleep(0)
        return [before, *await asyncio.gather(later(), later()), facts()]

    async def wait(self, name: str) -> str:
        seen.append(name)
        try:
            await self.event.wait()
        except asyncio.CancelledError:
            seen.append(f"{name} cancelled")
            raise
        return name

    async def begin(self) -> None:
        self.background = asyncio.create_task(self.rest())
        await asyncio.sleep(0)

    async def rest(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(("rest ended", *facts()))

    def let_pass(self) -> None:
        self.event.set()

    async def ask(self, text: str) -> Any:
        return await append_one.remote(text)

    async def close(self) -> None:
        seen.append("closing")
        await asyncio.sleep(0)
        seen.append(("closed", *facts()))


@aiogpu.remote
class Plain(Noting):
    def note(self, value: object) -> None:
        seen.append(value)

    def child(self) -> Any:
        return aiogpu.get(tasks.where.options(num_gpus=1).remote()), facts()

    def kill(self, actor: Any) -> str:
        aiogpu.kill(actor)
        return "killed"

    def hidden_wait(self, name: str) -> Any:
        """A plain method that gives a coroutine, as decorators make them."""
        return self._wait(name)

    async def _wait(self, name: str) -> None:
        seen.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(f"{name} ended")


@aiogpu.remote
class Counts:
    def up(self, limit: int) -> Iterator[int]:
        yield from range(limit)


@aiogpu.remote
def append_one(text: str) -> str:
    return f"{text} 1"


@aiogpu.remote
async def ask_through(actor: Any) -> Any:
    return await actor.ask.remote("task")


async def test_methods_wait_for_tasks_and_tasks_for_methods(node: Node) -> None:
    """A task that a method starts runs before the task that waits for the method."""
    visited = await Visited.remote()
    assert await ask_through.remote(visited) == "task 1"
    calls = append_one.remote("x"), ask_through.remote(visited), append_one.remote("y")
    assert await asyncio.gather(*calls) == ["x 1", "task 1", "y 1"]


@aiogpu.remote
def add_by_a_child(counter: Any, k: int) -> int:
    return int(aiogpu.get(handed_on.add_soon.remote(counter, k)))


@aiogpu.remote
def add_on_a_loop(actor: Any) -> Any:
    async def inner() -> Any:
        return await actor.add.remote(1)

    return asyncio.run(inner())


async def test_plain_code_cannot_wait_for_the_programs_loop(node: Node) -> None:
    actor = await Async.remote()
    with pytest.raises(
        errors.DeadlockError, match=r"Async cannot run.*address='local'"
    ):
        await handed_on.add_to.remote(actor, 1)
    with pytest.raises(
        errors.DeadlockError, match=r"Async cannot run.*address='local'"
    ):
        await add_on_a_loop.remote(actor)
    assert await handed_on.add_soon.remote(actor, 2) == 4, "all calls have run"


async def test_the_end_of_the_node_ends_actors_and_calls() -> None:
    async with aiogpu.init(address="inline", num_cpus=1, num_gpus=1):
        visited = await Visited.options(num_gpus=1).remote()
        waiting = visited.wait.remote("a")
        await visited.begin.remote()
        plain = await Plain.remote()
    await raises(errors.NodeClosedError, waiting, visited, plain)
    await until(lambda: seen.count("gone") == 2)
    texts = [noted for noted in seen if isinstance(noted, str)]
    assert sorted(texts) == ["a", "a cancelled", "closing", "gone", "gone"]


@pytest.mark.parametrize("cls", [Threads, Groups])
async def test_threads_are_refused(cls: Any, node: Node) -> None:
    with pytest.raises(errors.NodeError, match=r"max_concurrency.*address='local'"):
        cls.remote()


async def test_a_detached_actor_outlives_its_handles() -> None:
    async with aiogpu.init(address="inline", num_cpus=1):
        kept = await Plain.options(name="kept", lifetime="detached").remote()
        del kept
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not seen
        found = aiogpu.get_actor("kept")
        assert (await found.facts.remote())[0] == "Plain 'kept'.facts"
    assert seen == ["gone"]


@aiogpu.remote
class Endless:
    def __init__(self) -> None:
        self.is_over = False

    async def close(self) -> None:
        while not self.is_over:
            with contextlib.suppress(asyncio.CancelledError):
                seen.append(self)
                await asyncio.Event().wait()


async def test_a_shutdown_at_once_gives_actors_no_time() -> None:
    init = aiogpu.init(address="inline", num_cpus=1, cancel_grace=60)
    async with init as session:
        endless = await Endless.remote()
        closing = asyncio.ensure_future(session.shutdown())
        await until(lambda: seen)
        assert not closing.done()
        seen[0].is_over = True
        await session.shutdown(at_once=True)
        await closing
    await raises(errors.NodeClosedError, endless)


async def test_an_actors_code_sees_its_own_context(node: Node) -> None:
    before = facts()
    plain = await Plain.options(num_gpus=1, name="plain").remote()
    assert await plain.facts.remote() == ("Plain 'plain'.facts", [0], "0")
    child, mine = await plain.child.remote()
    assert child["ids"] == [0], "as an idle node gives it"
    assert mine == ("Plain 'plain'.child", [0], "0")
    other = await Visited.options(num_gpus=1, name="other").remote()
    place = "Visited 'other'", [0], "0"
    call = other.facts_of_three.remote()
    while not call.done():
        assert facts() == before
        await asyncio.sleep(0)
    assert call.result() == [("Visited 'other'.facts_of_three", *place[1:])] * 4
    await other.begin.remote()
    del other
    await until(lambda: "gone" in seen)
    rest = "rest ended", "Visited 'other'.begin", *place[1:]
    assert seen == ["closing", ("closed", *place), rest, "gone"]


@aiogpu.remote
def cancel_first_of_two(plain: Any) -> Any:
    first, second = plain.note.remote("first"), plain.note.remote("second")
    assert first.cancel()
    return aiogpu.get(second)


async def test_cancelled_calls_of_plain_methods_never_run(node: Node) -> None:
    """The program or a task cancels them."""
    plain = await Plain.remote()
    calls = [plain.note.remote(number) for number in range(5)]
    calls[1].cancel()
    calls[4].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert seen == [0, 2, 3]
    assert await cancel_first_of_two.remote(plain) is None
    assert seen.pop() == "second"
    waiting, behind = plain.hidden_wait.remote("a"), plain.note.remote("behind")
    await until(lambda: "a" in seen)
    waiting.cancel()
    await behind
    assert seen == [0, 2, 3, "a", "a ended", "behind"]


async def test_kill_ends_actors_and_their_calls(node: Node) -> None:
    holder = await Visited.options(num_gpus=2, name="a").remote()
    running = holder.wait.remote("a")
    await until(lambda: seen == ["a"])
    for actor in (holder, holder):
        aiogpu.kill(actor)
    lost = running, holder, holder.facts.remote()
    await raises(errors.ActorDiedError, *lost, match="was killed")
    await holder._link.ended()
    assert seen[:2] == ["a", "a cancelled"]
    assert "closing" not in seen
    with pytest.raises(errors.ActorNameError):
        aiogpu.get_actor("a")
    plain, killer = await Plain.remote(), await Plain.options(num_gpus=1).remote()
    hidden = plain.hidden_wait.remote("hidden")
    await until(lambda: "hidden" in seen)
    assert await killer.kill.remote(plain) == "killed"
    await raises(errors.ActorDiedError, hidden, match="was killed")
    await until(lambda: "hidden ended" in seen)
    suicide = killer.kill.remote(killer)
    await raises(errors.ActorDiedError, suicide, match="was killed")
    await killer._link.ended()


async def test_a_killed_actor_restarts_as_often_as_it_may(node: Node) -> None:
    actor = Visited.options(max_restarts=1, num_gpus=1, name="it").remote()
    lost = actor.wait.remote("a")
    await until(lambda: "a" in seen)
    aiogpu.kill(actor, no_restart=False)
    behind = actor.facts.remote()
    error = await raises(errors.ActorDiedError, lost, match="ran this call")
    assert error.is_restarting
    assert (await behind)[1] == [0]
    await until(lambda: "gone" in seen)
    assert (await aiogpu.get_actor("it").facts.remote())[1] == [0]
    aiogpu.kill(actor, no_restart=False)
    dead = actor, actor.facts.remote()
    await raises(errors.ActorDiedError, *dead, match="no restarts left")
    retried = await Visited.options(max_restarts=1, max_task_retries=1).remote()
    again = retried.wait.remote("b")
    await until(lambda: "b" in seen)
    aiogpu.kill(retried, no_restart=False)
    await until(lambda: seen.count("b") == 2)
    await retried.let_pass.remote()
    assert await again == "b"
    counting = await Counts.options(max_restarts=1, max_task_retries=1).remote()
    stream = counting.up.remote(300)
    numbers = [await anext(stream) for _ in range(150)]
    aiogpu.kill(counting, no_restart=False)
    assert numbers + [number async for number in stream] == list(range(300))
    unused = await Visited.options(num_gpus=2, max_restarts=-1).remote()
    aiogpu.kill(unused, no_restart=False)
    del unused
    assert (await tasks.where.options(num_gpus=2).remote())["ids"] == [0, 1]


@pytest.mark.parametrize("runner", [aiogpu.run, asyncio.run], ids=["aiogpu", "asyncio"])
def test_a_program_that_does_not_close_its_node_ends_in_order(runner: Any) -> None:
    """The loop cancels what runs. Then the node ends."""
    before = dict(os.environ)
    calls: list[aiogpu.Handle[Any]] = []

    async def main() -> None:
        await aiogpu.init(address="inline", num_cpus=1)
        actor = await Visited.remote()
        calls.append(actor.wait.remote("wait"))
        await until(lambda: "wait" in seen)
        calls.append(wait_for_ever.remote())
        await until(lambda: "begin" in seen)
        assert not calls[1].done()

    runner(main())
    assert dict(os.environ) == before
    (closed,) = (noted for noted in seen if type(noted) is tuple)
    assert closed[:2] == ("closed", "Visited")
    seen.remove(closed)
    assert sorted(seen[:4]) == ["begin", "end", "wait", "wait cancelled"]
    assert seen[4:] == ["closing", "gone"]
    error = repr(calls[0].exception())
    assert error == "NodeClosedError('the event loop of Visited.wait has ended.')"


@aiogpu.remote
class Parent:
    async def start(self) -> None:
        self.child = wait_for_ever.remote()
        await asyncio.sleep(0)


async def test_children_of_an_actor_end_with_it(node: Node) -> None:
    async with Parent.remote() as parent:
        await parent.start.remote()
        await until(lambda: seen == ["begin"])
    await until(lambda: seen == ["begin", "end"])
    assert await append_one.remote("x") == "x 1"


@aiogpu.remote
def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)
    seen.append("went on")


@pytest.mark.parametrize("runner", [aiogpu.run, asyncio.run], ids=["aiogpu", "asyncio"])
def test_ctrl_c_in_a_task_ends_the_program(runner: Any) -> None:
    """As asyncio's runner does it: the main task is cancelled when the task ends."""

    async def main() -> None:
        async with aiogpu.init(address="inline", num_cpus=1):
            await press_ctrl_c.remote()
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        runner(main())
    assert seen == ["went on"]


# What makes the engine light, and what can never end.


def test_the_engine_loads_no_module_of_the_runtime() -> None:
    code = (
        "import sys, aiogpu.engines.inline.engine; "
        "print([name for name in sys.modules if name.startswith('aiogpu.runtime')])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[]\n"


@aiogpu.remote
class Recursive:
    def call_itself(self, me: Any) -> Any:
        return aiogpu.get(me.leaf.remote())

    def call_through_a_task(self, me: Any) -> Any:
        return aiogpu.get(call_leaf.remote(me))

    def leaf(self) -> str:
        return "leaf"


@aiogpu.remote
def call_leaf(actor: Any) -> Any:
    return aiogpu.get(actor.leaf.remote())


@aiogpu.remote
def get_all(handles: list[aiogpu.Handle[Any]]) -> Any:
    return aiogpu.get(handles)


async def test_a_wait_that_can_never_end_fails(node: Node) -> None:
    """A method that waits for its own actor, or a task for the program's coroutine."""
    actor = await Recursive.remote()
    for call in (actor.call_itself, actor.call_through_a_task):
        with pytest.raises(errors.DeadlockError, match="could never end"):
            await call.remote(actor)
    assert await actor.leaf.remote() == "leaf"
    runs = wait_for_ever.remote()
    await until(lambda: "begin" in seen)
    with pytest.raises(errors.DeadlockError, match="wait_for_ever cannot run"):
        await get_all.remote([runs])
    runs.cancel()


@aiogpu.remote
def get_soon(handles: list[aiogpu.Handle[Any]]) -> Any:
    return aiogpu.get(handles, timeout=0.01)


async def test_a_wait_with_a_timeout_ends(node: Node) -> None:
    runs = wait_for_ever.remote()
    await until(lambda: "begin" in seen)
    with pytest.raises(errors.TaskTimeoutError):
        await get_soon.remote([runs])
    runs.cancel()


async def test_a_task_gets_what_the_program_has_started(node: Node) -> None:
    """Also what waits for its own arguments, behind the waiting task."""
    first = tasks.add.remote(1)
    second = tasks.add.remote(first)
    assert await get_all.remote([second, first]) == [3, 2]
    parent = get_all.remote([late := note_result.remote(1)])
    assert await parent == [1]
    assert await late == 1


@aiogpu.remote
def note_result(value: int) -> int:
    return value


@aiogpu.remote
def fail_below() -> None:
    aiogpu.get(tasks.fail.remote(LookupError, "below"))


async def test_a_traceback_has_the_frames_of_caller_and_task(node: Node) -> None:
    with pytest.raises(LookupError) as caught:
        await fail_below.remote()
    names = [entry.name for entry in caught.traceback]
    assert names[0] == "test_a_traceback_has_the_frames_of_caller_and_task"
    assert (names[-1], "fail_below" in names) == ("fail", True)


def test_coverage_counts_the_lines_of_tasks(tmp_path: Path) -> None:
    coverage = pytest.importorskip("coverage")
    module = tmp_path / "covered_inline.py"
    module.write_text(
        "import aiogpu\n\n\n@aiogpu.remote\ndef double(x):\n"
        "    y = 2 * x\n    return y\n"
    )
    measured = coverage.Coverage(
        data_file=None, config_file=False, include=[str(module)]
    )
    measured.start()
    try:
        sys.path.insert(0, str(tmp_path))
        import covered_inline  # type: ignore[import-not-found]

        async def main() -> int:
            async with aiogpu.init(address="inline", num_cpus=1):
                return int(await covered_inline.double.remote(2))

        assert aiogpu.run(main()) == 4
    finally:
        measured.stop()
        sys.path.remove(str(tmp_path))
    _, lines, missing, _ = measured.analysis(str(module))
    assert (lines, missing) == ([1, 4, 5, 6, 7], [])


# Tasks with loops and threads of their own call actors.


@aiogpu.remote
def call_on_a_loop(counter: Any) -> tuple[int, int, bool]:
    async def inner() -> tuple[int, int, bool]:
        ready = await counter is counter
        first = await counter.add.remote()
        made = await Counter.remote(10)
        return first, await made.add.remote(), ready

    return asyncio.run(inner())


@aiogpu.remote
def make_on_a_loop() -> int:
    async def inner() -> int:
        async with Counter.remote(10) as made:
            return int(await made.add.remote())

    return asyncio.run(inner())


async def test_a_tasks_own_loop_makes_an_actor(node: Node) -> None:
    assert await make_on_a_loop.remote() == 11


async def test_a_tasks_own_loop_calls_actors(node: Node) -> None:
    counter = await Counter.remote()
    assert await call_on_a_loop.remote(counter) == (1, 11, True)
    del counter
    gc.collect()
    await until(lambda: not engine_of(node).actors.all())


@aiogpu.remote
def call_in_a_thread(plain: Any) -> str:
    refusals = []

    def call() -> None:
        try:
            plain.note.remote("never")
        except errors.NodeError as error:
            refusals.append(str(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call,))
    thread.start()
    thread.join()
    return refusals[0]


async def test_a_thread_of_a_task_cannot_call_actors(node: Node) -> None:
    error = await call_in_a_thread.remote(await Plain.remote())
    assert "in a thread that call_in_a_thread has started" in error
    assert "never" not in seen
