"""Each option of tasks, actors and methods, on each engine: honoured, or refused.

An option that is accepted and does nothing would be found here: each has a probe that
sees its effect. What an engine refuses, it refuses by an error that names the option.
What cannot have an effect in one process, `docs/testing.md` says for tests in one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu.api.options import CHECKS
from tests.contract import gpu_tasks, option_tasks, stream_tasks, tasks
from tests.contract.node_here import node_here
from tests.contract.option_tasks import Actor, Grouped, TimedCoroutines
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("forked_zygotes"), pytest.mark.either_loop]

CPUS, GPUS = 4, 2
NODE: Final[dict[str, Any]] = {
    "num_cpus": CPUS,
    "num_gpus": GPUS,
    "resources": {"license": 2},
    "accelerator_type": "A100",
}
"""The same for all tests: one Ray cluster serves them all."""


class Place(NamedTuple):
    """Where an option is tried.

    Attributes:
        address: of the engine.
        gate: for tasks to wait at.
        path: a directory of the test's own.
        log: what was logged.
    """

    address: str
    gate: Gate
    path: Path
    log: pytest.LogCaptureFixture


Probe = Callable[[Place], Awaitable[None]]


@asynccontextmanager
async def node(at: Place, **more: Any) -> AsyncIterator[None]:
    if at.address != "ray":
        more["gpu_memory"] = "8GiB"
    async with aiogpu.init(address=at.address, **NODE, **more):
        yield


def refuse_more(remote: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(aiogpu.InfeasibleError):
        remote.options(**options).remote(*arguments)


async def facts_of(remote: Any, **options: Any) -> dict[str, Any]:
    """What a task, or an actor in a method of it, says that it has."""
    if remote is tasks.where:
        facts: dict[str, Any] = await remote.options(**options).remote()
        return facts
    async with remote.options(**options).remote() as actor:
        return await actor.where.remote()  # type: ignore[no-any-return]


# What tasks and actors have in common


async def num_cpus(remote: Any, at: Place) -> None:
    async with node(at):
        assert (await facts_of(remote, num_cpus=2))["resources"]["CPU"] == 2
        refuse_more(remote, num_cpus=CPUS + 1)


async def num_gpus(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, num_gpus=2)
        assert (facts["ids"], facts["visible"]) == ([0, 1], "0,1")
        refuse_more(remote, num_gpus=GPUS + 1)


async def memory(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, memory="1GiB")
        assert facts["resources"]["memory"] == 2**30
        refuse_more(remote, memory="1000TiB")


async def resources(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, resources={"license": 1})
        assert facts["resources"]["license"] == 1
        refuse_more(remote, resources={"license": 3})


async def accelerator_type(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, num_gpus=1, accelerator_type="A100")
        assert facts["ids"] == [0]
        refuse_more(remote, num_gpus=1, accelerator_type="T4")


async def gpu_where(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, num_gpus=1, gpu_where={"memory": "4GiB"})
        assert facts["ids"] == [0]
        refuse_more(remote, num_gpus=1, gpu_where={"memory": "80GiB"})


async def gpu_memory(remote: Any, at: Place) -> None:
    async with node(at):
        facts = await facts_of(remote, gpu_memory="4GiB")
        assert facts["ids"] == [0]
        refuse_more(remote, gpu_memory="80GiB")


async def strategy(remote: Any, at: Place) -> None:
    async with node(at), Actor.options(num_gpus=0.5).remote() as holder:
        assert (await holder.where.remote())["ids"] == [0]
        assert (await facts_of(remote, num_gpus=0.5))["ids"] == [0]
        spread = await facts_of(remote, num_gpus=0.5, strategy="spread")
        assert spread["ids"] == [1]


async def placement(remote: Any, at: Place) -> None:
    async with node(at), aiogpu.placement([{"CPU": 1, "GPU": 1}]) as group:
        facts = await facts_of(remote, num_gpus=1, placement=group)
        assert facts["ids"] == [0]
        refuse_more(remote, num_gpus=2, placement=group)


async def bundle(remote: Any, at: Place) -> None:
    bundles = [{"CPU": 1}, {"CPU": 1, "GPU": 1}]
    async with node(at), aiogpu.placement(bundles) as group:
        facts = await facts_of(remote, num_gpus=1, placement=group, bundle=1)
        assert len(facts["ids"]) == 1
        refuse_more(remote, num_gpus=1, placement=group, bundle=0)


COMMON = {
    "num_cpus": num_cpus,
    "num_gpus": num_gpus,
    "memory": memory,
    "resources": resources,
    "accelerator_type": accelerator_type,
    "gpu_where": gpu_where,
    "gpu_memory": gpu_memory,
    "strategy": strategy,
    "placement": placement,
    "bundle": bundle,
}


# Tasks


async def retry_oom(at: Place) -> None:
    counted = str(at.path / "count")
    beside = gpu_tasks.run_out_beside_others
    options = {"gpu_memory": "2GiB", "retry_oom": "exclusive"}
    async with node(at):
        assert await beside.options(**options).remote(counted, 1)


async def max_calls(at: Place) -> None:
    async with node(at):
        once = tasks.pid.options(max_calls=1)
        assert await once.remote() != await once.remote()
        again = tasks.pid.options(num_gpus=GPUS, max_calls=0)
        assert await again.remote() == await again.remote()


async def max_retries(at: Place) -> None:
    async with node(at):
        failing = tasks.fail_until.options(retry_exceptions=True, max_retries=2)
        assert await failing.remote(str(at.path / "a"), 2, ValueError) == 3
        with pytest.raises(ValueError, match="attempt 3"):
            await failing.remote(str(at.path / "b"), 3, ValueError)
        if at.address == "inline":
            return  # there is no process to die
        dying = tasks.die_until.options(max_retries=1)
        assert await dying.remote(str(at.path / "c"), 1) == 2
        with pytest.raises(aiogpu.WorkerDiedError):
            await dying.options(max_retries=0).remote(str(at.path / "d"), 1)


async def retry_exceptions(at: Place) -> None:
    async with node(at):
        retried = tasks.fail_until.options(retry_exceptions=[KeyError])
        assert await retried.remote(str(at.path / "a"), 1, KeyError) == 2
        with pytest.raises(ValueError, match="attempt 1"):
            await retried.remote(str(at.path / "b"), 1, ValueError)


async def num_returns(at: Place) -> None:
    async with node(at):
        one, two = tasks.echo.options(num_returns=2).remote((1, 2))
        assert [await one, await two] == [1, 2]


async def check_buffer(at: Place, stream: Any) -> None:
    """Of a stream with `max_buffered=2`, no more is made than its consumer allows."""
    taken = 3
    async for number in stream:
        if number + 1 == taken:
            break
    await at.gate.entered(f"begun-{taken - 1}")
    made = sum(name.startswith("begun-") for name in at.gate.pids)
    assert taken <= made <= taken + 6
    await stream.aclose()


async def max_buffered(at: Place) -> None:
    async with node(at):
        endless = stream_tasks.endless.options(max_buffered=2)
        stream = endless.remote(at.gate.path)
        await at.gate.entered("begun-0")
        for _ in range(3):  # in which a producer that nobody holds makes hundreds
            await tasks.add.remote(1)
        assert sum(name.startswith("begun-") for name in at.gate.pids) <= 6
        await check_buffer(at, stream)


async def name(at: Place) -> None:
    async with node(at):
        assert (await facts_of(tasks.where, name="other"))["name"] == "other"


async def priority(at: Place) -> None:
    gate = at.gate
    async with node(at):
        whole = tasks.gated.options(num_cpus=CPUS)
        first = whole.remote(gate.path, "first")
        await gate.entered("first")
        low = whole.remote(gate.path, "low")
        high = whole.options(priority=1).remote(gate.path, "high")
        gate.release("first")
        await gate.entered("high")
        assert "low" not in gate.pids
        gate.release("high")
        await gate.entered("low")
        gate.release("low")
        await asyncio.gather(first, low, high)


async def timeout(at: Place) -> None:
    async with node(at):
        late = tasks.gated_coroutine.options(timeout=0.1)
        with pytest.raises(aiogpu.TaskTimeoutError):
            await late.remote(at.gate.path, "a")


async def run_timeout(at: Place) -> None:
    async with node(at):
        late = tasks.gated_coroutine.options(run_timeout=0.1)
        with pytest.raises(aiogpu.TaskTimeoutError):
            await late.remote(at.gate.path, "a")


async def cancel_grace(at: Place) -> None:
    """The node's own is so long that nobody would wait for it."""
    gate = at.gate
    async with node(at, cancel_grace=600):
        handle = option_tasks.ignore_cancel.options(cancel_grace=0.1).remote(
            gate.path, "a"
        )
        await gate.entered("a")
        handle.cancel()
        if at.address == "inline":
            with at.log.at_level(logging.WARNING):
                await until(lambda: "left behind" in at.log.text)
            gate.release("a")
        else:
            await until(lambda: not psutil.pid_exists(gate.pids["a"]))
            swallowing = option_tasks.yield_and_swallow.options(cancel_grace=0.1)
            stream = swallowing.remote(gate.path, "b")
            assert await anext(stream) == 0
            await gate.entered("b")
            stream.cancel()
            await until(lambda: not psutil.pid_exists(gate.pids["b"]))


