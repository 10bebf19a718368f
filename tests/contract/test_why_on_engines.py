"""`why` and `status` on every engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import aiogpu
from aiogpu.errors import NodeError, NoSuchTaskError
from aiogpu.observe import snapshot as module
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import TaskStatus
from aiogpu.types import Node
from tests.contract import tasks
from tests.contract.actor_classes import Counter
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1, num_gpus=1),
]


@pytest.mark.needs("holders", "at once")
@pytest.mark.aiogpu(num_cpus=8, num_gpus=2)
async def test_why_names_short_resources_and_holders(node: Node, gate: Gate) -> None:
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
    amounts = (short.resource, short.asked, short.free, short.total)
    assert amounts == ("GPU", 0.5, 0.6, 2.0)
    assert [(holder.task, holder.share, holder.pid) for holder in short.holders] == [
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


@pytest.mark.needs("holders", "at once")
async def test_why_names_the_children_a_task_waits_for(node: Node, gate: Gate) -> None:
    async def parent(path: str) -> str:
        return await tasks.gated.options(name="child").remote(path, "child")

    handle = aiogpu.remote(parent).remote(gate.path)
    await gate.entered("child")
    why = await handle.why()
    assert (why.state, why.children) == ("blocked", ("child",))
    assert "waits for its child child; meanwhile it holds no CPU" in str(why)
    (status, _) = (await aiogpu.status()).tasks
    assert status.state == "blocked"
    assert status.reason == "waits for its children: child"
    gate.release("child")
    assert await handle == "child"


@pytest.mark.needs("records")
@pytest.mark.needs("holders")
async def test_why_tells_the_position_in_the_queue(node: Node, gate: Gate) -> None:
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
async def test_why_tells_how_a_task_ended(address: str, gate: Gate) -> None:
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
async def test_why_tells_that_the_node_opens(address: str) -> None:
    node = aiogpu.init(address=address, num_cpus=1)
    opening = asyncio.ensure_future(node.__aenter__())
    await asyncio.sleep(0)
    handle = tasks.add.remote(1)
    why = str(await handle.why())
    assert why == "add waits for its node, which is being opened."
    await opening
    assert await handle == 2
    await aiogpu.shutdown()


@pytest.mark.needs("holders")
async def test_a_task_may_not_ask(node: Node) -> None:
    """Neither in a worker nor, on an inline node, in the program's process."""
    names = ("why", "status", "cluster_resources", "available_resources")

    async def ask() -> dict[str, str]:
        child = tasks.add.remote(1)
        answers = {}
        for name in names:
            try:
                await getattr(child if name == "why" else aiogpu, name)()
            except NodeError as error:
                answers[name] = str(error)
        assert await child == 2
        return answers

    answers = await aiogpu.remote(ask).remote()
    for name in names:
        assert f"{name}()" in answers[name]
        assert "was called inside a task; only the program" in answers[name]
    assert (await aiogpu.status()).total["CPU"] == 1.0


@pytest.mark.needs("holders")
async def test_a_plain_task_may_not_ask(node: Node) -> None:
    def ask() -> str:
        child = tasks.add.remote(1)
        try:
            child.why()
        except NodeError as error:
            return f"{error} {aiogpu.get(child)}"
        return "it could"

    answer = await aiogpu.remote(ask).remote()
    assert "why() of the handle of add was called inside a task" in answer
    assert answer.endswith(" 2")


@pytest.mark.needs("records")
@pytest.mark.needs("holders", "own objects")
async def test_status_makes_few_objects_for_many_waiting_tasks(
    node: Node, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(**parts: object) -> object:
        made.append(parts)
        return TaskStatus(**parts)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "TaskStatus", make)
    running = tasks.gated_coroutine.remote(gate.path, "a")
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
    await running


@pytest.mark.needs("records")
@pytest.mark.needs("holders")
async def test_status_prints_a_table_and_a_line(node: Node, gate: Gate) -> None:
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


@pytest.mark.needs("records")
@pytest.mark.needs("listed actors")
async def test_actors_are_listed_while_they_live(node: Node) -> None:
    named = Counter.options(name="tally", lifetime="detached").remote()
    plain = Counter.remote()
    pids = [await actor.pid.remote() for actor in (named, plain)]
    first, second = (await aiogpu.status()).actors
    facts = (first.name, first.class_name, first.state, first.is_detached)
    assert facts == ("tally", "Counter", "alive", True)
    assert (first.holders, second.holders) == (2, 1)
    assert (second.name, second.client, second.calls) == (None, first.client, 0)
    assert [first.pid, second.pid] == pids
    aiogpu.kill(named)
    assert [actor.id for actor in (await aiogpu.status()).actors] == [second.id]


