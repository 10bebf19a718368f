"""[B29] - [B33] What is an inline node's own about actors: they are in this process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiogpu
from tests.contract import handed_on, tasks
from tests.contract.actor_classes import Async, Broken, Counter, Groups, Threads
from tests.support.program import start
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]

VISIBLE = "CUDA_VISIBLE_DEVICES"
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    before = os.environ.get(VISIBLE)
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=2, cancel_grace=0.1
    ) as session:
        yield session
        gc.collect()  # errors that were caught hold the test's handles
        await until(lambda: not session._session._engine._node.actors.are_there)  # type: ignore[attr-defined]
        assert (await session.available_resources())["GPU"] == 2.0
        assert (await session.available_resources())["CPU"] == 1.0
        session._session._engine._node.scheduler.ledger.check()  # type: ignore[attr-defined]
    assert os.environ.get(VISIBLE) == before
    assert aiogpu.get_runtime_context().worker_id == 0
    with pytest.raises(aiogpu.errors.MisuseError):
        aiogpu.exit_actor()


def facts() -> tuple[Any, ...]:
    context = aiogpu.get_runtime_context()
    return context.task_name, aiogpu.get_gpu_ids(), os.environ.get(VISIBLE)


@aiogpu.remote
class Visited:
    """Notes in this process what becomes of it."""

    def __init__(self, name: str = "it") -> None:
        self.name = name
        self.event = asyncio.Event()
        self.background: asyncio.Task[None] | None = None

    def facts(self) -> tuple[Any, ...]:
        return facts()

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

    async def ask(self, what: str) -> Any:
        return await add_one.remote(what)

    async def close(self) -> None:
        seen.append("closing")
        await asyncio.sleep(0)
        seen.append(("closed", *facts()))

    def __del__(self) -> None:
        seen.append("gone")


@aiogpu.remote
def add_one(what: str) -> str:
    return f"{what} 1"


@aiogpu.remote
async def ask_through(actor: Any) -> Any:
    return await actor.ask.remote("task")


@aiogpu.remote
class Plain:
    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.count = 0

    def facts(self) -> tuple[Any, ...]:
        return facts()

    def note(self, what: object) -> None:
        seen.append(what)

    def fail(self, local: str) -> None:
        raise KeyError(local)

    def child(self) -> Any:
        return aiogpu.get(tasks.where.options(num_gpus=1).remote()), facts()

    def through(self, me: Any) -> Any:
        return aiogpu.get(self.other.back.remote(me))

    def back(self, actor: Any) -> Any:
        return aiogpu.get(actor.facts.remote())

    def kill(self, actor: Any) -> str:
        aiogpu.kill(actor)
        return "killed"

    def __del__(self) -> None:
        seen.append("gone")


def plainly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides that it is a coroutine's."""

    def call(*args: Any) -> Any:
        return method(*args)

    return call


@aiogpu.remote
class Hidden:
    @plainly
    async def wait(self, name: str) -> None:
        seen.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(f"{name} ended")

    @plainly
    async def facts(self) -> Any:
        await asyncio.sleep(0)
        return aiogpu.get_gpu_ids()


@aiogpu.remote
class Stubborn:
    async def wait(self) -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("swallowed")


async def test_an_actor_is_an_object_of_this_process(node: aiogpu.types.Node) -> None:
    counter = await Counter.remote(5)
    assert await counter.pid.remote() == os.getpid()
    mine: list[int] = [1]
    await counter.note.remote(mine)
    (kept,) = await counter.notes.remote()
    assert kept == mine
    assert kept is not mine, "values are copies"
    with pytest.raises(aiogpu.errors.SerializationError, match=r"args\[0\]"):
        counter.note.remote(threading.Lock())


async def test_where_its_code_runs(node: aiogpu.types.Node) -> None:
    before = facts()
    plain = await Plain.options(num_gpus=1, name="plain").remote()
    other = await Visited.options(num_gpus=1, name="other").remote()
    assert await plain.facts.remote() == ("Plain 'plain'.facts", [0], "0")
    place = "Visited 'other'", [1], "1"
    assert await other.facts.remote() == ("Visited 'other'.facts", *place[1:])
    told = other.facts_of_three.remote()
    while not told.done():
        assert facts() == before
        await asyncio.sleep(0)
    assert told.result() == [("Visited 'other'.facts_of_three", *place[1:])] * 4
    assert await session_gpus(node) == 0.0
    await other.begin.remote()
    del other
    await until(lambda: "gone" in seen)
    rest = "rest ended", "Visited 'other'.begin", *place[1:]
    assert seen == ["closing", ("closed", *place), rest, "gone"]


