"""Actors, values, memory and descriptors are released when no code holds them.

An actor ends soon after its last handle, wherever that was, and no sooner.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu.engines.local import LocalEngine
from aiogpu.errors import MisuseError, SerializationError
from aiogpu.linux.procfs import read_numbers
from aiogpu.serialization.references import SHARED_FROM
from aiogpu.types import Node
from tests.contract import let_go_tasks, tasks
from tests.contract.let_go_tasks import Model, Serial, Soft
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.waits import LIMIT, until, until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=4, num_gpus=1),
]
CLASSES: list[Any] = [Serial, Soft]
MAKING = ("make_and_drop", "make_and_call")


async def gpu_is_free() -> None:
    """Wait until no model lives."""
    gc.collect()
    await until_free(GPU=1)


async def gpu_can_be_had() -> None:
    """Wait until another model has had the GPU, after all that asked for it before."""
    gc.collect()
    async with asyncio.timeout(LIMIT):
        await Model.remote()
    await gpu_is_free()


async def test_an_idle_actor_releases_its_arguments_and_results(node: Node) -> None:
    for holder in CLASSES:
        idle, model = await holder.remote(), await Model.remote()
        assert await idle.take.remote([model]) == 42
        del model
        await gpu_is_free()
        (model,) = await idle.make.remote()
        assert await model.answer.remote() == 42
        del model
        await gpu_is_free()
        del idle
    idle, model = await Serial.remote(), await Model.options(name="it").remote()
    assert await idle.find_twice.remote("it") == 84
    del model
    await gpu_is_free()


async def test_a_caller_releases_the_results_it_was_given(node: Node) -> None:
    maker = await Serial.remote()
    for asker in CLASSES:
        idle = await asker.remote()
        for _ in range(2):
            assert await idle.ask.remote(maker) == 42
            await gpu_is_free()
    for _ in range(2):
        assert await let_go_tasks.ask.remote(maker) == 42
        await gpu_is_free()


@pytest.mark.parametrize(
    ("pickle_it", "refusal"),
    [
        (let_go_tasks.send_with_a_lock, SerializationError),
        (let_go_tasks.pickle_by_hand, MisuseError),
    ],
    ids=["unpicklable", "by hand"],
)
async def test_a_pickle_that_was_not_sent_holds_nothing(
    node: Node, address: str, pickle_it: Callable[[Any], None], refusal: type[Exception]
) -> None:
    model, is_refused = await Model.remote(), False
    try:
        pickle_it(model)
    except refusal:
        is_refused = True
    # Pickling by hand is refused by Ray alone, which counts the holders.
    by_hand = pickle_it is let_go_tasks.pickle_by_hand
    assert is_refused is (not by_hand or address == "ray")
    del model
    await gpu_is_free()


async def test_a_put_value_holds_the_actor_inside_it(node: Node) -> None:
    """The actor is released with the value."""
    model = await Model.remote()
    value: Any = aiogpu.put([model])
    del model
    gc.collect()
    (again,) = await value
    assert await again.answer.remote() == 42
    del again, value
    await gpu_is_free()


@pytest.mark.needs("holders")
async def test_an_error_holds_the_actor_inside_it(node: Node) -> None:
    with pytest.raises(let_go_tasks.HoldingError) as caught:
        await let_go_tasks.fail_with_a_new_one.remote()
    (model,) = caught.value.args
    assert await model.answer.remote() == 42
    del model, caught
    await gpu_is_free()


def uses_of(model: Any) -> dict[str, Any]:
    """Return functions and a class that can use a model only through their pickle."""

    async def by_closure(_: object) -> Any:
        return await model.answer.remote()

    async def by_default(_: object, model: Any = model) -> Any:
        return await model.answer.remote()

    def in_plain_code(_: object) -> Any:
        return aiogpu.get(model.answer.remote())

    async def by_child(_: object) -> Any:
        @aiogpu.remote
        async def child() -> Any:
            return await model.answer.remote()

        return await child.remote()

    def items(_: object) -> Iterator[Any]:
        yield aiogpu.get(model.answer.remote())

    class Closing:
        def __init__(self, _: object) -> None: ...

        async def use(self) -> Any:
            return await model.answer.remote()

    defined = (by_closure, by_default, in_plain_code, by_child, items, Closing)
    return {each.__name__: aiogpu.remote(each) for each in defined}


@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
@pytest.mark.needs("at once")
@pytest.mark.parametrize(
    "way",
    ["by_closure", "by_default", "in_plain_code", "by_child", "items", "Closing"],
)
async def test_a_waiting_call_holds_the_actor_in_its_function(
    node: Node, gate: Gate, way: str
) -> None:
    """The program drops its handle and the function before a worker loads it."""
    model = await Model.remote()
    using = uses_of(model)[way]
    running = let_go_tasks.wait.remote(gate.path, "running")
    await gate.entered("running")
    called: Any = using.remote(aiogpu.put(0))
    del model, using
    gc.collect()
    # The node has been told of the dropped handle when it answers.
    assert (await aiogpu.available_resources()).get("GPU", 0) == 0
    gate.release("running")
    await running
    if way == "items":
        assert [item async for item in called] == [42]
    else:
        assert await (called.use.remote() if way == "Closing" else called) == 42


@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
@pytest.mark.needs("at once")
async def test_a_map_holds_the_actor_in_its_function(node: Node, gate: Gate) -> None:
    model = await Model.remote()
    running = let_go_tasks.wait.remote(gate.path, "running")
    await gate.entered("running")
    results = uses_of(model)["by_closure"].map(range(4), chunk=2)
    first = asyncio.ensure_future(anext(results))
    await asyncio.sleep(0)
    del model
    gc.collect()
    assert (await aiogpu.available_resources()).get("GPU", 0) == 0
    gate.release("running")
    await running
    assert [await first, *[each async for each in results]] == [42] * 4


@pytest.mark.needs("processes", "holders")
async def test_a_restarted_actor_releases_its_arguments(node: Node) -> None:
    model = await Model.remote()
    asking = await let_go_tasks.Asking.remote(model)
    del model
    first = await asking.pid.remote()
    aiogpu.kill(asking, no_restart=False)
    assert await asking.pid.remote() != first
    await gpu_is_free()


@pytest.mark.parametrize("holder", ["actor", "task"])
async def test_plain_code_releases_unawaited_calls(node: Node, holder: str) -> None:
    # The actor is idle afterwards, and so is the worker of the task.
    idle = await Serial.remote() if holder == "actor" else None
    for method in let_go_tasks.UNAWAITED:
        models = [] if method in MAKING else [await Model.remote()]
        if idle is None:
            call = let_go_tasks.do.remote(method, models)
        else:
            call = getattr(idle, method).remote(models)
        del models
        assert await asyncio.wait([call])
        assert isinstance(call.exception(), ValueError | None)
        del call
        await gpu_can_be_had()


@pytest.mark.aiogpu(num_cpus=1)
@pytest.mark.needs("processes")
async def test_an_idle_worker_releases_its_last_error(node: Node, gate: Gate) -> None:
    """No task follows, and no garbage collector runs."""
    for task in (let_go_tasks.fail_with, let_go_tasks.fail_softly_with):
        name = task.__name__
        with pytest.raises(ValueError, match=name):
            await task.remote(gate.path, name)
        await gate.entered(name)
    with pytest.raises(ValueError, match="stream"):
        async for _ in let_go_tasks.fail_amid_items.remote(gate.path, "stream"):
            pass
    await gate.entered("stream")


@pytest.mark.parametrize("holder", ["actor", "task"])
async def test_unawaited_results_release_their_actors(node: Node, holder: str) -> None:
    making = await Serial.remote()
    idle = await Serial.remote() if holder == "actor" else None
    for _ in range(2):
        if idle is None:
            await let_go_tasks.leave.remote(making)
        else:
            await idle.make_another_leave_one.remote([making])
        # The other model may not have been made before.
        (model,) = await making.make.remote()
        await asyncio.wait([model.answer.remote()])
        del model
        await gpu_is_free()


async def test_a_result_holds_the_actor_inside_it(node: Node) -> None:
    maker = await Soft.remote()
    made = maker.make_at_the_gate.remote()
    while await maker.count.remote() < 1:
        await asyncio.sleep(0)
    called = maker.call_at_the_gate.remote()
    while await maker.count.remote() < 2:
        await asyncio.sleep(0)
    await maker.open.remote()
    await called
    # The call sent in the same turn has ended, and has released its arguments.
    for _ in range(20):
        await maker.count.remote()
    (model,) = await made
    assert await model.answer.remote() == 42


# A long task: what it has dropped is free before it ends


COUNT = 8


@pytest.mark.parametrize("way", ["items", "results", "values"])
@pytest.mark.parametrize("task", [let_go_tasks.take, let_go_tasks.take_softly])
async def test_a_long_task_releases_values(task: object, way: str, gate: Gate) -> None:
    assert isinstance(task, aiogpu.types.RemoteFunction)
    async with aiogpu.init(num_cpus=1) as session:
        taking = task.remote(gate.path, way, COUNT, SHARED_FROM)
        await gate.entered("taken")
        engine = session._session._engine
        assert isinstance(engine, LocalEngine)
        memory = engine.store.memory
        # The next message may release the last value.
        await until(lambda: memory.used <= 2 * SHARED_FROM)
        gate.release("taken")
        await taking


async def test_a_long_task_releases_an_actor(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        taking = let_go_tasks.drop_an_actor.remote(gate.path)
        await gate.entered("taken")
        async with asyncio.timeout(20):
            while (await aiogpu.status()).actors:
                pass
        gate.release("taken")
        await taking


# Many workers start and end: driver, zygote and keepers do not grow

SLACK = 2 << 10
"""KiB by which a process may grow, by pools of its allocator."""


class Size(NamedTuple):
    """The size of a process."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        numbers = read_numbers(f"/proc/{pid}/status")
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(numbers["RssAnon"], descriptors, numbers["Threads"])


