"""Each option of tasks, actors and methods, on each engine: honoured, or refused.

Each option has a probe that sees its effect. An engine refuses an option by an error
that names it. `docs/testing.md` lists the options without an effect in one process.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu import errors
from aiogpu.api.options import TaskOptions
from tests.contract import gpu_tasks, option_tasks, setup_tasks, stream_tasks, tasks
from tests.contract.clusters import USUAL
from tests.contract.node_here import node_here
from tests.contract.option_tasks import Actor, Grouped, TimedCoroutines
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("forked_zygotes"), pytest.mark.either_loop]

NODE: Final = USUAL
CPUS, GPUS = NODE["num_cpus"], NODE["num_gpus"]


class Place(NamedTuple):
    """The engine of a probe, and the fixtures that it may use."""

    address: str
    gate: Gate
    path: Path


Probe = Callable[[Place], Awaitable[None]]


def refuse_more(remote: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(errors.InfeasibleError):
        remote.options(**options).remote(*arguments)


async def facts_of(remote: Any, **options: Any) -> dict[str, Any]:
    """Return what a task, or a method of an actor, says of its resources."""
    if remote is tasks.where:
        facts: dict[str, Any] = await remote.options(**options).remote()
        return facts
    async with remote.options(**options).remote() as actor:
        return await actor.where.remote()  # type: ignore[no-any-return]


# What tasks and actors have in common


async def common_num_cpus(remote: Any, at: Place) -> None:
    assert (await facts_of(remote, num_cpus=2))["resources"]["CPU"] == 2
    refuse_more(remote, num_cpus=CPUS + 1)


async def common_num_gpus(remote: Any, at: Place) -> None:
    facts = await facts_of(remote, num_gpus=2)
    assert (facts["ids"], facts["visible"]) == ([0, 1], "0,1")
    refuse_more(remote, num_gpus=GPUS + 1)


async def common_memory(remote: Any, at: Place) -> None:
    facts = await facts_of(remote, memory="1GiB")
    assert facts["resources"]["memory"] == 2**30
    refuse_more(remote, memory="1000TiB")


async def common_resources(remote: Any, at: Place) -> None:
    facts = await facts_of(remote, resources={"license": 1})
    assert facts["resources"]["license"] == 1
    refuse_more(remote, resources={"license": 3})


async def common_accelerator_type(remote: Any, at: Place) -> None:
    facts = await facts_of(remote, num_gpus=1, accelerator_type="A100")
    assert facts["ids"] == [0]
    refuse_more(remote, num_gpus=1, accelerator_type="T4")


async def common_gpu_where(remote: Any, at: Place) -> None:
    by_memory = {"num_gpus": 1, "gpu_where": {"memory": "4GiB"}}
    assert (await facts_of(remote, **by_memory))["ids"] == [0]
    refuse_more(remote, num_gpus=1, gpu_where={"memory": "80GiB"})


async def common_gpu_memory(remote: Any, at: Place) -> None:
    assert (await facts_of(remote, gpu_memory="4GiB"))["ids"] == [0]
    refuse_more(remote, gpu_memory="80GiB")


async def common_gpu_strategy(remote: Any, at: Place) -> None:
    async with Actor.options(num_gpus=0.5).remote() as holder:
        assert (await holder.where.remote())["ids"] == [0]
        assert (await facts_of(remote, num_gpus=0.5))["ids"] == [0]
        spread = await facts_of(remote, num_gpus=0.5, gpu_strategy="spread")
        assert spread["ids"] == [1]


async def common_placement(remote: Any, at: Place) -> None:
    async with aiogpu.placement([{"CPU": 1, "GPU": 1}]) as group:
        facts = await facts_of(remote, num_gpus=1, placement=group)
        assert facts["ids"] == [0]
        refuse_more(remote, num_gpus=2, placement=group)


async def common_bundle(remote: Any, at: Place) -> None:
    bundles = [{"CPU": 1}, {"CPU": 1, "GPU": 1}]
    async with aiogpu.placement(bundles) as group:
        facts = await facts_of(remote, num_gpus=1, placement=group, bundle=1)
        assert len(facts["ids"]) == 1
        refuse_more(remote, num_gpus=1, placement=group, bundle=0)


async def refused_but_on_ray(
    remote: Any, at: Place, **options: Any
) -> dict[str, Any] | None:
    """Return the facts of a task on Ray; elsewhere the option is refused."""
    if at.address == "ray":
        return await facts_of(remote, **options)
    with pytest.raises(errors.OptionError, match="nodes of a Ray cluster"):
        remote.options(**options).remote()
    return None


async def common_scheduling_strategy(remote: Any, at: Place) -> None:
    await refused_but_on_ray(remote, at, scheduling_strategy="SPREAD")
    await refused_but_on_ray(remote, at, scheduling_strategy="DEFAULT")
    with pytest.raises(errors.OptionError, match="Did you mean gpu_strategy"):
        remote.options(strategy="SPREAD")


async def common_label_selector(remote: Any, at: Place) -> None:
    if at.address == "ray":
        node = (await facts_of(tasks.where))["node"]
        facts = await facts_of(remote, label_selector={"ray.io/node-id": node})
        assert facts.get("node", node) == node  # an actor does not say its node
    else:
        await refused_but_on_ray(remote, at, label_selector={"zone": "a"})


# Tasks


async def task_retry_oom(at: Place) -> None:
    counted = str(at.path / "count")
    beside = gpu_tasks.run_out_beside_others
    options = {"gpu_memory": "2GiB", "retry_oom": "exclusive"}
    assert await beside.options(**options).remote(counted, 1)
    climbing = beside.options(
        num_gpus=0.25, gpu_memory="2GiB", retry_oom=["share", "exclusive"]
    )
    assert (await climbing.remote(str(at.path / "again"), 1))[2] == 0.5


async def task_max_calls(at: Place) -> None:
    once = tasks.pid.options(max_calls=1)
    assert await once.remote() != await once.remote()
    again = tasks.pid.options(num_gpus=GPUS, max_calls=0)
    assert await again.remote() == await again.remote()


async def task_max_retries(at: Place) -> None:
    failing = tasks.fail_until.options(retry_exceptions=True, max_retries=2)
    assert await failing.remote(str(at.path / "a"), 2, ValueError) == 3
    with pytest.raises(ValueError, match="attempt 3"):
        await failing.remote(str(at.path / "b"), 3, ValueError)
    if at.address == "inline":
        return  # there is no process to die
    dying = tasks.die_until.options(max_retries=1)
    assert await dying.remote(str(at.path / "c"), 1) == 2
    with pytest.raises(errors.WorkerDiedError):
        await dying.options(max_retries=0).remote(str(at.path / "d"), 1)


async def task_retry_exceptions(at: Place) -> None:
    retried = tasks.fail_until.options(retry_exceptions=[KeyError])
    assert await retried.remote(str(at.path / "a"), 1, KeyError) == 2
    with pytest.raises(ValueError, match="attempt 1"):
        await retried.remote(str(at.path / "b"), 1, ValueError)


async def task_num_returns(at: Place) -> None:
    one, two = tasks.echo.options(num_returns=2).remote((1, 2))
    assert [await one, await two] == [1, 2]


async def check_buffer(at: Place, stream: Any) -> None:
    """A stream with `max_buffered=2` makes no more items than its consumer allows."""
    await at.gate.entered("begun-0")
    for _ in range(3):  # meanwhile an unbounded producer would make hundreds
        await tasks.add.remote(1)
    assert sum(name.startswith("begun-") for name in at.gate.pids) <= 6
    taken = 3
    async for number in stream:
        if number + 1 == taken:
            break
    await at.gate.entered(f"begun-{taken - 1}")
    made = sum(name.startswith("begun-") for name in at.gate.pids)
    assert taken <= made <= taken + 6
    await stream.aclose()


async def task_max_buffered(at: Place) -> None:
    endless = stream_tasks.endless.options(max_buffered=2)
    await check_buffer(at, endless.remote(at.gate.path))


async def task_name(at: Place) -> None:
    assert (await facts_of(tasks.where, name="other"))["name"] == "other"


async def task_priority(at: Place) -> None:
    gate = at.gate
    whole = tasks.gated.options(num_cpus=CPUS)
    first = whole.remote(gate.path, "first")
    await gate.entered("first")
    low = whole.remote(gate.path, "low")
    high = whole.options(priority=1).remote(gate.path, "high")
    gate.release("first")
    await gate.entered("high")
    assert "low" not in gate.pids
    gate.release("high")
    await gate.let_pass("low")
    await asyncio.gather(first, low, high)


async def time_limit(option: str, at: Place) -> None:
    late = tasks.gated_coroutine.options(**{option: 0.1})  # type: ignore[call-overload]
    await raises(errors.TaskTimeoutError, late.remote(at.gate.path, "a"))


async def task_cancel_grace(at: Place) -> None:
    """The node's own grace is 600 s."""
    gate = at.gate
    deaf = option_tasks.ignore_cancel.options(cancel_grace=0.1)
    handle = deaf.remote(gate.path, "a")
    await gate.entered("a")
    handle.cancel()
    await until(lambda: not psutil.pid_exists(gate.pids["a"]))
    swallowing = option_tasks.yield_and_swallow.options(cancel_grace=0.1)
    stream = swallowing.remote(gate.path, "b")
    assert await anext(stream) == 0
    await gate.entered("b")
    stream.cancel()
    await until(lambda: not psutil.pid_exists(gate.pids["b"]))