async def runtime_env(at: Place) -> None:
    async with node(at):
        env = {"env_vars": {"AIOGPU_TEST_OPTION": "given"}}
        found = tasks.environment.options(runtime_env=env).remote("AIOGPU_TEST_OPTION")
        assert await found == {"AIOGPU_TEST_OPTION": "given"}


async def lifetime(at: Place) -> None:
    gate = at.gate
    async with node(at):
        parent = option_tasks.start_child.remote(gate.path, "detached")
        await gate.entered("parent", "child")
        gate.release("parent")
        await parent
        gate.release("child")
        await gate.entered("child-done")


async def stop_grace(at: Place) -> None:
    async with node(at):
        patient = option_tasks.save.options(stop_grace=60)
        patient.remote(at.gate.path, "in")
        await at.gate.entered("in-False")
        leaving = asyncio.ensure_future(aiogpu.shutdown())
        await at.gate.entered("in-told")
        at.gate.release("in-told")
        await at.gate.entered("in-saved")
        await leaving


OF_TASKS: dict[str, Probe] = {
    **{option: partial(probe, tasks.where) for option, probe in COMMON.items()},
    "retry_oom": retry_oom,
    "max_calls": max_calls,
    "max_retries": max_retries,
    "retry_exceptions": retry_exceptions,
    "num_returns": num_returns,
    "max_buffered": max_buffered,
    "name": name,
    "priority": priority,
    "timeout": timeout,
    "run_timeout": run_timeout,
    "cancel_grace": cancel_grace,
    "stop_grace": stop_grace,
    "runtime_env": runtime_env,
    "lifetime": lifetime,
}