async def session_gpus(session: aiogpu.types.Node) -> float:
    return (await session.available_resources())["GPU"]


async def test_a_child_of_a_method_is_no_actor(node: aiogpu.types.Node) -> None:
    plain = await Plain.options(num_gpus=1).remote()
    child, mine = await plain.child.remote()
    assert child["ids"] == [1]
    assert mine == ("Plain.child", [0], "0")


async def test_a_debugger_finds_the_frames(node: aiogpu.types.Node) -> None:
    """As those of a task; also of a constructor."""
    plain = await Plain.remote()
    with pytest.raises(KeyError, match="found") as caught:
        await plain.fail.remote("found")
    assert caught.traceback[-1].frame.f_locals["local"] == "found"
    assert "engines/inline" not in str(caught.value.__cause__)
    del caught
    with pytest.raises(aiogpu.ActorDiedError, match="OSError: no model") as broken:
        await Broken.remote(OSError)
    trace = broken.value.__cause__.__traceback__
    assert trace.tb_frame.f_locals["kind"] is OSError
    del broken, trace


async def test_methods_wait_for_tasks_and_tasks_for_methods(
    node: aiogpu.types.Node,
) -> None:
    """What a method starts does not wait for the task that waits for the method."""
    visited = await Visited.remote()
    assert await ask_through.remote(visited) == "task 1"
    first = [add_one.remote("x"), ask_through.remote(visited), add_one.remote("y")]
    assert await asyncio.gather(*first) == ["x 1", "task 1", "y 1"]


async def test_waits_in_a_circle_end(node: aiogpu.types.Node) -> None:
    back = await Plain.remote()
    plain = await Plain.remote(back)
    with pytest.raises(
        aiogpu.errors.DeadlockError, match=r"Plain\.facts was called by code"
    ):
        await plain.through.remote(plain)
    assert (await plain.facts.remote())[0] == "Plain.facts", "it lives on"


async def test_plain_code_that_waits_for_what_only_the_program_could_end(
    node: aiogpu.types.Node,
) -> None:
    holder = await Counter.options(num_gpus=2).remote()
    waits = Counter.options(num_gpus=1).remote()
    for task in (handed_on.add_to, by_a_child):
        with pytest.raises(aiogpu.errors.DeadlockError, match="could never end"):
            await asyncio.wait_for(
                task.remote(waits, *[1][: task is not by_a_child]), 9
            )
    assert await holder.add.remote() == 1
    aiogpu.kill(holder)
    assert await waits.add.remote() == 1, "it lives, and no call of theirs has run"


async def test_plain_code_cannot_wait_for_the_programs_loop(
    node: aiogpu.types.Node,
) -> None:
    actor = await Async.remote()
    with pytest.raises(
        aiogpu.errors.NodeError, match=r"Async\.add\.remote.*address='local'"
    ):
        await handed_on.add_to.remote(actor, 1)
    assert await handed_on.add_soon.remote(actor, 2) == 2


async def test_a_task_waits_until_an_actor_gives_its_gpu_back(
    node: aiogpu.types.Node,
) -> None:
    holder = await Counter.options(num_gpus=2, name="holder").remote()
    waits = tasks.where.options(num_gpus=1).remote()
    later = Counter.options(num_gpus=1, name="later").remote()
    call = later.add.remote()
    others = [add_one.remote("x"), holder.add.remote()]
    assert await others[1] == 1
    assert not waits.done()
    assert not call.done()
    status = await aiogpu.status()
    states = {task.name: task.state for task in status.tasks}
    assert states["Counter 'holder'"] == "running"
    assert states["Counter 'later'"] == "waiting"
    assert [holder.task for holder in status.devices[0].holders] == ["Counter 'holder'"]
    assert str(status)
    assert (await call.why()).state == "waiting"
    assert (await holder.add.remote().why()).state == "running"
    aiogpu.kill(holder)
    assert await call == 1
    assert (await waits)["ids"] in ([0], [1])
    assert await others[0] == "x 1"