async def task_runtime_env(at: Place) -> None:
    env = {"env_vars": {"AIOGPU_TEST_OPTION": "given"}}
    found = tasks.environment.options(runtime_env=env).remote("AIOGPU_TEST_OPTION")
    assert await found == {"AIOGPU_TEST_OPTION": "given"}


async def task_any_of(at: Place) -> None:
    entries = [{"num_gpus": GPUS + 1}, {"num_cpus": 2}]
    facts = await facts_of(tasks.where, any_of=entries)
    assert facts["resources"]["CPU"] == 2


async def task_setup(at: Place) -> None:
    pid, ran = await setup_tasks.count.remote()
    assert ran[-1] == pid


async def task_lifetime(at: Place) -> None:
    gate = at.gate
    parent = option_tasks.start_child.remote(gate.path, "detached")
    await gate.entered("parent", "child")
    gate.release("parent")
    await parent
    gate.release("child")
    await gate.entered("child-done")


async def task_stop_grace(at: Place) -> None:
    patient = option_tasks.save.options(stop_grace=60)
    patient.remote(at.gate.path, "in")
    await at.gate.entered("in-False")
    leaving = asyncio.ensure_future(aiogpu.shutdown())
    await at.gate.entered("in-told")
    at.gate.release("in-told")
    await at.gate.entered("in-saved")
    await leaving