# Actors


async def actor_name(at: Place) -> None:
    async with node(at), Actor.options(name="named").remote() as actor:
        await actor.add.remote(5)
        found = await aiogpu.get_actor("named")
        assert await found.add.remote(1) == 6


async def namespace(at: Place) -> None:
    options = {"name": "named", "namespace": "other"}
    async with node(at), Actor.options(**options).remote() as actor:
        await actor.add.remote(5)
        found = await aiogpu.get_actor("named", namespace="other")
        assert await found.add.remote(1) == 6
        with pytest.raises(aiogpu.AiogpuError, match="named"):
            await aiogpu.get_actor("named")


async def get_if_exists(at: Place) -> None:
    async with node(at), Actor.options(name="named").remote() as actor:
        await actor.add.remote(5)
        same = Actor.options(name="named", get_if_exists=True).remote()
        assert await same.add.remote(1) == 6
        with pytest.raises(aiogpu.errors.ActorNameError):
            Actor.options(name="named").remote()


async def actor_lifetime(at: Place) -> None:
    """It outlives its last handle."""
    async with node(at):
        actor = Actor.options(name="kept", lifetime="detached").remote()
        await actor.add.remote(5)
        del actor
        gc.collect()
        await tasks.add.remote(1)
        found = await aiogpu.get_actor("kept")
        assert await found.add.remote(1) == 6
        aiogpu.kill(found)