async def test_cpus(node: aiogpu.types.Node) -> None:
    """[B30] A task's own CPUs are those of the actors that it makes."""
    held = await Counter.options(num_cpus=1).remote()
    assert (await node.available_resources())["CPU"] == 0.0
    waits = add_one.remote("x")
    assert await held.add.remote() == 1
    assert not waits.done()
    aiogpu.kill(held)
    assert await waits == "x 1"

    @aiogpu.remote
    async def make() -> Any:
        made = await Counter.options(num_cpus=1).remote()
        await made.add.remote()
        return made

    made = await make.remote()
    assert await made.add.remote() == 2
    assert (await node.available_resources())["CPU"] == 0.0


@aiogpu.remote
async def await_twice(visited: Any) -> None:
    async def wait(call: Any) -> None:
        await call

    call = visited.wait.remote("call")
    await asyncio.gather(wait(call), wait(call))
    seen.append("waited")
    await asyncio.Event().wait()


async def test_a_call_may_be_awaited_twice(node: aiogpu.types.Node) -> None:
    """[B12] A task gives its CPU back only while it waits."""
    visited = await Visited.remote()
    task = await_twice.remote(visited)
    await until(lambda: seen == ["call"])
    assert (await node.available_resources())["CPU"] == 1.0
    await visited.let_pass.remote()
    await until(lambda: seen == ["call", "waited"])
    assert (await node.available_resources())["CPU"] == 0.0
    task.cancel()


async def test_cancelled_calls_never_run_or_stop(node: aiogpu.types.Node) -> None:
    """[B15]"""
    plain = await Plain.remote()
    calls = [plain.note.remote(number) for number in range(5)]
    calls[1].cancel()
    calls[4].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert seen == [0, 2, 3]
    visited = await Visited.options(max_concurrency=2).remote()
    a, b, c = (visited.wait.remote(name) for name in "abc")
    await until(lambda: "b" in seen)
    c.cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(a, 0.01)
    await until(lambda: "a cancelled" in seen)
    await visited.let_pass.remote()
    assert await b == "b"
    assert "c" not in seen
    early = visited.wait.remote("early")
    early.cancel()
    await visited.let_pass.remote()
    assert "early" not in seen


async def test_a_plain_method_that_gives_a_coroutine(node: aiogpu.types.Node) -> None:
    hidden = await Hidden.options(num_gpus=1).remote()
    waiting, behind = hidden.wait.remote("a"), hidden.facts.remote()
    await until(lambda: seen == ["a"])
    waiting.cancel()
    assert await behind == [0]
    assert seen == ["a", "a ended"]
    waiting = hidden.wait.remote("b")
    await until(lambda: "b" in seen)
    aiogpu.kill(hidden)
    with pytest.raises(aiogpu.ActorDiedError, match="killed"):
        await waiting
    await until(lambda: "b ended" in seen)


async def test_kill(node: aiogpu.types.Node) -> None:
    holder = await Visited.options(num_gpus=2, name="a").remote()
    waits = Plain.options(num_gpus=1).remote()
    running = holder.wait.remote("a")
    await until(lambda: seen == ["a"])
    aiogpu.kill(waits)
    aiogpu.kill(holder)
    aiogpu.kill(holder)
    for told in (waits, waits.facts.remote(), running, holder, holder.facts.remote()):
        with pytest.raises(aiogpu.ActorDiedError, match="was killed"):
            await told
    await holder._link.ended()
    assert await session_gpus(node) == 2.0
    assert seen[:2] == ["a", "a cancelled"]
    assert "closing" not in seen
    with pytest.raises(aiogpu.errors.ActorNameError):
        aiogpu.get_actor("a")
    plain = await Plain.remote()
    killer = await Plain.remote()
    assert await killer.kill.remote(plain) == "killed"
    me = plain = await Plain.options(num_gpus=1).remote()
    with pytest.raises(aiogpu.ActorDiedError, match="was killed"):
        await me.kill.remote(plain)
    await plain._link.ended()
    assert await session_gpus(node) == 2.0