# Actors


async def actor_name(at: Place) -> None:
    async with Actor.options(name="named").remote() as actor:
        await actor.add.remote(5)
        found = await aiogpu.get_actor("named")
        assert await found.add.remote(1) == 6


async def actor_namespace(at: Place) -> None:
    options = {"name": "named", "namespace": "other"}
    async with Actor.options(**options).remote() as actor:
        await actor.add.remote(5)
        found = await aiogpu.get_actor("named", namespace="other")
        assert await found.add.remote(1) == 6
        with pytest.raises(errors.AiogpuError, match="named"):
            await aiogpu.get_actor("named")


async def actor_get_if_exists(at: Place) -> None:
    async with Actor.options(name="named").remote() as actor:
        await actor.add.remote(5)
        same = Actor.options(name="named", get_if_exists=True).remote()
        assert await same.add.remote(1) == 6
        again = Actor.options(name="named").remote
        await raises(errors.ActorNameError, again)


async def actor_lifetime(at: Place) -> None:
    """A detached actor outlives its last handle."""
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


async def actor_max_restarts(at: Place) -> None:
    async with Actor.options(max_restarts=1).remote() as actor:
        assert await actor.add.remote(5) == 5
        aiogpu.kill(actor, no_restart=False)
        count = 0
        while count in (0, 6):  # the first process answers until it has ended
            try:
                count = min(await actor.add.remote(1), 6)
            except errors.ActorDiedError as error:
                if not error.is_restarting:
                    raise  # else the call was lost while another process takes over
        assert count == 1
    async with Actor.remote() as mortal:
        await mortal
        aiogpu.kill(mortal, no_restart=False)
        await raises(errors.ActorDiedError, lambda: call_without_end(mortal))