async def call_without_end(actor: Any) -> None:
    while True:
        await actor.add.remote(1)


async def max_restarts(at: Place) -> None:
    async with node(at), Actor.options(max_restarts=1).remote() as actor:
        assert await actor.add.remote(5) == 5
        aiogpu.kill(actor, no_restart=False)
        count = 0
        while count in (0, 6):  # of the first process, which ends in a moment
            try:
                count = min(await actor.add.remote(1), 6)
            except aiogpu.ActorDiedError as error:
                if not error.is_restarting:
                    raise  # else it was lost while another process takes over
        assert count == 1
    async with node(at), Actor.remote() as mortal:
        await mortal
        aiogpu.kill(mortal, no_restart=False)
        with pytest.raises(aiogpu.ActorDiedError):
            await call_without_end(mortal)


async def max_task_retries(at: Place) -> None:
    async with node(at):
        options = {"max_restarts": -1, "max_task_retries": 1}
        async with Actor.options(**options).remote() as actor:
            assert await actor.die_until.remote(str(at.path / "a"), 1) == 2
            with pytest.raises(aiogpu.ActorDiedError):
                await actor.die_until.remote(str(at.path / "b"), 2)


async def max_concurrency(at: Place) -> None:
    gate = at.gate
    async with node(at), Actor.options(max_concurrency=2).remote() as actor:
        calls = [actor.gated.remote(gate.path, name) for name in "abc"]
        await gate.holds(2)
        assert len(gate.inside) == 2
        for name in "abc":
            await gate.entered(name)
            gate.release(name)
        await asyncio.gather(*calls)


async def concurrency_groups(at: Place) -> None:
    gate = at.gate
    async with node(at), Grouped.remote() as actor:
        busy = actor.gated.remote(gate.path, "default")
        reading = [actor.read.remote(gate.path, name) for name in "ab"]
        await gate.entered("default", "a", "b")
        gate.release("default", "a", "b")
        await asyncio.gather(busy, *reading)


async def actor_priority(at: Place) -> None:
    gate = at.gate
    async with node(at):
        holder = tasks.gated.options(num_gpus=GPUS).remote(gate.path, "holder")
        await gate.entered("holder")
        whole = Actor.options(num_gpus=GPUS)
        low = whole.remote()
        high = whole.options(priority=1).remote()
        made = asyncio.ensure_future(low.add.remote(1).coro())
        gate.release("holder")
        await holder
        assert await high.add.remote(1) == 1
        assert not made.done()
        aiogpu.kill(high)
        assert await made == 1


async def actor_runtime_env(at: Place) -> None:
    env = {"env_vars": {"AIOGPU_TEST_OPTION": "given"}}
    async with node(at), Actor.options(runtime_env=env).remote() as actor:
        assert await actor.variable.remote("AIOGPU_TEST_OPTION") == "given"


OF_ACTORS: dict[str, Probe] = {
    **{option: partial(probe, Actor) for option, probe in COMMON.items()},
    "name": actor_name,
    "namespace": namespace,
    "get_if_exists": get_if_exists,
    "lifetime": actor_lifetime,
    "max_restarts": max_restarts,
    "max_task_retries": max_task_retries,
    "max_concurrency": max_concurrency,
    "concurrency_groups": concurrency_groups,
    "priority": actor_priority,
    "runtime_env": actor_runtime_env,
}


# Methods

Timed = aiogpu.remote(TimedCoroutines)


async def method_num_returns(at: Place) -> None:
    async with node(at), Actor.remote() as actor:
        one, two = actor.pair.remote()
        assert [await one, await two] == [1, 2]


async def method_max_buffered(at: Place) -> None:
    async with node(at), Actor.remote() as actor:
        stream = actor.endless.remote(at.gate.path)
        await at.gate.entered("begun-0")
        for _ in range(3):
            await tasks.add.remote(1)
        assert sum(name.startswith("begun-") for name in at.gate.pids) <= 6
        await check_buffer(at, stream)


