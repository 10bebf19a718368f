"""Actors: one process for life, calls in order, errors as the methods raise them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import actor_classes as classes
from tests.contract import handed_on, tasks
from tests.contract.actor_classes import Async, Broken, Counter, Methods, Slow, Threads
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until, until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]
with_threads = pytest.param(Threads, marks=pytest.mark.needs("threads"))


async def test_an_actor_keeps_its_state_and_its_order() -> None:
    """"""
    counter = Counter.remote(5)
    assert await counter is counter
    assert await counter.add.remote() == 6
    assert await counter.add.remote(k=3) == 9
    # More calls than are sent ahead, in one turn of the loop and in several.
    handles = [counter.add.remote() for _ in range(400)]
    await handles[0]
    handles += [counter.add.remote() for _ in range(400)]
    assert await asyncio.gather(*handles) == list(range(10, 810))
    assert await Counter.remote().add.remote() == 1
    assert repr(counter) == "<ActorHandle Counter>"
    assert repr(counter.add) == "<RemoteMethod Counter.add>"


@pytest.mark.needs("processes")
async def test_each_actor_has_a_process_of_its_own() -> None:
    actors = [Counter.remote(), Counter.remote()]
    pids = await asyncio.gather(*(actor.pid.remote() for actor in actors))
    assert len({*pids, os.getpid()}) == 3


@pytest.mark.needs("early order")
async def test_each_caller_has_its_order() -> None:

    async def call(counter: Any, name: int) -> None:
        for step in range(30):
            handle = counter.note.remote((name, step))
            if step % 3:
                await handle

    for actor in (Counter.remote(), Async.remote()):
        await asyncio.gather(*(call(actor, name) for name in range(5)))
        notes = await actor.notes.remote()
        for name in range(5):
            assert [step for caller, step in notes if caller == name] == [*range(30)]


@pytest.mark.parametrize("kind", [Counter, with_threads, Async])
async def test_errors_of_methods_reach_the_caller(kind: Any, address: str) -> None:
    """"""
    actor = kind.remote()
    error = await raises(KeyError, actor.fail.remote(KeyError, "boom"), match="boom")
    assert "raise kind(*args)" in str(error.__cause__)
    assert "aiogpu/worker" not in str(error.__cause__)
    for never in (SystemExit, KeyboardInterrupt, asyncio.CancelledError):
        call = actor.fail.remote(never)
        await raises(errors.TaskError, call, match=never.__name__)
    call = actor.unpicklable.remote()
    await raises(errors.SerializationError, call, match=r"result\['lock'\]")
    with pytest.raises(errors.SerializationError, match=r"args\[0\]"):
        actor.note.remote(threading.Lock())
    call = actor.note.remote(tasks.UnreadableResult("1/0"))
    await raises(errors.DeserializationError, call, match="division")
    if kind is Async:
        calls = [actor.fail_later.remote(asyncio.CancelledError)]
        if address != "inline":  # there it is as if the loop ended
            calls.append(actor.cancel_itself.remote(False))
        await raises(errors.TaskError, *calls, match="CancelledError")
        assert await actor.cancel_itself.remote(True) == "swallowed"
        assert await actor.give_up.remote() == "given up"
    assert await actor.add.remote() == 1, "it lives on"


async def test_calls_with_wrong_arguments_are_refused_at_once() -> None:
    counter = Counter.remote()
    for call, message in (
        (lambda: counter.add.remote(1, 2), r"Counter\.add\(k.*too many positional"),
        (lambda: counter.add.remote(nope=1), r"unexpected keyword argument 'nope'"),
        (lambda: counter.fail.remote(), r"Counter\.fail.*missing.*'kind'"),
        (lambda: counter.add(1), r"await actor\.add\.remote"),
        (lambda: Counter.remote(1, 2), r"Counter.*too many positional"),
        (lambda: Counter(1), r"Counter\.remote\(\.\.\.\)"),
    ):
        with pytest.raises(errors.MisuseError, match=message):
            call()
    for name, message in (
        ("addd", "Did you mean add"),
        ("zzzz", r"no method zzzz.* Its methods are: add"),
        ("_hidden", "_hidden of Counter is private"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(counter, name)
    assert await counter.notes.remote() == []


async def test_a_class_is_made_remote_with_and_without_options(address: str) -> None:
    plain = aiogpu.remote(classes.Plain)
    optional = aiogpu.remote(num_cpus=0)(classes.Plain)
    threaded = optional.options(max_concurrency=3)

    @aiogpu.remote
    class Derived(Counter):  # type: ignore[misc, valid-type]
        def twice(self) -> int:
            return int(self.add(2))

    assert Derived.__wrapped__.__mro__[2] is classes.Plain
    # An inline node has no threads.
    for made in (plain, optional, *[threaded] * (address == "local")):
        assert await made.remote(1).add.remote() == 2
    derived = Derived.remote(1)
    assert await derived.twice.remote() == 3
    assert await derived.add.remote() == 4
    assert repr(threaded) == "<RemoteClass tests.contract.actor_classes.Plain>"


async def test_methods_need_not_be_plain_functions() -> None:
    odd: Any = aiogpu.remote(classes.Odd).remote("a", "b")
    assert await odd.static.remote(1, b=2) == 3
    assert await odd.of_class.remote("you") == "hello you"
    assert await odd.all_by_position.remote(1, 2) == 3
    assert (await odd.cached.remote(2))[0] == 2
    assert await odd.greet.remote("you", times=2) == "hello you!!"
    for method in ("static", "of_class"):
        with pytest.raises(errors.MisuseError, match=method):
            getattr(odd, method).remote()
    with pytest.raises(AttributeError, match="no method not_a_method"):
        odd.not_a_method.remote()
    table: Any = classes.Table.remote(a=1)
    await table.update.remote(b=2)
    assert sorted(await table.copy.remote()) == ["a", "b"]


async def test_coroutine_methods_interleave(gate: Gate) -> None:
    actor = Async.remote()
    waiting = [actor.wait.remote(gate.path, name) for name in "abc"]
    await gate.entered(*"abc")
    assert await actor.later.remote() == 1
    assert await actor.add.remote() == 2, "plain methods run on the loop as well"
    assert await actor.hidden_coroutine.remote() == 12
    gate.release(*"cab")
    assert await asyncio.gather(*waiting) == [*"abc"]
    serial = await Async.options(max_concurrency=1).remote()
    calls = [serial.wait.remote(gate.path, name) for name in "xy"]
    await gate.entered("x")
    assert "y" not in gate.inside
    gate.release("x")
    await gate.let_pass("y")
    assert await asyncio.gather(*calls) == ["x", "y"]


@pytest.mark.needs("threads")
async def test_plain_methods_run_in_threads(gate: Gate) -> None:
    actor = Threads.remote()
    handles = [actor.gated.remote(gate.path, name) for name in "abc"]
    await gate.entered("a", "b")
    assert gate.inside == {"a", "b"}
    gate.release("b")
    await gate.entered("c")
    assert gate.pids["c"] == gate.pids["a"]
    gate.release("a", "c")
    assert await asyncio.gather(*handles) == [*"abc"]


@pytest.mark.needs("threads")
async def test_a_slow_group_does_not_delay_the_others(gate: Gate) -> None:
    actor = classes.Groups.remote()
    names = [f"{group}{number}" for group in ("slow", "io") for number in range(3)]
    slow = [actor.slow.remote(gate.path, name) for name in names[:3]]
    io = [actor.io.remote(gate.path, name) for name in names[3:]]
    await gate.entered("slow0", "io0", "io1")
    assert await actor.add.remote() == 1, "the default group has a thread of its own"
    assert gate.inside == {"slow0", "io0", "io1"}
    for name in names:
        await gate.let_pass(name)
    assert await asyncio.gather(*slow, *io) == names
    with pytest.raises(errors.OptionError, match=r"Groups\.io is in .*'io'.*'slow'|io"):
        classes.Groups.options(concurrency_groups={"other": 1}).remote()


MODEL = """
import os, aiogpu
SEEN = os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('MY_OWN')
@aiogpu.remote(num_gpus=1, runtime_env={'env_vars': {'MY_OWN': 'x'}})
class Model:
    def seen(self):
        return SEEN