@pytest.mark.parametrize("cls", [Plain, Visited])
async def test_killed_and_made_anew(cls: Any, node: aiogpu.types.Node) -> None:
    """[B33]"""
    actor = cls.options(max_restarts=1, num_gpus=1, name="it").remote()
    await actor
    lost = []
    if cls is Visited:
        lost.append(actor.wait.remote("a"))
        await until(lambda: "a" in seen)
    aiogpu.kill(actor, no_restart=False)
    behind = actor.facts.remote()
    for call in lost:
        with pytest.raises(aiogpu.ActorDiedError, match="ran this call") as caught:
            await call
        assert caught.value.is_restarting
    assert (await behind)[1] == [0]
    assert await actor is actor
    await until(lambda: "gone" in seen)
    assert (await aiogpu.get_actor("it").facts.remote())[1] == [0]
    aiogpu.kill(actor, no_restart=False)
    for call in (actor, actor.facts.remote()):
        with pytest.raises(aiogpu.ActorDiedError, match="without restarts left"):
            await call


async def test_calls_that_are_tried_again(node: aiogpu.types.Node) -> None:
    actor = Visited.options(max_restarts=-1, max_task_retries=1).remote()
    call = actor.wait.remote("a")
    await until(lambda: seen == ["a"])
    aiogpu.kill(actor, no_restart=False)
    await until(lambda: seen.count("a") == 2)
    await actor.let_pass.remote()
    assert await call == "a"


async def test_one_that_is_made_anew_for_nobody_ends(node: aiogpu.types.Node) -> None:
    holder = await Visited.options(num_gpus=2, max_restarts=-1).remote()
    aiogpu.kill(holder, no_restart=False)
    del holder
    assert (await tasks.where.options(num_gpus=2).remote())["ids"] == [0, 1]


async def test_the_end_of_the_node() -> None:
    """[B6]"""
    async with aiogpu.init(address="inline", num_cpus=1, num_gpus=1):
        visited = await Visited.options(num_gpus=1).remote()
        waiting, unplaced = visited.wait.remote("a"), Plain.options(num_gpus=1).remote()
        behind = unplaced.facts.remote()
        await visited.begin.remote()
        plain = await Plain.remote()
    for told in (waiting, unplaced, behind, visited, plain):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await told
    await until(lambda: seen.count("gone") == 2)
    assert [x for x in seen if isinstance(x, str)] == [
        "a",
        *("gone", "a cancelled", "closing", "gone"),
    ]


async def test_who_does_not_end_is_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=1, cancel_grace=0.01
    ) as session:
        stubborn = await Stubborn.options(num_gpus=1).remote()
        call = stubborn.wait.remote()
        await asyncio.sleep(0)
        with caplog.at_level(logging.WARNING):
            aiogpu.kill(stubborn)
            await stubborn._link.ended()
        assert await session_gpus(session) == 1.0
    assert "Stubborn was told to end and runs on" in caplog.text
    # Whoever is left behind is cancelled once more, as tasks are.
    await until(lambda: seen == ["swallowed", "swallowed"])
    with pytest.raises(aiogpu.ActorDiedError):
        await call


@pytest.mark.parametrize("cls", [Threads, Groups])
async def test_threads_are_refused(cls: Any, node: aiogpu.types.Node) -> None:
    with pytest.raises(
        aiogpu.errors.NodeError, match=r"max_concurrency.*address='local'"
    ):
        cls.remote()


async def test_handles_in_results_keep_an_actor(node: aiogpu.types.Node) -> None:
    made = handed_on.make_one.options(name="m").remote(20)
    await asyncio.wait([made])
    for _ in range(5):
        await asyncio.sleep(0)
    counter = await made
    assert await counter.add.remote() == 21
    holder = await handed_on.Holder.remote(counter)
    del counter, made
    again = await holder.give.remote()
    assert await again.add.remote() == 22


async def test_an_actor_may_make_another(node: aiogpu.types.Node) -> None:
    @aiogpu.remote
    class Outer:
        def __init__(self) -> None:
            self.inner = Counter.options(num_gpus=1).remote(5)
            self.first = aiogpu.get(self.inner.add.remote())

        def add(self) -> tuple[int, int]:
            return self.first, aiogpu.get(self.inner.add.remote())

    async with Outer.remote() as outer:
        assert await outer.add.remote() == (6, 7)
        assert await session_gpus(node) == 1.0
    while await session_gpus(node) != 2.0:
        await asyncio.sleep(0)