def sizes() -> dict[int, tuple[str, Size]]:
    """Return names and sizes of driver, zygotes and keepers by pid."""
    result = {os.getpid(): ("driver", Size.of(os.getpid()))}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.name()
            if name.startswith(("aiogpu-zygote", "aiogpu-keep")):
                result[process.pid] = (name, Size.of(process.pid))
        except (psutil.NoSuchProcess, KeyError, OSError):
            continue  # a worker, which comes and goes
    return result


async def run_many(count: int) -> None:
    """Run tasks; wait until all shares are free and no worker is about to end."""
    task = tasks.add.options(num_gpus=0.25)
    results = await asyncio.gather(*(task.remote(number) for number in range(count)))
    assert results == list(range(1, count + 1))
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize(
    "count", [100, pytest.param(1000, marks=pytest.mark.slow)], ids=str
)
async def test_driver_zygote_and_keepers_do_not_grow(count: int) -> None:
    # With `preload=()` the zygote learns nothing, and is not replaced.
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=()):
        await run_many(50)
        before = sizes()
        assert {"driver", "aiogpu-zygote"} <= {name for name, _ in before.values()}
        await run_many(count)
        after = sizes()
    assert len(after) < len(before) + 10, "keepers and zygotes end as well"
    lasting = before.keys() & after.keys()
    assert len(lasting) >= 3, "driver, zygote and at least one keeper"
    for pid in lasting:
        (name, old), (_, new) = before[pid], after[pid]
        change = f"{name}: {old} became {new}"
        assert new.threads == old.threads, change
        assert new.descriptors <= old.descriptors + 2, change
        assert new.memory <= old.memory + SLACK, change


# aiogpu never changes the program's garbage collector

PROGRAM = """
    import asyncio, gc

    called = []
    def note(name):
        setattr(gc, name, lambda *_: called.append(name))
    for name in ("disable", "enable", "freeze", "unfreeze", "set_threshold"):
        note(name) if MODE == "calls" else None

    class Young: ...

    async def main():
        young = Young()
        import aiogpu
        task = aiogpu.remote(abs)
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            assert await task.remote(-1) == 1
            assert await task.options(num_gpus=1).remote(-1) == 1
        return [
            generation for generation in range(3)
            if any(item is young for item in gc.get_objects(generation))
        ]

    if MODE == "ages":
        gc.set_threshold(1 << 30)  # is enabled, and collects nothing by itself
    print(asyncio.run(main()), called)
"""


def test_the_garbage_collectors_settings_are_not_touched() -> None:
    output = run(PROGRAM.replace("MODE", "'calls'"))
    assert output.strip().endswith("[]"), output


def test_aiogpu_does_not_age_objects() -> None:
    assert run(PROGRAM.replace("MODE", "'ages'")).strip() == "[0] []"