@pytest.mark.needs("records")
@pytest.mark.needs("listed actors")
async def test_an_actor_that_waits_is_listed_last(node: Node) -> None:
    living = Counter.options(num_gpus=1).remote()
    await living.add.remote()
    waiting = Counter.options(num_gpus=1).remote()
    first, second = (await aiogpu.status()).actors
    assert (second.state, second.worker, second.pid) == ("pending", None, 0)
    why = await aiogpu.why(second.id)
    assert (why.name, why.state) == ("Counter", "waiting")
    assert first.worker is not None
    del living, waiting


@pytest.mark.needs("records")
async def test_why_takes_a_tasks_number(node: Node) -> None:
    async with aiogpu.placement([{"CPU": 1}]):
        handle = tasks.pid.remote()
        (task,) = (t for t in (await aiogpu.status()).tasks if t.name == "pid")
        assert (await aiogpu.why(task.id)).name == "pid"
    pid = await handle
    ended = (await aiogpu.why(task.id)).ended
    assert ended is not None
    assert (ended.name, ended.state, ended.pid) == ("pid", "finished", pid)
    with pytest.raises(NoSuchTaskError, match=r"no task 999999\. Either"):
        await aiogpu.why(999_999)


@pytest.mark.needs("records")
async def test_why_tells_the_outcome_by_number(node: Node, gate: Gate) -> None:
    failing = tasks.fail.options(num_gpus=0.5).remote(KeyError, "no such key")
    with pytest.raises(KeyError):
        await failing
    (failed,) = (await aiogpu.status()).failures
    why = await aiogpu.why(failed.task)
    assert (why.state, why.request) == ("ended", {"CPU": 1.0, "GPU": 0.5})
    ended = why.ended
    assert ended is not None
    assert (ended.state, ended.error) == ("failed", "KeyError")
    assert ended.devices == (("GPU", 0),)
    first, second, *trace, last = str(why).splitlines()
    assert first.startswith(f"fail (task {failed.task}) failed 0.")
    assert first.endswith("ago: KeyError: 'no such key'")
    assert second.startswith("  it ran ")
    assert f"(pid {ended.pid}) with GPU 0" in second
    assert trace[0] == "  Traceback (most recent call last):"
    assert "tasks.py" in trace[1]
    assert last == "  KeyError: 'no such key'"
    runs = tasks.gated_coroutine.remote(gate.path, "a")
    await gate.entered("a")
    waits = tasks.add.remote(1)
    number = max(task.id for task in (await aiogpu.status()).tasks)
    waits.cancel()
    why = await aiogpu.why(number)
    assert str(why).startswith(f"add (task {number}) cancelled 0.")
    assert str(why).endswith(", and never ran")
    gate.release("a")
    await runs


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("number", [-1, "3", True, 1.5])
async def test_why_refuses_what_is_no_number(number: int) -> None:
    message = r"must be a task's number.*handle\.why"
    with pytest.raises(aiogpu.OptionError, match=message):
        await aiogpu.why(number)


@pytest.mark.needs("processes")
async def test_status_lists_failures_latest_first(node: Node, tmp_path: Path) -> None:
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
    assert (raised.name, raised.error) == ("fail", "KeyError")
    assert raised.message == "'x'"
    assert 0 <= called.seconds <= died.seconds <= raised.seconds < 60


@pytest.mark.needs("at once", "listed actors")
async def test_why_names_the_actor_of_a_call(node: Node, gate: Gate) -> None:
    actor = await Counter.remote()
    running, behind = actor.gated.remote(gate.path, "in"), actor.add.remote()
    await gate.entered("in")
    for call in (running, behind):
        why = await call.why()
        assert (why.state, why.actor) == ("sent", "Counter")
        assert re.fullmatch(
            r"Counter\.\w+ \(task \d+\) was sent to Counter on worker \d+ \(pid "
            r"\d+\), which does not report which of its calls run\.",
            str(why),
        )
    gate.release("in")
    await behind


@pytest.mark.needs("records")
async def test_a_timeout_is_a_failure_and_a_cancel_is_not(node: Node) -> None:
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
    wait = "it waited 0.0 s for {CPU: 1, GPU: 1} and did not begin"
    assert failed.message == f"its timeout of 0.01 s: {wait}"
