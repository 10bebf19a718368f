"""[B8] [B23] What every engine says when asked: why a task waits, what there is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import aiogpu
from aiogpu.observe import snapshot as module
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import TaskStatus
from tests.contract import tasks
from tests.contract.actor_classes import Counter
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.mark.needs("holders")
@pytest.mark.needs("at once")
async def test_a_waiting_task_names_what_is_short_and_who_holds_it(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=8, num_gpus=2):
        most = tasks.gated.options(num_gpus=0.7)
        a = most.options(name="first").remote(gate.path, "a")
        b = most.options(name="second").remote(gate.path, "b")
        await gate.entered("a", "b")
        half = tasks.gated.options(num_gpus=0.5, name="half")
        c, d = half.remote(gate.path, "c"), half.remote(gate.path, "d")
        why = await d.why()
        assert (why.name, why.task, why.state) == ("half", d.task_id, "waiting")
        assert (why.position, why.of) == (2, 2)
        assert why.request == {"CPU": 1.0, "GPU": 0.5}
        assert why.seconds is not None
        assert why.seconds >= 0
        (short,) = why.reasons
        assert (short.resource, short.asked, short.free, short.total) == (
            *("GPU", 0.5, 0.6, 2.0),
        )
        assert [(one.task, one.share, one.pid) for one in short.holders] == [
            ("first", 0.7, gate.pids["a"]),
            ("second", 0.7, gate.pids["b"]),
        ]
        assert f"held by first (pid {gate.pids['a']}, for " in str(why)
        assert (await c.why()).position == 1
        c.cancel()
        assert ((await d.why()).position, (await d.why()).of) == (1, 1)
        gate.release("a", "b")
        await gate.entered("d")
        assert (await d.why()).state == "running"
        gate.release("d")
        await asyncio.gather(a, b, d)


@pytest.mark.needs("holders")
@pytest.mark.needs("at once")
async def test_a_task_that_waits_for_its_children_says_so(
    address: str, gate: Gate
) -> None:
    async def parent(path: str) -> str:
        return await tasks.gated.options(name="child").remote(path, "child")

    async with aiogpu.init(address=address, num_cpus=1):
        handle = aiogpu.remote(parent).remote(gate.path)
        await gate.entered("child")
        why = await handle.why()
        assert (why.state, why.children) == ("blocked", ("child",))
        assert "waits for its child child; meanwhile it holds no CPU" in str(why)
        (status, _) = (await aiogpu.status()).tasks
        assert (status.state, status.reason) == (
            *("blocked", "waits for its children: child"),
        )
        gate.release("child")
        assert await handle == "child"


@pytest.mark.needs("holders")
async def test_a_running_task_and_those_behind_it(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        runs = tasks.gated_coroutine.options(name="runs").remote(gate.path, "a")
        await gate.entered("a")
        waiting = [tasks.add.remote(number) for number in range(3)]
        why = await runs.why()
        assert (why.state, why.pid) == ("running", gate.pids["a"])
        assert str(why).startswith(f"runs (task {runs.task_id}) runs on worker ")
        for position, handle in enumerate(waiting, start=1):
            why = await handle.why()
            assert (why.state, why.position, why.of) == ("waiting", position, 3)
            assert str(why).startswith(f"add (task {handle.task_id}) has waited ")
        gate.release("a")
        assert await asyncio.gather(runs, *waiting) == ["a", 1, 2, 3]


@pytest.mark.needs("holders")
@pytest.mark.parametrize("address", ["inline"])
async def test_inline_tasks_wait_for_their_turn(address: str, gate: Gate) -> None:
    """Whatever they ask for: one runs after the other."""
    async with aiogpu.init(address=address, num_cpus=9):
        runs = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        first = tasks.add.remote(1)
        dropped = tasks.add.remote(1)
        last = tasks.add.options(num_cpus=2, priority=5).remote(1)
        dropped.cancel()
        why = await last.why()
        assert (why.position, why.of, why.reasons) == (1, 1, ())
        assert str(why).endswith(" for its turn: 0 before it"), "of those like it"
        status = await aiogpu.status()
        assert [shape.count for shape in status.shapes] == [1, 1]
        assert [shape.first for shape in status.shapes] == ["add", "add"]
        assert status.shapes[1].reason == "waits for its turn"
        gate.release("a")
        assert await asyncio.gather(runs, first, last) == ["a", 2, 2]


@pytest.mark.needs("holders")
async def test_what_has_ended_says_how(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        done, failed = tasks.add.remote(1), tasks.fail.remote(KeyError, "no")
        await asyncio.wait([done, failed])
        runs = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        cancelled, waits = tasks.add.remote(1), tasks.add.remote(1)
        cancelled.cancel()
        outcomes = [(await h.why()).outcome for h in (done, failed, cancelled)]
        assert outcomes == [
            "it gave its result",
            "it failed with KeyError",
            "it was cancelled",
        ]
        assert (await cancelled.why()).state == "ended"
    why = await waits.why()
    assert str(why).endswith("has ended: it failed with NodeClosedError.")
    assert runs.done()


@pytest.mark.needs("holders")
async def test_while_the_node_opens(address: str) -> None:
    opening = asyncio.ensure_future(
        aiogpu.init(address=address, num_cpus=1).__aenter__()
    )
    await asyncio.sleep(0)
    handle = tasks.add.remote(1)
    why = await handle.why()
    assert str(why) == "add waits for its node, which is being opened."
    await opening
    assert await handle == 2
    await aiogpu.shutdown()


@pytest.mark.needs("holders")
async def test_a_task_cannot_ask(address: str) -> None:
    """Only the program can; so it is in a worker, and so it is in this process."""

    async def ask() -> list[str]:
        child = tasks.add.remote(1)
        questions = [
            *(child.why, aiogpu.status),
            *(aiogpu.cluster_resources, aiogpu.available_resources),
        ]
        answers = []
        for question in questions:
            try:
                await question()
            except aiogpu.errors.NodeError as error:
                answers.append(str(error))
        assert await child == 2
        return answers

    async with aiogpu.init(address=address, num_cpus=1):
        answers = await aiogpu.remote(ask).remote()
        assert len(answers) == 4
        for answer, asked in zip(
            answers,
            ["why()", "status()", "cluster_resources()", "available_resources()"],
            strict=True,
        ):
            assert asked in answer
            assert "was called inside a task; only the program" in answer
        assert (await aiogpu.status()).total["CPU"] == 1.0


@pytest.mark.needs("holders")
async def test_a_plain_task_cannot_ask_either(address: str) -> None:
    def ask() -> str:
        child = tasks.add.remote(1)
        try:
            child.why()
        except aiogpu.errors.NodeError as error:
            return f"{error} {aiogpu.get(child)}"
        return "it could"

    async with aiogpu.init(address=address, num_cpus=1):
        answer = await aiogpu.remote(ask).remote()
        assert "why() of the handle of add was called inside a task" in answer
        assert answer.endswith(" 2")


@pytest.mark.needs("holders")
@pytest.mark.needs("own objects")
async def test_a_great_many_that_wait_cost_no_more_than_a_few(
    address: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made is counted, not timed."""
    made = []

    def make(*parts: object) -> object:
        made.append(parts)
        return TaskStatus(*parts)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "TaskStatus", make)
    async with aiogpu.init(address=address, num_cpus=1):
        runs = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        handles = [tasks.add.remote(1) for _ in range(5_000)]
        status = await aiogpu.status()
        assert status.waiting_count == 5_000
        assert len(made) == len(status.tasks) == 1 + LISTED
        (shape,) = status.shapes
        assert (shape.count, shape.first) == (5_000, "add")
        why = await handles[4_000].why()
        assert (why.position, why.of) == (4_001, 5_000)
        gate.release("a")
        await runs