async def test_a_detached_one_outlives_its_handles() -> None:
    async with aiogpu.init(address="inline", num_cpus=1):
        kept = await Plain.options(name="kept", lifetime="detached").remote()
        del kept
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not seen
        found = aiogpu.get_actor("kept")
        assert (await found.facts.remote())[0] == "Plain 'kept'.facts"
    assert seen == ["gone"]


async def test_pools_and_batches(node: aiogpu.types.Node) -> None:
    @aiogpu.remote
    class Batches:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        @aiogpu.batch(max_size=4)
        async def double(self, numbers: list[int]) -> list[int]:
            self.sizes.append(len(numbers))
            return [2 * number for number in numbers]

        def all_sizes(self) -> list[int]:
            return self.sizes

    actor = Batches.remote()
    doubled = await asyncio.gather(*(actor.double.remote(n) for n in range(6)))
    assert doubled == [0, 2, 4, 6, 8, 10]
    assert await actor.all_sizes.remote() == [4, 2]
    cls = Counter.options(num_gpus=0.5)
    async with aiogpu.ActorPool(cls, 2) as pool:
        counts = [count async for count in pool.add.map([1] * 10)]
        assert sorted(counts) == sorted([*range(1, 6), *range(1, 6)])
        aiogpu.kill(pool._finalizer.scheduler._actors[0].handle)
        await until(lambda: pool._finalizer.scheduler.deaths == 1)
        assert await pool.add.remote() in (1, 6)
        assert len(pool) == 2


async def test_what_is_asked_inside_a_method(node: aiogpu.types.Node) -> None:
    @aiogpu.remote
    class Asks:
        async def ask(self) -> object:
            return await aiogpu.status()

    with pytest.raises(aiogpu.errors.NodeError, match="inside a task"):
        await Asks.remote().ask.remote()


@aiogpu.remote
def on_a_loop_of_its_own(counter: Any) -> tuple[int, int, bool]:
    async def inner() -> tuple[int, int, bool]:
        ready = await counter is counter
        first = await counter.add.remote()
        made = await Counter.remote(10)
        return first, await made.add.remote(), ready

    return asyncio.run(inner())


@aiogpu.remote
def by_a_child(counter: Any) -> int:
    return int(aiogpu.get(handed_on.add_soon.remote(counter, 5)))


async def test_plain_tasks_with_loops(node: aiogpu.types.Node) -> None:
    counter = await Counter.remote()
    assert await on_a_loop_of_its_own.remote(counter) == (1, 11, True)
    assert await by_a_child.remote(counter) == 6


@aiogpu.remote
def cancel_one_of_two(plain: Any) -> Any:
    first, second = plain.note.remote("first"), plain.note.remote("second")
    assert first.cancel()
    return aiogpu.get(second)


@aiogpu.remote
def call_in_a_thread(plain: Any) -> str:
    told = []

    def call() -> None:
        try:
            plain.note.remote("never")
        except aiogpu.errors.NodeError as error:
            told.append(str(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call,))
    thread.start()
    thread.join()
    return told[0]


async def test_plain_tasks_that_cancel_calls(node: aiogpu.types.Node) -> None:
    plain = await Plain.remote()
    assert await cancel_one_of_two.remote(plain) is None
    assert seen == ["second"]
    assert "in a thread of call_in_a_thread's own" in await call_in_a_thread.remote(
        plain
    )


@aiogpu.remote
class Endless:
    def __init__(self) -> None:
        self.is_over = False

    async def close(self) -> None:
        while not self.is_over:
            with contextlib.suppress(asyncio.CancelledError):
                seen.append(self)
                await asyncio.Event().wait()


async def test_the_end_by_force() -> None:
    """[B6] Nobody is given time."""
    init = aiogpu.init(address="inline", num_cpus=1, cancel_grace=60)
    async with init as session:
        endless = await Endless.remote()
        closing = asyncio.ensure_future(session.shutdown())
        await until(lambda: seen)
        assert not closing.done()
        seen[0].is_over = True
        await session.shutdown(at_once=True)
        await closing
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await endless