async def method_run_timeout(at: Place) -> None:
    async with node(at), Timed.remote() as actor:
        with pytest.raises(aiogpu.TaskTimeoutError):
            await actor.coroutine.remote(at.gate.path, "a")


OF_METHODS: dict[str, Probe] = {
    "num_returns": method_num_returns,
    "run_timeout": method_run_timeout,
    "max_buffered": method_max_buffered,
    "concurrency_group": concurrency_groups,
}

REFUSED: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ray": {
        "task": {
            "gpu_where": {"memory": "4GiB"},
            "gpu_memory": "4GiB",
            "strategy": "spread",
            "retry_oom": "exclusive",
            "run_timeout": 0.1,
            "stop_grace": 1,
            "priority": 1,
            "lifetime": "detached",
        },
        "actor": {
            "gpu_where": {"memory": "4GiB"},
            "gpu_memory": "4GiB",
            "strategy": "spread",
            "priority": 1,
        },
        "method": {"run_timeout": 0.2},
    },
    "inline": {
        "actor": {"max_concurrency": 2, "concurrency_groups": {"io": 2}},
        "method": {"concurrency_group": "io"},
    },
}
"""By engine and kind, what is refused in words, and a value that is."""

NOTHING_TO_DO: Final[dict[str, dict[str, set[str]]]] = {
    "inline": {
        "task": {"max_calls", "priority", "retry_oom"},
        "actor": {"priority", "max_task_retries"},
    },
}
"""What cannot have an effect in one process; `docs/testing.md` says so."""

KINDS = {"task": OF_TASKS, "actor": OF_ACTORS, "method": OF_METHODS}
CASES = [(kind, option) for kind, probes in KINDS.items() for option in probes]


@pytest.mark.parametrize(("kind", "option"), CASES)
async def test_an_option_is_honoured_or_refused_in_words(
    address: str,
    kind: str,
    option: str,
    gate: Gate,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = Place(address, gate, tmp_path, caplog)
    refused = REFUSED.get(address, {}).get(kind, {})
    if option in refused:
        async with node(at):
            given = {option: refused[option], "num_gpus": 0.5}
            remotes = {"task": tasks.add, "actor": Actor}
            if kind == "method":
                remotes[kind] = {"concurrency_group": Grouped}.get(option, Timed)
                given = {}
            with pytest.raises(aiogpu.AiogpuError, match=option):
                remotes[kind].options(**given).remote(*[1] * (kind == "task"))
    elif option in NOTHING_TO_DO.get(address, {}).get(kind, ()):
        assert f"`{option}`" in Path("docs/testing.md").read_text()
    else:
        await KINDS[kind][option](at)


def test_each_option_has_a_probe() -> None:
    assert set(OF_TASKS) == set(CHECKS["task"])
    assert set(OF_ACTORS) == set(CHECKS["actor"])
    assert set(OF_METHODS) == set(CHECKS["method"])


# Options as large as they may be: every engine serves them


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("engine", ["local", "joined", "inline"])
async def test_options_as_large_as_they_may_be(engine: str, tmp_path: Path) -> None:
    """[B10]"""
    o = option_tasks
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        if engine == "joined":
            here = await stack.enter_async_context(node_here(tmp_path))
            await stack.enter_async_context(here.join())
        else:
            await stack.enter_async_context(aiogpu.init(address=engine, num_cpus=2))
        assert await o.give.remote(1) == 1
        assert [number async for number in o.count.remote(3)] == [0, 1, 2]
        assert await asyncio.gather(*o.many.remote()) == list(range(1000))
        ready, _ = await aiogpu.wait([o.give.remote(2)], timeout=o.TIME)
        assert await ready[0] == 2
        with pytest.raises(aiogpu.OptionError, match=f"timeout=1e.300 .* {o.TIME:_}"):
            aiogpu.wait(ready, timeout=1e300)
        assert await o.give_below.remote(7) == [7, 0, 1, 2]
        async with o.Patient.remote() as patient, o.Interleaved.remote() as other:
            assert await asyncio.gather(
                patient.give.remote(1), other.give.remote(2)
            ) == [1, 2]
            assert [number async for number in patient.count.remote(3)] == [0, 1, 2]