@pytest.mark.needs("holders")
async def test_the_table_and_the_line(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        runs = tasks.gated_coroutine.options(num_gpus=1, name="train")
        handle = runs.remote(gate.path, "a")
        await gate.entered("a")
        waiting = tasks.add.remote(1)
        status = await aiogpu.status()
        assert f"  1  train  pid {gate.pids['a']}" in str(status)
        assert "1 running, 1 waiting" in repr(status)
        assert "  1 x {CPU: 1}: add first, the oldest for " in str(status)
        gate.release("a")
        assert await asyncio.gather(handle, waiting) == ["a", 2]


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("listed actors")
async def test_actors_are_listed_while_they_live() -> None:
    async with aiogpu.init(num_cpus=1):
        named = Counter.options(name="tally", lifetime="detached").remote()
        plain = Counter.remote()
        pids = [await one.pid.remote() for one in (named, plain)]
        first, second = (await aiogpu.status()).actors
        told = (first.name, first.class_name, first.state, first.is_detached)
        assert told == ("tally", "Counter", "alive", True)
        assert (first.holders, second.holders) == (2, 1)
        assert (second.name, second.client, second.calls) == (None, first.client, 0)
        assert [first.pid, second.pid] == pids
        aiogpu.kill(named)
        assert [one.id for one in (await aiogpu.status()).actors] == [second.id]


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("listed actors")
async def test_an_actor_that_waits_for_its_place_is_listed_last() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        living = Counter.options(num_gpus=1).remote()
        await living.add.remote()
        waiting = Counter.options(num_gpus=1).remote()
        first, second = (await aiogpu.status()).actors
        assert (second.state, second.worker, second.pid) == ("pending", None, 0)
        told = await aiogpu.why(second.id)
        assert (told.name, told.state) == ("Counter", "waiting")
        assert first.worker is not None
        del living, waiting


@pytest.mark.usefixtures("each_engine")
async def test_why_asks_by_number() -> None:
    async with aiogpu.init(num_cpus=1):
        async with aiogpu.placement([{"CPU": 1}]):
            handle = tasks.pid.remote()
            seen = (await aiogpu.status()).tasks
            (task,) = (one for one in seen if one.name == "pid")
            assert (await aiogpu.why(task.id)).name == "pid"
        pid = await handle
        ended = (await aiogpu.why(task.id)).ended
        assert ended is not None
        assert (ended.name, ended.state, ended.pid) == ("pid", "finished", pid)
        with pytest.raises(
            aiogpu.errors.NoSuchTaskError, match=r"no task 999999\. Either"
        ):
            await aiogpu.why(999_999)


@pytest.mark.usefixtures("each_engine")
async def test_what_has_become_of_a_task_that_has_ended(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        failing = tasks.fail.options(num_gpus=0.5).remote(KeyError, "no such key")
        with pytest.raises(KeyError):
            await failing
        (failed,) = (await aiogpu.status()).failures
        told = await aiogpu.why(failed.task)
        assert told.state == "ended"
        assert told.request == {"CPU": 1.0, "GPU": 0.5}
        ended = told.ended
        assert ended is not None
        assert (ended.state, ended.error, ended.devices) == (
            *("failed", "KeyError", (("GPU", 0),)),
        )
        first, second, *trace, last = str(told).splitlines()
        assert first.startswith(f"fail (task {failed.task}) failed 0.")
        assert first.endswith("ago: KeyError: 'no such key'")
        assert second.startswith("  it ran ")
        assert second.endswith(f"(pid {ended.pid}) with GPU 0")
        assert trace[0] == "  Traceback (most recent call last):"
        assert "tasks.py" in trace[1]
        assert last == "  KeyError: 'no such key'"
        runs = tasks.gated_coroutine.remote(gate.path, "a")
        await gate.entered("a")
        waits = tasks.add.remote(1)
        number = max(one.id for one in (await aiogpu.status()).tasks)
        waits.cancel()
        told = await aiogpu.why(number)
        assert str(told).startswith(f"add (task {number}) cancelled 0.")
        assert str(told).endswith(", and never ran")
        gate.release("a")
        await runs


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("number", [-1, "3", True, 1.5])
async def test_why_wants_a_number(number: int) -> None:
    with pytest.raises(
        aiogpu.OptionError, match=r"asks for a task's number.*handle\.why"
    ):
        await aiogpu.why(number)


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("processes")
async def test_failures_are_remembered_the_latest_first(tmp_path: Path) -> None:
    async with aiogpu.init(num_cpus=1):
        counter = Counter.remote()
        with pytest.raises(KeyError):
            await tasks.fail.remote(KeyError, "x")
        with pytest.raises(aiogpu.WorkerDiedError):
            await tasks.exit_at_once.options(max_retries=0).remote(3)
        with pytest.raises(TypeError):
            await counter.add.remote("no number")
        tried_again = tasks.fail_until.options(retry_exceptions=True)
        await tried_again.remote(str(tmp_path / "count"), 1, ValueError)
        called, died, raised = (await aiogpu.status()).failures
        assert (called.name, called.error) == ("Counter.add", "TypeError")
        assert (died.name, died.error) == ("exit_at_once", "WorkerDiedError")
        assert (raised.name, raised.error, raised.message) == (
            "fail",
            "KeyError",
            "'x'",
        )
        assert 0 <= called.seconds <= died.seconds <= raised.seconds < 60


@pytest.mark.usefixtures("each_engine")
@pytest.mark.needs("at once", "listed actors")
async def test_of_a_call_its_actor_is_told(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Counter.remote()
        running, behind = actor.gated.remote(gate.path, "in"), actor.add.remote()
        await gate.entered("in")
        for call in (running, behind):
            why = await call.why()
            assert (why.state, why.actor) == ("sent", "Counter")
            assert re.fullmatch(
                r"Counter\.\w+ \(task \d+\) was sent to Counter on worker \d+ \(pid "
                r"\d+\), which does not tell which of its calls run\.",
                str(why),
            )
        gate.release("in")
        await behind


@pytest.mark.usefixtures("each_engine")
async def test_who_runs_out_of_time_has_failed_and_who_is_cancelled_has_not() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = Counter.options(num_gpus=1).remote()
        await actor.add.remote()
        late = tasks.pid.options(num_gpus=1, timeout=0.01).remote()
        cancelled = tasks.pid.options(num_gpus=1).remote()
        with pytest.raises(aiogpu.TaskTimeoutError):
            await late
        cancelled.cancel()
        await tasks.pid.remote()
        (failed,) = (await aiogpu.status()).failures
        assert (failed.name, failed.error) == ("pid", "TaskTimeoutError")
        told = "it waited 0.0 s for {CPU: 1, GPU: 1} and did not begin"
        assert failed.message == f"its timeout of 0.01 s: {told}"