async def test_a_close_that_raises_is_told(
    node: aiogpu.types.Node, capsys: pytest.CaptureFixture[str]
) -> None:
    class Raises:
        async def close(self) -> None:
            raise ValueError("cannot close")

    async with aiogpu.remote(Raises).remote() as actor:
        await actor
    assert "ValueError: cannot close" in capsys.readouterr().err


@pytest.mark.parametrize("is_shown", [True, False])
async def test_what_actors_print(
    is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Prints:
        def __init__(self) -> None:
            print("constructor")

        async def method(self) -> None:
            print("method")
            await asyncio.gather(self.other())

        async def other(self) -> None:
            print("other")

    async with (
        aiogpu.init(address="inline", num_cpus=1, log_to_driver=is_shown),
        aiogpu.remote(Prints).remote() as actor,
    ):
        await actor.method.remote()
        print("mine")
    shown = ["constructor", "method", "other"] if is_shown else []
    assert capsys.readouterr().out.split() == [*shown, "mine"]


@aiogpu.remote
class Parent:
    async def start(self) -> None:
        self.child = wait_for_ever.remote()
        await asyncio.sleep(0)

    async def too_large(self) -> None:
        await wait_for_ever.options(num_gpus=64).remote()


@aiogpu.remote
async def wait_for_ever() -> None:
    seen.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("ended")


async def test_what_an_actor_has_started_ends_with_it(node: aiogpu.types.Node) -> None:
    async with Parent.remote() as parent:
        await parent.start.remote()
        await until(lambda: seen == ["begun"])
        with pytest.raises(aiogpu.InfeasibleError, match="64"):
            await parent.too_large.remote()
    await until(lambda: seen == ["begun", "ended"])
    assert await add_one.remote("x") == "x 1"


class CarryingError(Exception):
    """Holds a handle."""


@aiogpu.remote
def raise_with(counter: Any) -> None:
    raise CarryingError(counter)


async def test_an_error_that_carries_a_handle(node: aiogpu.types.Node) -> None:
    counter = await Counter.remote()
    with pytest.raises(CarryingError) as caught:
        await raise_with.remote(counter)
    del counter
    (again,) = caught.value.args
    assert await again.add.remote() == 1


@aiogpu.remote(concurrency_groups={"one": 1})
class Grouped:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    @aiogpu.method(concurrency_group="one")
    async def wait(self, name: str) -> None:
        seen.append(name)
        await self.event.wait()

    def let_pass(self) -> None:
        self.event.set()


async def test_groups_of_coroutines_have_their_limits(node: aiogpu.types.Node) -> None:
    grouped = await Grouped.remote()
    waiting = [grouped.wait.remote(name) for name in "ab"]
    await until(lambda: seen == ["a"])
    await grouped.let_pass.remote()
    await asyncio.gather(*waiting)
    assert seen == ["a", "b"]


@pytest.mark.parametrize("runner", ["aiogpu", "asyncio"])
def test_a_program_that_ends_without_closing_its_node(runner: str) -> None:
    """[B6] Its loop cancels all that runs, and then the node ends in order."""
    program = start(
        """
        import asyncio, sys
        import aiogpu

        @aiogpu.remote
        class Actor:
            async def wait(self):
                try:
                    await asyncio.Event().wait()
                finally:
                    print("wait ended")

            async def close(self):
                await asyncio.sleep(0)
                print("closed")

            def __del__(self):
                print("gone", aiogpu.get_runtime_context().task_name)

        async def main():
            await aiogpu.init(address="inline", num_cpus=1)
            actor = await Actor.remote()
            kept.append(actor.wait.remote())
            await asyncio.sleep(0)

        kept = []
        {"aiogpu": aiogpu, "asyncio": asyncio}[sys.argv[1]].run(main())
        print(repr(kept[0].exception()))
        """,
        runner,
    )
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    *order, error = out.splitlines()
    assert order == ["wait ended", "closed", "gone Actor"]
    assert error == "NodeClosedError('the event loop of Actor has ended.')"


@aiogpu.remote
class Cancels:
    async def swallow(self) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return "swallowed"
        return "not cancelled"

    async def give_up(self) -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "given up"
        return "it came"


async def test_a_method_may_cancel_itself(node: aiogpu.types.Node) -> None:
    cancels = await Cancels.remote()
    assert await cancels.swallow.remote() == "swallowed"
    assert await cancels.give_up.remote() == "given up"