"""


@pytest.mark.needs("modules")
@pytest.mark.own_node
async def test_gpus_are_held_for_life_and_known_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """"""
    (tmp_path / "reads_at_import.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    import reads_at_import

    async with aiogpu.init(num_cpus=1, num_gpus=3):
        shares = [Counter.options(num_gpus=0.5).remote() for _ in range(3)]
        places = [await share.where.remote() for share in shares]
        assert [place["ids"] for place in places] == [[0], [0], [1]]
        assert [place["visible"] for place in places] == ["0", "0", "1"]
        assert places[0]["resources"]["GPU"] == 0.5
        model = reads_at_import.Model.remote()
        assert await model.seen.remote() == ("2", "x")
        none = await Counter.remote().where.remote()
        assert (none["ids"], none["visible"]) == ([], "")
        assert (await aiogpu.available_resources())["GPU"] == 0.5
        del shares, model
        await until_free(GPU=3)


@pytest.mark.needs("blocking", "placing CPUs")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_an_actor_needs_a_cpu_only_to_be_placed(gate: Gate) -> None:
    busy = tasks.gated.remote(gate.path, "busy")
    await gate.entered("busy")
    actor = Counter.options(num_gpus=1).remote()
    call = actor.add.remote()
    why = await call.why()
    assert why.state == "waiting"
    assert [reason.resource for reason in why.reasons] == ["CPU"]
    gate.release("busy")
    assert await call == 1
    assert (await aiogpu.available_resources())["CPU"] == 1.0
    holder = await Counter.options(num_cpus=1).remote()
    assert (await aiogpu.available_resources())["CPU"] == 0.0
    aiogpu.kill(holder)
    assert await tasks.add.remote(1) == 2
    assert await busy == "busy"
    none = await Counter.options(num_cpus=0).remote()
    assert (await none.where.remote())["resources"].get("CPU", 0.0) == 0.0


@pytest.mark.needs("waiting for resources")
@pytest.mark.needs("holders")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_waiting_actors_say_why() -> None:
    holder = Counter.options(num_gpus=1, name="holder").remote()
    await holder
    waits = Counter.options(num_gpus=0.5, name="waits").remote()
    call = waits.add.remote(2)
    why = await call.why()
    assert (why.state, why.name) == ("waiting", "Counter.add")
    assert why.is_held_endlessly
    assert "held by Counter 'holder'" in str(why)
    status = await aiogpu.status()
    states = {task.name: (task.state, task.reason) for task in status.tasks}
    assert states["Counter 'holder'"] == ("running", None)
    state, reason = states["Counter 'waits'"]
    assert state == "waiting"
    assert "GPU" in (reason or "")
    assert "Counter 'waits'" in str(status)
    calls = [call, *(waits.add.remote() for _ in range(3))]
    calls.pop(1).cancel()
    aiogpu.kill(holder)
    assert await asyncio.gather(*calls) == [2, 3, 4], "in the order of sending"
    assert (await calls[0].why()).state == "ended"


@pytest.mark.own_node
async def test_handles_of_a_closed_node_are_refused() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote()
        method = counter.add
    for call in (counter.add.remote, method.remote):
        with pytest.raises(errors.NodeClosedError, match="shut down"):
            call()
    await raises(errors.NodeClosedError, counter)
    aiogpu.kill(counter)
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(errors.NodeClosedError):
            counter.add.remote()
        assert await Counter.remote().add.remote() == 1


@pytest.mark.needs("processes")
async def test_output_of_actors_carries_their_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for actor, name in (
        (Counter.options(name="bob").remote(), "Counter 'bob'"),
        (Async.remote(), "Async"),
        (Threads.remote(), "Threads"),
    ):
        pid = await actor.pid.remote()
        await actor.say_all.remote(["one", "two"])
        prefix = f"({name} pid={pid})"
        assert capsys.readouterr().out == f"{prefix} one\n{prefix} two\n"


@pytest.mark.parametrize("kind", [classes.Knowing, classes.KnowingSoftly])
@pytest.mark.aiogpu(num_cpus=3, num_gpus=2)
async def test_an_actor_knows_its_id_and_its_resources(kind: Any) -> None:
    """"""
    first = await kind.options(num_gpus=0.5).remote()
    other = await kind.options(num_cpus=2, num_gpus=0).remote()
    before, now = await first.facts.remote()
    assert before == now
    assert isinstance(now[0], int)
    assert now[1] == {"GPU": 0.5}, "the CPU of its placing is given back"
    _, others = await other.facts.remote()
    assert others[0] not in (None, now[0])
    assert others[1] == {"CPU": 2.0}
    assert await classes.facts_of_a_task.remote() == (None, {"CPU": 1.0})
    assert aiogpu.get_runtime_context().actor_id is None


@pytest.mark.aiogpu(num_cpus=2)
async def test_an_argument_may_be_called_self() -> None:
    assert await classes.named.remote(1, self=2) == {"one": 1, "self": 2}
    assert [item async for item in classes.each_named.remote(self=3)] == [3]
    actor = classes.Named.remote(self=4)
    assert await actor.named.remote(args=5) == {"self": 4, "args": 5}
    assert await actor.named.remote(self=6) == {"self": 6}


async def test_groups_of_coroutines_have_limits(gate: Gate) -> None:
    groups = await classes.SoftGroups.remote()
    waiting = [groups.wait.remote(gate.path, name) for name in "ab"]
    await gate.entered("a")
    assert "b" not in gate.pids
    await groups.let_pass.remote()
    await asyncio.gather(*waiting)
    await gate.entered("b")


@pytest.mark.own_node
async def test_an_actor_that_can_never_be_placed_is_refused_at_once() -> None:
    """Where the node is still to be opened, when it is."""
    too_large = Counter.options(resources={"license": 1}).remote()
    calls = too_large.add.remote(), too_large.add.remote()
    await raises(errors.InfeasibleError, too_large, *calls, match="license")
    aiogpu.kill(too_large)
    await raises(errors.InfeasibleError, lambda: too_large.add.remote())
    await aiogpu.shutdown()
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with pytest.raises(errors.InfeasibleError, match=r"'taken\?' asks .*GPU"):
            Counter.options(num_gpus=2, name="taken?").remote()
        await raises(errors.ActorNameError, lambda: aiogpu.get_actor("taken?"))


@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_a_constructor_that_fails_is_not_retried(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    once = Broken.options(num_gpus=1, max_restarts=-1)
    broken = once.remote(OSError, str(runs))
    call = broken.add.remote()
    for attempt in (broken, broken, call, broken.add.remote()):
        error = await raises(errors.ActorDiedError, attempt, match="OSError: no model")
        assert isinstance(error.__cause__, OSError)
        assert not error.is_restarting
        assert error.actor == "Broken"
    with pytest.raises(errors.ActorDiedError):
        async with broken:
            raise AssertionError("the block must not be entered")
    assert await tasks.where.options(num_gpus=1).remote(), "its GPU is free"
    broken = Broken.remote(SystemExit)
    error = await raises(errors.ActorDiedError, broken, match="raised SystemExit")
    assert isinstance(error.__cause__, errors.TaskError)
    assert runs.read_text() == "x"


@pytest.mark.needs("blocking")
async def test_a_callers_timeout_leaves_a_slow_constructor(gate: Gate) -> None:
    for name in ("returns", "never returns"):
        slow = Slow.remote(gate.path, "constructor")
        call = slow.add.remote()
        await gate.entered("constructor")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await slow
        assert not call.done()
        if name == "returns":
            gate.release("constructor")
            assert await call == 1
            gate.forget("constructor")
        else:
            aiogpu.kill(slow)
            await raises(errors.ActorDiedError, slow, call, match="killed")


@pytest.mark.own_node
async def test_calls_before_the_node_is_open_run_in_order() -> None:
    counter = Counter.remote()
    handles = [counter.add.remote() for _ in range(5)]
    assert (await handles[0].why()).state == "opening"
    handles[2].cancel()
    assert await counter is counter
    await raises(asyncio.CancelledError, handles.pop(2))
    assert await asyncio.gather(*handles) == [1, 2, 3, 4]
    await aiogpu.shutdown()


@pytest.mark.own_node
async def test_a_remote_class_has_the_attributes_of_its_class() -> None:
    made: Any = aiogpu.remote(classes.Leaving)
    assert (made.limit, made.doubled(3), made.label()) == (7, 6, "Leaving")
    for name, message in (("add", r"Leaving.remote\(\.\.\.\)"), ("missing", "missing")):
        with pytest.raises(AttributeError, match=message):
            getattr(made, name)


@pytest.mark.needs("threads")
async def test_a_call_runs_in_the_group_that_it_names(gate: Gate) -> None:
    actor = await classes.Grouped.remote()
    staying = actor.stay.options(concurrency_group="io").remote(gate.path, "a")
    await gate.entered("a")
    late = actor.read.remote()  # its group has one thread, which is busy
    assert await actor.pair.remote() == (1, 2)
    assert await actor.read.options(concurrency_group="compute").remote() == "read"
    assert not late.done()
    gate.release("a")
    assert await asyncio.gather(staying, late) == ["a", "read"]
    counting = actor.each.options(concurrency_group="compute").remote(3)
    assert [number async for number in counting] == [0, 1, 2]

    @aiogpu.remote
    def inside(actor: Any) -> str:
        call = actor.read.options(concurrency_group="compute")
        with pytest.raises(aiogpu.OptionError, match="its class are: io, compute"):
            actor.read.options(concurrency_group="other")
        return str(aiogpu.get(call.remote()))

    assert await inside.remote(actor) == "read"


async def test_a_call_has_a_number_of_results_of_its_own() -> None:
    actor = await Methods.remote()
    pair = actor.pair.options(num_returns=2).remote()
    assert await asyncio.gather(*pair) == [1, 2]
    assert await actor.pair.remote() == (1, 2)
    assert await actor.two.options(num_returns=1).remote() == (1, 2)
    assert await asyncio.gather(*actor.two.remote()) == [1, 2]
    assert "Methods.pair" in repr(actor.pair.options(num_returns=2))
    for method, options, message in (
        (actor.pair, {"concurrency_group": "io"}, "groups of its class are: none"),
        (actor.pair, {"max_buffered": 3}, "@aiogpu.method"),
        (actor.pair, {"num_cpus": 3}, "not an option"),
        (actor.pair, {"num_returns": 0}, "num_returns=0"),
        (actor.many, {"num_returns": 2}, "generator"),
    ):
        with pytest.raises(errors.OptionError, match=message):
            method.options(**options)


@pytest.mark.needs("call retries")
@pytest.mark.parametrize("kind", [Async, with_threads])
@pytest.mark.parametrize("retries", [0, -1])
@pytest.mark.aiogpu(num_cpus=1, log_to_driver=False)
async def test_a_death_hits_all_calls_that_run(
    kind: Any, retries: int, gate: Gate
) -> None:
    options = {"max_restarts": -1, "max_task_retries": retries, "max_concurrency": 2}
    actor = await kind.options(**options).remote()
    wait = actor.wait if kind is Async else actor.gated
    running = [wait.remote(gate.path, name) for name in "ab"]
    waiting = actor.add.remote()
    await gate.entered("a", "b")
    gate.forget("a", "b")
    aiogpu.kill(actor, no_restart=False)
    if retries:
        await gate.let_pass("a", "b")
        assert await asyncio.gather(*running) == ["a", "b"]
    for call in [] if retries else running:
        error = await raises(errors.ActorDiedError, call, match="killed")
        assert error.is_restarting
    assert await waiting == 1


# Pools


async def pids_of(pool: Any, calls: int) -> set[int]:
    return set(await asyncio.gather(*(pool.pid.remote() for _ in range(calls))))


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_a_pool_spreads_its_calls_and_ends_with_its_block() -> None:
    async with aiogpu.ActorPool(Counter.options(num_gpus=0.5), 2) as pool:
        pids = await pids_of(pool, 4)
        assert len(pids) == 2
        counts = [count async for count in pool.add.map([1] * 10)]
        assert sorted(counts) == sorted([*range(1, 6), *range(1, 6)])
        assert (await aiogpu.available_resources())["GPU"] == 0
    await until(lambda: all(not os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=2)
async def test_a_pool_replaces_an_actor_that_dies() -> None:
    async with aiogpu.ActorPool(Counter, 2) as pool:
        pids = await pids_of(pool, 2)
        await raises(errors.ActorDiedError, pool.exit.remote(3))
        async with asyncio.timeout(30):
            while len(now := await pids_of(pool, 2)) < 2 or now == pids:
                await asyncio.sleep(0)
        assert len(now & pids) == 1


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_a_pool_larger_than_its_node_is_refused(size: int) -> None:
    """Each of its actors alone could live, and some of them do."""
    half = Counter.options(num_gpus=0.5)
    refusal = rf"pool of {size} Counter, each with .*GPU.*0.5.* room for 2 at once"
    pool = aiogpu.ActorPool(half, size)
    await raises(errors.InfeasibleError, pool, match=refusal)
    await raises(errors.MisuseError, pool, match="pool of Counter is closed")
    with pytest.raises(errors.InfeasibleError, match=refusal):
        async with aiogpu.ActorPool(half, min_size=size, max_size=9):
            raise AssertionError("the block has begun")
    async with aiogpu.ActorPool(half, 2) as pool:
        counts = [count async for count in pool.add.map([1] * 4)]
        assert sorted(counts) == [1, 1, 2, 2]


@pytest.mark.own_node
async def test_a_pool_is_closed_with_its_node() -> None:
    """A node of another process answers while it ends what its program leaves."""
    async with aiogpu.init(num_cpus=2):
        pool = await aiogpu.ActorPool(Counter, 2)
        assert await pool.add.remote() == 1
    assert "closed, 0 actors, 0 ready" in repr(pool)
    await raises(errors.MisuseError, pool, match="pool of Counter is closed")


@pytest.mark.aiogpu(num_cpus=2)
async def test_a_pool_of_given_actors_does_not_end_them() -> None:
    actors = [await Async.remote() for _ in range(2)]
    async with aiogpu.ActorPool(actors) as pool:
        assert [*pool] == actors
        assert await pool.add.remote() == 1
    assert await asyncio.gather(*(actor.notes.remote() for actor in actors))
    with pytest.raises(errors.MisuseError, match="is closed"):
        pool.add.remote()
    with pytest.raises(errors.OptionError, match="leave out size, min_size"):
        aiogpu.ActorPool(actors, 2)
    with pytest.raises(errors.MisuseError, match="from an empty list"):
        aiogpu.ActorPool([]).add.remote()


@pytest.mark.aiogpu(num_cpus=2)
async def test_a_pool_says_that_its_actors_have_died() -> None:
    actor = await Async.remote()
    pool: Any = await aiogpu.ActorPool([actor])
    waiting = [pool.wait_for_ever.remote() for _ in range(2)]
    aiogpu.kill(actor)
    await raises(errors.ActorDiedError, *waiting)
    await until(lambda: not len(pool))
    with pytest.raises(errors.ActorDiedError, match=r"of this pool .* have died"):
        pool.add.remote()


@pytest.mark.aiogpu(num_cpus=2)
async def test_a_pool_hides_no_method_of_its_actors() -> None:
    async with aiogpu.ActorPool(classes.Line, 1) as pool:
        line: Any = pool
        assert (await line.push.remote(3), await line.map.remote()) == (3, "mapped")


@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_a_task_makes_a_pool() -> None:
    assert sorted(await handed_on.make_pool.remote(2)) == [1, 1, 2, 2]
    call = handed_on.make_pool.remote(3)
    await raises(errors.InfeasibleError, call, match="room for 2 at once")
    await until_free(GPU=1)


async def test_a_call_finds_the_method_that_an_attribute_hides() -> None:
    class Hiding:
        def __init__(self) -> None:
            self.value: Any = 5
            self.called = lambda: "the attribute"

        @aiogpu.method(run_timeout=60)
        def value(self) -> int:  # type: ignore[no-redef]
            return self.value + 1  # type: ignore[operator]

        def called(self) -> None: ...  # type: ignore[no-redef]

    hiding: Any = aiogpu.remote(Hiding).remote()
    assert await hiding.value.remote() == 6
    assert await hiding.called.remote() == "the attribute"


async def test_a_failed_coroutine_call_keeps_no_argument() -> None:
    """Not even until the garbage collector finds it: an argument may be large."""

    class Failing:
        async def fail(self, argument: set[int]) -> None:
            self.argument = weakref.ref(argument)
            await asyncio.sleep(0)
            raise ValueError("no")

        async def is_free(self) -> bool:
            return self.argument() is None

        def collect(self, is_on: bool) -> None:
            (gc.enable if is_on else gc.disable)()

    failing: Any = aiogpu.remote(Failing).remote()
    await failing.collect.remote(is_on=False)
    try:
        await raises(ValueError, failing.fail.remote({1}))
        assert await failing.is_free.remote()
    finally:
        await failing.collect.remote(is_on=True)