async def actor_max_task_retries(at: Place) -> None:
    options = {"max_restarts": -1, "max_task_retries": 1}
    async with Actor.options(**options).remote() as actor:
        assert await actor.die_until.remote(str(at.path / "a"), 1) == 2
        with pytest.raises(errors.ActorDiedError):
            await actor.die_until.remote(str(at.path / "b"), 2)


async def actor_evict_after(at: Place) -> None:
    guest = Actor.options(num_gpus=GPUS, evict_after=0).remote()
    await guest
    async with Actor.options(num_gpus=GPUS).remote() as other:
        await other
        (state,) = (a.state for a in (await aiogpu.status()).actors if a.evictions)
        assert state == "evicted"
    await guest


async def actor_max_concurrency(at: Place) -> None:
    gate = at.gate
    async with Actor.options(max_concurrency=2).remote() as actor:
        calls = [actor.gated.remote(gate.path, name) for name in "abc"]
        await gate.holds(2)
        assert len(gate.inside) == 2
        for name in "abc":
            await gate.let_pass(name)
        await asyncio.gather(*calls)


async def actor_concurrency_groups(at: Place) -> None:
    gate = at.gate
    async with Grouped.remote() as actor:
        busy = actor.gated.remote(gate.path, "default")
        reading = [actor.read.remote(gate.path, name) for name in "ab"]
        await gate.let_pass("default", "a", "b")
        await asyncio.gather(busy, *reading)


async def actor_priority(at: Place) -> None:
    gate = at.gate
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
    async with Actor.options(runtime_env=env).remote() as actor:
        assert await actor.variable.remote("AIOGPU_TEST_OPTION") == "given"


# Methods

Timed = aiogpu.remote(TimedCoroutines)


async def method_num_returns(at: Place) -> None:
    async with Actor.remote() as actor:
        one, two = actor.pair.remote()
        assert [await one, await two] == [1, 2]


async def method_max_buffered(at: Place) -> None:
    async with Actor.remote() as actor:
        await check_buffer(at, actor.endless.remote(at.gate.path))


async def method_run_timeout(at: Place) -> None:
    async with Timed.remote() as actor:
        with pytest.raises(errors.TaskTimeoutError):
            await actor.coroutine.remote(at.gate.path, "a")


def probes_of(kind: str, remote: Any = None) -> dict[str, Probe]:
    """Return the probes of a kind by option; common ones get what they are to probe."""
    return {
        name.removeprefix(f"{kind}_"): partial(probe, remote) if remote else probe
        for name, probe in globals().items()
        if name.startswith(f"{kind}_")
    }


KINDS: Final[dict[str, dict[str, Probe]]] = {
    "task": {
        **probes_of("common", tasks.where),
        **probes_of("task"),
        **{
            option: partial(time_limit, option) for option in ("timeout", "run_timeout")
        },
    },
    "actor": {**probes_of("common", Actor), **probes_of("actor")},
    "method": {**probes_of("method"), "concurrency_group": actor_concurrency_groups},
}
CASES = [(kind, option) for kind, probes in KINDS.items() for option in probes]

REFUSED: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ray": {
        "task": {
            "gpu_where": {"memory": "4GiB"},
            "gpu_memory": "4GiB",
            "gpu_strategy": "spread",
            "retry_oom": "exclusive",
            "any_of": [{"num_gpus": 1}, {"num_cpus": 1}],
            "run_timeout": 0.1,
            "stop_grace": 1,
            "priority": 1,
            "lifetime": "detached",
        },
        "actor": {
            "gpu_where": {"memory": "4GiB"},
            "gpu_memory": "4GiB",
            "gpu_strategy": "spread",
            "priority": 1,
            "evict_after": 1,
        },
        "method": {"run_timeout": 0.2},
    },
    "inline": {
        "actor": {
            "max_concurrency": 2,
            "concurrency_groups": {"io": 2},
        },
        "method": {"concurrency_group": "io"},
    },
}
"""By engine and kind: the options that are refused, and a value."""

NOTHING_TO_DO: Final[dict[str, dict[str, set[str]]]] = {
    "inline": {
        "task": {
            *("max_calls", "priority", "retry_oom"),
            *("gpu_strategy", "cancel_grace", "stop_grace"),
        },
        "actor": {"priority", "max_task_retries", "gpu_strategy", "evict_after"},
    },
}
"""By engine and kind: options without an effect in one process (docs/testing.md)."""


@pytest.mark.parametrize(("kind", "option"), CASES)
async def test_an_option_is_honoured_or_refused_in_words(
    address: str,
    kind: str,
    option: str,
    gate: Gate,
    tmp_path: Path,
) -> None:
    refused = REFUSED.get(address, {}).get(kind, {})
    if option in NOTHING_TO_DO.get(address, {}).get(kind, ()):
        assert f"`{option}`" in Path("docs/testing.md").read_text()
        return
    more = {} if address == "ray" else {"gpu_memory": "8GiB"}
    if option == "cancel_grace":
        more["cancel_grace"] = 600
    async with aiogpu.init(address=address, **NODE, **more):
        if option not in refused:
            await KINDS[kind][option](Place(address, gate, tmp_path))
            return
        given = {option: refused[option], "num_gpus": 0.5}
        remotes = {"task": tasks.add, "actor": Actor}
        if kind == "method":
            remotes[kind] = {"concurrency_group": Grouped}.get(option, Timed)
            given = {}
        with pytest.raises(errors.AiogpuError, match=option):
            remotes[kind].options(**given).remote(*[1] * (kind == "task"))


def test_each_option_has_a_probe() -> None:
    assert {kind: set(KINDS[kind]) for kind in KINDS} == {
        "task": set(TaskOptions.taken_by("task")),
        "actor": set(TaskOptions.taken_by("actor")),
        "method": set(TaskOptions.taken_by("method")),
    }


# Options of `init`


@pytest.mark.own_node
async def test_a_node_has_a_dashboard_or_refuses_it_in_words(address: str) -> None:
    pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")
    if address in ("ray", "inline"):
        with pytest.raises(errors.OptionError, match="dashboard"):
            await aiogpu.init(address=address, dashboard=True)
        return
    async with aiogpu.init(address=address, **NODE, dashboard=True) as node:
        assert node.dashboard_url.startswith("http://127.0.0.1:")
    async with aiogpu.init(address=address, **NODE) as node:
        assert node.dashboard_url == ""


# The largest options


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("engine", ["local", "joined", "inline"])
async def test_every_engine_takes_the_largest_options(
    engine: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        if engine == "joined":
            here = await stack.enter_async_context(node_here(tmp_path))
            await stack.enter_async_context(here.join())
        else:
            await stack.enter_async_context(aiogpu.init(address=engine, num_cpus=2))
        assert await option_tasks.give.remote(1) == 1
        assert [number async for number in option_tasks.count.remote(3)] == [0, 1, 2]
        assert await asyncio.gather(*option_tasks.many.remote()) == list(range(1000))
        ready, _ = await aiogpu.wait(
            [option_tasks.give.remote(2)], timeout=option_tasks.TIME
        )
        assert await ready[0] == 2
        with pytest.raises(
            errors.OptionError, match=f"timeout=1e.300 .* {option_tasks.TIME:_}"
        ):
            aiogpu.wait(ready, timeout=1e300)
        assert await option_tasks.give_below.remote(7) == [7, 0, 1, 2]
        async with (
            option_tasks.Patient.remote() as patient,
            option_tasks.Interleaved.remote() as other,
        ):
            assert await asyncio.gather(
                patient.give.remote(1), other.give.remote(2)
            ) == [1, 2]
            assert [number async for number in patient.count.remote(3)] == [0, 1, 2]
