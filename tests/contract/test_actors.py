"""What actors do: one process for life, calls in order, errors as they are."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import handed_on, tasks
from tests.contract.actor_classes import (
    Async,
    Broken,
    Counter,
    Grouped,
    Groups,
    Knowing,
    KnowingSoftly,
    Leaving,
    Line,
    Methods,
    Named,
    Odd,
    Plain,
    Slow,
    SoftGroups,
    Table,
    Threads,
    each_named,
    facts_of_a_task,
    named,
)
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


async def test_an_actor_keeps_its_state_and_its_order() -> None:
    """[B29] [B31]"""
    async with aiogpu.init(num_cpus=1):
        counter = Counter.remote(5)
        assert await counter is counter
        assert await counter.add.remote() == 6
        assert await counter.add.remote(k=3) == 9
        # More than are sent ahead, in one turn of the loop and in several.
        handles = [counter.add.remote() for _ in range(400)]
        await handles[0]
        handles += [counter.add.remote() for _ in range(400)]
        assert await asyncio.gather(*handles) == list(range(10, 810))
        assert await Counter.remote().add.remote() == 1
        assert repr(counter) == "<ActorHandle Counter>"
        assert repr(counter.add) == "<RemoteMethod Counter.add>"


@pytest.mark.needs("processes")
async def test_each_actor_has_a_process_of_its_own() -> None:
    """[B29]"""
    async with aiogpu.init(num_cpus=1):
        actors = [Counter.remote(), Counter.remote()]
        pids = await asyncio.gather(*(one.pid.remote() for one in actors))
        assert len({*pids, os.getpid()}) == 3


async def test_each_caller_has_its_order() -> None:
    """[B31]"""

    async def caller(counter: Any, name: int) -> None:
        for step in range(30):
            if step % 3:
                await counter.note.remote((name, step))
            else:
                counter.note.remote((name, step))

    async with aiogpu.init(num_cpus=1):
        for actor in (Counter.remote(), Async.remote()):
            await asyncio.gather(*(caller(actor, name) for name in range(5)))
            notes = await actor.notes.remote()
            for name in range(5):
                assert [step for who, step in notes if who == name] == [*range(30)]


@pytest.mark.parametrize(
    "kind", [Counter, pytest.param(Threads, marks=pytest.mark.needs("threads")), Async]
)
async def test_what_methods_raise(kind: Any, address: str) -> None:
    """[B37] [B39]"""
    async with aiogpu.init(num_cpus=1):
        actor = kind.remote()
        with pytest.raises(KeyError, match="boom") as caught:
            await actor.fail.remote(KeyError, "boom")
        assert "raise kind(*args)" in str(caught.value.__cause__)
        assert "aiogpu/worker" not in str(caught.value.__cause__)
        for never in (SystemExit, KeyboardInterrupt, asyncio.CancelledError):
            with pytest.raises(aiogpu.TaskError, match=never.__name__):
                await actor.fail.remote(never)
        with pytest.raises(aiogpu.errors.SerializationError, match=r"result\['lock'\]"):
            await actor.unpicklable.remote()
        with pytest.raises(aiogpu.errors.SerializationError, match=r"args\[0\]"):
            actor.note.remote(threading.Lock())
        with pytest.raises(aiogpu.errors.DeserializationError, match="division"):
            await actor.note.remote(tasks.UnreadableResult("1/0"))
        if kind is Async:
            calls = [actor.fail_later.remote(asyncio.CancelledError)]
            if address != "inline":  # there it is as if the loop ended
                calls.append(actor.cancel_itself.remote(False))
            for call in calls:
                with pytest.raises(aiogpu.TaskError, match="CancelledError"):
                    await call
            assert await actor.cancel_itself.remote(True) == "swallowed"
            assert await actor.give_up.remote() == "given up"
        assert await actor.add.remote() == 1, "it lives on"


async def test_calls_that_cannot_be_are_refused_before_they_are_sent() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = Counter.remote()
        for call, wrong in (
            (lambda: counter.add.remote(1, 2), r"Counter\.add\(k.*too many positional"),
            (lambda: counter.add.remote(nope=1), r"unexpected keyword argument 'nope'"),
            (lambda: counter.fail.remote(), r"Counter\.fail.*missing.*'kind'"),
            (lambda: counter.add(1), r"await actor\.add\.remote"),
            (lambda: Counter.remote(1, 2), r"Counter.*too many positional"),
            (lambda: Counter(1), r"Counter\.remote\(\.\.\.\)"),
        ):
            with pytest.raises(aiogpu.errors.MisuseError, match=wrong):
                call()
        with pytest.raises(AttributeError, match="Did you mean add"):
            counter.addd.remote()
        with pytest.raises(
            AttributeError, match=r"no method zzzz.* Its methods are: add"
        ):
            counter.zzzz  # noqa: B018
        with pytest.raises(AttributeError, match="_hidden of Counter is private"):
            counter._hidden.remote()
        assert await counter.notes.remote() == []


async def test_the_ways_to_make_a_class_remote(address: str) -> None:
    """[B29]"""
    named = aiogpu.remote(Plain)
    optional = aiogpu.remote(num_cpus=0)(Plain)
    other = optional.options(max_concurrency=3)

    @aiogpu.remote
    class Derived(Counter):  # type: ignore[misc, valid-type]
        def twice(self) -> int:
            return int(self.add(2))

    assert Derived.__wrapped__.__mro__[2] is Plain
    async with aiogpu.init(num_cpus=1):
        # Threads are what an inline node lacks.
        for made in (named, optional, *[other] * (address == "local")):
            assert await made.remote(1).add.remote() == 2
        derived = Derived.remote(1)
        assert await derived.twice.remote() == 3
        assert await derived.add.remote() == 4
    assert repr(other) == "<RemoteClass tests.contract.actor_classes.Plain>"


async def test_methods_that_are_no_plain_functions() -> None:
    async with aiogpu.init(num_cpus=1):
        odd: Any = aiogpu.remote(Odd).remote("a", "b")
        assert await odd.static.remote(1, b=2) == 3
        assert await odd.of_class.remote("you") == "hello you"
        assert await odd.all_by_position.remote(1, 2) == 3
        assert (await odd.cached.remote(2))[0] == 2
        assert await odd.greet.remote("you", times=2) == "hello you!!"
        with pytest.raises(aiogpu.errors.MisuseError, match="static"):
            odd.static.remote()
        with pytest.raises(aiogpu.errors.MisuseError, match="of_class"):
            odd.of_class.remote()
        with pytest.raises(AttributeError, match="no method not_a_method"):
            odd.not_a_method.remote()
        table: Any = Table.remote(a=1)
        await table.update.remote(b=2)
        assert sorted(await table.copy.remote()) == ["a", "b"]


async def test_coroutine_methods_interleave(gate: Gate) -> None:
    """[B31]"""
    async with aiogpu.init(num_cpus=1):
        actor = Async.remote()
        waiting = [actor.wait.remote(gate.path, name) for name in "abc"]
        await gate.entered(*"abc")
        assert await actor.later.remote() == 1
        assert await actor.add.remote() == 2, "plain methods run on the loop as well"
        assert await actor.hidden_coroutine.remote() == 12
        for name in "cab":
            gate.release(name)
        assert await asyncio.gather(*waiting) == [*"abc"]
        one = Async.options(max_concurrency=1).remote()
        first, second = (one.wait.remote(gate.path, name) for name in ("x", "y"))
        await gate.entered("x")
        assert "y" not in gate.inside
        gate.release("x")
        await gate.entered("y")
        gate.release("y")
        assert await asyncio.gather(first, second) == ["x", "y"]


@pytest.mark.needs("threads")
async def test_plain_methods_in_threads(gate: Gate) -> None:
    """[B31]"""
    async with aiogpu.init(num_cpus=1):
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
async def test_a_slow_group_holds_up_no_other(gate: Gate) -> None:
    """[B31]"""
    async with aiogpu.init(num_cpus=1):
        actor = Groups.remote()
        slow = [actor.slow.remote(gate.path, f"slow{n}") for n in range(3)]
        io = [actor.io.remote(gate.path, f"io{n}") for n in range(3)]
        await gate.entered("slow0", "io0", "io1")
        assert await actor.add.remote() == 1, "the default group has one of its own"
        assert gate.inside == {"slow0", "io0", "io1"}
        for name in ("slow0", "slow1", "slow2", "io0", "io1", "io2"):
            await gate.entered(name)
            gate.release(name)
        assert await asyncio.gather(*slow) == ["slow0", "slow1", "slow2"]
        assert await asyncio.gather(*io) == ["io0", "io1", "io2"]
    with pytest.raises(aiogpu.OptionError, match=r"Groups\.io is in .*'io'.*'slow'|io"):
        Groups.options(concurrency_groups={"other": 1}).remote()


@pytest.mark.needs("modules")
async def test_gpus_are_held_for_life_and_known_before_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[B19] [B22] [B30]"""
    module = tmp_path / "reads_at_import.py"
    module.write_text(
        "import os, aiogpu\n"
        "SEEN = os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('MY_OWN')\n"
        "@aiogpu.remote(num_gpus=1, runtime_env={'env_vars': {'MY_OWN': 'x'}})\n"
        "class Model:\n"
        "    def seen(self):\n"
        "        return SEEN\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import reads_at_import

    async with aiogpu.init(num_cpus=1, num_gpus=3):
        shares = [Counter.options(num_gpus=0.5).remote() for _ in range(3)]
        places = [await one.where.remote() for one in shares]
        assert [place["ids"] for place in places] == [[0], [0], [1]]
        assert [place["visible"] for place in places] == ["0", "0", "1"]
        assert places[0]["resources"]["GPU"] == 0.5
        model = reads_at_import.Model.remote()
        assert await model.seen.remote() == ("2", "x")
        none = await Counter.remote().where.remote()
        assert (none["ids"], none["visible"]) == ([], "")
        assert (await aiogpu.available_resources())["GPU"] == 0.5
        del shares, model
        async with asyncio.timeout(20):
            while (await aiogpu.available_resources())["GPU"] < 3:
                await asyncio.sleep(0)


@pytest.mark.needs("blocking", "placing CPUs")
async def test_a_cpu_is_needed_to_be_placed_and_not_held(gate: Gate) -> None:
    """[B30]"""

    async def free() -> float:
        return (await aiogpu.available_resources())["CPU"]

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        busy = tasks.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        actor = Counter.options(num_gpus=1).remote()
        call = actor.add.remote()
        why = await call.why()
        assert why.state == "waiting"
        assert [reason.resource for reason in why.reasons] == ["CPU"]
        gate.release("busy")
        assert await call == 1
        assert await free() == 1.0
        held = await Counter.options(num_cpus=1).remote()
        assert await free() == 0.0
        aiogpu.kill(held)
        assert await tasks.add.remote(1) == 2
        assert await busy == "busy"
        none = await Counter.options(num_cpus=0).remote()
        assert (await none.where.remote())["resources"].get("CPU", 0.0) == 0.0


@pytest.mark.needs("holders")
async def test_actors_that_wait_say_why(gate: Gate) -> None:
    """[B23]"""
    async with aiogpu.init(num_cpus=1, num_gpus=1):
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
        assert reason
        assert "GPU" in reason
        assert "Counter 'waits'" in str(status)
        calls = [call, *(waits.add.remote() for _ in range(3))]
        calls.pop(1).cancel()
        aiogpu.kill(holder)
        assert await asyncio.gather(*calls) == [2, 3, 4], "in the order of sending"
        assert (await calls[0].why()).state == "ended"


async def test_handles_of_a_closed_node() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote()
        method = counter.add
    for call in (counter.add.remote, method.remote):
        with pytest.raises(aiogpu.errors.NodeClosedError, match="shut down"):
            call()
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await counter
    aiogpu.kill(counter)
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            counter.add.remote()
        assert await Counter.remote().add.remote() == 1


@pytest.mark.needs("processes")
async def test_what_actors_print_carries_their_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """[B13]"""
    async with aiogpu.init(num_cpus=1):
        for actor, name in (
            (Counter.options(name="bob").remote(), "Counter 'bob'"),
            (Async.remote(), "Async"),
            (Threads.remote(), "Threads"),
        ):
            pid = await actor.pid.remote()
            await actor.say_all.remote(["one", "two"])
            prefix = f"({name} pid={pid})"
            assert capsys.readouterr().out == f"{prefix} one\n{prefix} two\n"


@pytest.mark.parametrize("kind", [Knowing, KnowingSoftly])
async def test_an_actor_knows_its_id_and_what_it_holds(kind: Any) -> None:
    """[B20] [B30]"""
    async with aiogpu.init(num_cpus=3, num_gpus=2):
        first = await kind.options(num_gpus=0.5).remote()
        other = await kind.options(num_cpus=2, num_gpus=0).remote()
        before, now = await first.facts.remote()
        assert before == now
        assert isinstance(now[0], int)
        assert now[1] == {"GPU": 0.5}, "the CPU by which it was placed is given back"
        _, others = await other.facts.remote()
        assert others[0] not in (None, now[0])
        assert others[1] == {"CPU": 2.0}
        assert await facts_of_a_task.remote() == (None, {"CPU": 1.0})
    assert aiogpu.get_runtime_context().actor_id is None


async def test_an_argument_may_be_called_self() -> None:
    async with aiogpu.init(num_cpus=2):
        assert await named.remote(1, self=2) == {"one": 1, "self": 2}
        assert [item async for item in each_named.remote(self=3)] == [3]
        actor = Named.remote(self=4)
        assert await actor.named.remote(args=5) == {"self": 4, "args": 5}
        assert await actor.named.remote(self=6) == {"self": 6}


async def test_groups_of_coroutines_have_their_limits(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        groups = await SoftGroups.remote()
        waiting = [groups.wait.remote(gate.path, name) for name in "ab"]
        await gate.entered("a")
        assert "b" not in gate.pids
        await groups.let_pass.remote()
        await asyncio.gather(*waiting)
        await gate.entered("b")


async def test_what_can_never_be_placed_is_refused_at_once(address: str) -> None:
    """[B23] Where the node is still to be opened, when it is."""
    too_much = Counter.options(resources={"license": 1}).remote()
    call = too_much.add.remote()
    for attempt in (too_much, call, too_much.add.remote()):
        with pytest.raises(aiogpu.InfeasibleError, match="license"):
            await attempt
    aiogpu.kill(too_much)
    with pytest.raises(aiogpu.InfeasibleError):
        await too_much.add.remote()
    await aiogpu.shutdown()
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with pytest.raises(aiogpu.InfeasibleError, match=r"'taken\?' asks .*GPU"):
            Counter.options(num_gpus=2, name="taken?").remote()
        with pytest.raises(aiogpu.errors.ActorNameError):
            await aiogpu.get_actor("taken?")


async def test_a_constructor_that_fails(tmp_path: Path) -> None:
    """[B33] It is not tried again."""
    runs = tmp_path / "runs"
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        once = Broken.options(num_gpus=1, max_restarts=-1)
        broken = once.remote(OSError, str(runs))
        call = broken.add.remote()
        for attempt in (broken, broken, call, broken.add.remote()):
            with pytest.raises(aiogpu.ActorDiedError, match="OSError: no model") as it:
                await attempt
            assert isinstance(it.value.__cause__, OSError)
            assert not it.value.is_restarting
            assert it.value.actor == "Broken"
        with pytest.raises(aiogpu.ActorDiedError):
            async with broken:
                raise AssertionError("the block must not be entered")
        assert await tasks.where.options(num_gpus=1).remote(), "its GPU is free"
        with pytest.raises(aiogpu.ActorDiedError, match="raised SystemExit") as it:
            await Broken.remote(SystemExit)
        assert isinstance(it.value.__cause__, aiogpu.TaskError)
    assert runs.read_text() == "x"


@pytest.mark.needs("blocking")
async def test_a_constructor_that_takes_its_time(gate: Gate) -> None:
    """Who gives up waiting for it ends nothing."""
    async with aiogpu.init(num_cpus=1):
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
                continue
            aiogpu.kill(slow)
            for attempt in (slow, call):
                with pytest.raises(aiogpu.ActorDiedError, match="killed"):
                    await attempt


async def test_calls_made_before_the_node_is_open() -> None:
    """[B5]"""
    counter = Counter.remote()
    handles = [counter.add.remote() for _ in range(5)]
    assert (await handles[0].why()).state == "opening"
    handles[2].cancel()
    ready = await counter
    assert ready is counter
    with pytest.raises(asyncio.CancelledError):
        await handles.pop(2)
    assert await asyncio.gather(*handles) == [1, 2, 3, 4]
    await aiogpu.shutdown()


async def test_what_a_class_has_is_reached_by_its_remote_class() -> None:
    made: Any = aiogpu.remote(Leaving)
    assert made.limit == 7
    assert made.doubled(3) == 6
    assert made.label() == "Leaving"
    with pytest.raises(AttributeError, match=r"Leaving.remote\(\.\.\.\)"):
        _ = made.add
    with pytest.raises(AttributeError, match="no missing"):
        _ = made.missing


@pytest.mark.needs("threads")
async def test_a_call_runs_in_the_group_that_it_names(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Grouped.remote()
        stays = actor.stay.options(concurrency_group="io")
        staying = stays.remote(gate.path, "a")
        await gate.entered("a")
        late = actor.read.remote()  # the one place of its group is taken
        assert await actor.pair.remote() == (1, 2)
        elsewhere = actor.read.options(concurrency_group="compute")
        assert await elsewhere.remote() == "read"
        assert not late.done()
        gate.release("a")
        assert await staying == "a"
        assert await late == "read"
        counting = actor.each.options(concurrency_group="compute")
        assert [one async for one in counting.remote(3)] == [0, 1, 2]

        @aiogpu.remote
        def inside(actor: Any) -> str:
            call = actor.read.options(concurrency_group="compute")
            with pytest.raises(aiogpu.OptionError, match="its class are: io, compute"):
                actor.read.options(concurrency_group="other")
            return str(aiogpu.get(call.remote()))

        assert await inside.remote(actor) == "read"


async def test_a_call_has_a_number_of_results_of_its_own() -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Methods.remote()
        first, second = actor.pair.options(num_returns=2).remote()
        assert (await first, await second) == (1, 2)
        assert await actor.pair.remote() == (1, 2)
        assert await actor.two.options(num_returns=1).remote() == (1, 2)
        first, second = actor.two.remote()
        assert (await first, await second) == (1, 2)
        assert "Methods.pair" in repr(actor.pair.options(num_returns=2))
        for method, options, told in (
            (actor.pair, {"concurrency_group": "io"}, "groups of its class are: none"),
            (actor.pair, {"max_buffered": 3}, "@aiogpu.method"),
            (actor.pair, {"num_cpus": 3}, "not an option"),
            (actor.pair, {"num_returns": 0}, "num_returns=0"),
            (actor.many, {"num_returns": 2}, "generator"),
        ):
            with pytest.raises(aiogpu.OptionError, match=told):
                method.options(**options)


# Pools


async def pids_of(pool: Any, calls: int) -> set[int]:
    return set(await asyncio.gather(*(pool.pid.remote() for _ in range(calls))))


@pytest.mark.needs("processes")
async def test_calls_of_a_pool_are_spread_and_all_end_with_the_block() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        cls = Counter.options(num_gpus=0.5)
        async with aiogpu.ActorPool(cls, 2) as pool:
            pids = await pids_of(pool, 4)
            assert len(pids) == 2
            counts = [count async for count in pool.add.map([1] * 10)]
            assert sorted(counts) == sorted([*range(1, 6), *range(1, 6)])
            assert (await aiogpu.available_resources())["GPU"] == 0
        await until(lambda: all(not os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.mark.needs("processes")
async def test_one_of_a_pool_that_dies_is_replaced() -> None:
    async with aiogpu.init(num_cpus=2), aiogpu.ActorPool(Counter, 2) as pool:
        pids = await pids_of(pool, 2)
        with pytest.raises(aiogpu.ActorDiedError):
            await pool.exit.remote(3)
        async with asyncio.timeout(30):
            while len(now := await pids_of(pool, 2)) < 2 or now == pids:
                await asyncio.sleep(0)
        assert len(now & pids) == 1


@pytest.mark.parametrize("size", [3, 5])
async def test_a_pool_for_which_there_is_never_room_is_refused(size: int) -> None:
    """Each of its actors alone could live, and some of them do."""
    half = Counter.options(num_gpus=0.5)
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        told = rf"pool of {size} Counter, each with .*GPU.*0.5.* room for 2 at once"
        with pytest.raises(aiogpu.InfeasibleError, match=told):
            await aiogpu.ActorPool(half, size)
        with pytest.raises(aiogpu.InfeasibleError, match=told):
            async with aiogpu.ActorPool(half, min_size=size, max_size=9):
                raise AssertionError("the block has begun")
        async with aiogpu.ActorPool(half, 2) as pool:
            counts = [count async for count in pool.add.map([1] * 4)]
            assert sorted(counts) == [1, 1, 2, 2]


async def test_a_pool_is_closed_with_its_node() -> None:
    """A node of another process answers while it ends what its program leaves."""
    async with aiogpu.init(num_cpus=2):
        pool = await aiogpu.ActorPool(Counter, 2)
        assert await pool.add.remote() == 1
    assert "closed, 0 actors, 0 ready" in repr(pool)
    with pytest.raises(aiogpu.errors.MisuseError, match="pool of Counter is closed"):
        await pool


def wait_at(path: str) -> Any:
    """What a pool calls: an actor waits at a gate under the name that it is given."""
    return lambda actor, name: actor.wait.remote(path, name)


async def test_a_pool_of_given_actors_gives_results_in_either_order(
    gate: Gate,
) -> None:
    """Each takes a call when it has none; nothing ends with the pool."""
    async with aiogpu.init(num_cpus=2):
        actors = [await Async.remote() for _ in range(2)]
        pool: Any = await aiogpu.ActorPool(actors)
        assert (len(pool), pool.has_free(), pool.has_next()) == (2, True, False)
        for name in "abcd":
            pool.submit(wait_at(gate.path), name)
        assert not pool.has_free()
        await gate.entered("a", "b")
        gate.release("b")
        await gate.entered("c")  # which took the actor of "b"
        assert await pool.get_next_unordered() == "b"
        with pytest.raises(
            aiogpu.TaskTimeoutError, match="call it again to go on waiting"
        ):
            await pool.get_next(timeout=0.01)
        waiting = asyncio.create_task(pool.get_next())
        await asyncio.sleep(0)
        waiting.cancel()
        gate.release("c")
        await gate.entered("d")
        for name in "ad":
            gate.release(name)
        assert [await pool.get_next() for _ in range(3)] == ["a", "c", "d"]
        with pytest.raises(aiogpu.errors.MisuseError, match="nothing to wait for"):
            await pool.get_next()
        assert await pool.add.remote() == 1

        popped = pool.pop_idle()
        assert popped in actors
        assert len(pool) == 1
        pool.push(popped)
        with pytest.raises(aiogpu.errors.MisuseError, match="already in this pool"):
            pool.push(popped)
        await pool.aclose()
        assert await asyncio.gather(*(actor.notes.remote() for actor in actors))


async def test_a_pool_maps_a_function_over_given_actors(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2), aiogpu.ActorPool(Async, 2) as pool:
        nothing = pool.map(lambda a, k: a.later.remote(k), [])
        assert [count async for count in nothing] == []
        counts = pool.map(lambda a, _: a.later.remote(), range(9))
        assert sum([count async for count in counts]) in range(25, 46)
        names = pool.map_unordered(wait_at(gate.path), iter("abcdefg"))
        first = asyncio.ensure_future(anext(names))
        await gate.entered("a", "b")
        gate.release("b")
        assert await first == "b"
        await names.aclose()
        await gate.entered("a-cancelled")


async def test_errors_of_submitted_calls_are_told_by_their_turn() -> None:
    async with aiogpu.init(num_cpus=2):
        pool = aiogpu.ActorPool([Async.remote()])
        pool.submit(lambda actor, kind: actor.fail_later.remote(kind, "bad"), KeyError)
        pool.submit(lambda actor, k: k, 7)
        pool.submit(lambda actor, k: actor.no_method.remote(k), 7)
        pool.submit(lambda actor, k: actor.later.remote(k), 7)
        for kind, told in (
            (KeyError, "bad"),
            (aiogpu.errors.MisuseError, "returned 7; it must return a call's handle"),
            (AttributeError, "no_method"),
        ):
            with pytest.raises(kind, match=told):
                await pool.get_next()
        assert await pool.get_next() == 7
        with pytest.raises(aiogpu.OptionError, match="leave out size, min_size"):
            aiogpu.ActorPool([Async.remote()], 2)
        async with aiogpu.ActorPool(Async, 1) as made:
            with pytest.raises(
                aiogpu.errors.MisuseError, match="for pools made from a list of actors"
            ):
                made.pop_idle()
        with pytest.raises(aiogpu.errors.MisuseError, match="is closed"):
            made.submit(lambda actor, k: actor.later.remote(k), 7)


async def test_a_pool_whose_given_actors_have_died_says_so() -> None:
    async with aiogpu.init(num_cpus=2):
        actor = await Async.remote()
        pool: Any = await aiogpu.ActorPool([actor])
        for _ in range(2):
            pool.submit(lambda actor, _: actor.wait_for_ever.remote(), None)
        aiogpu.kill(actor)
        for _ in range(2):
            with pytest.raises(aiogpu.ActorDiedError):
                await pool.get_next()
        for call in (lambda: pool.submit(max, 1), pool.add.remote):
            with pytest.raises(
                aiogpu.ActorDiedError, match=r"of this pool .* have died"
            ):
                call()
        pool.push(await Async.remote(4))
        assert await pool.add.remote() == 5


async def test_a_method_of_the_actors_goes_before_one_of_the_pool() -> None:
    async with aiogpu.init(num_cpus=2), aiogpu.ActorPool(Line, 1) as pool:
        line: Any = pool
        assert (await line.push.remote(3), await line.map.remote()) == (3, "mapped")
        pool.submit(lambda actor, k: actor.push.remote(k), 4)
        assert await pool.get_next() == 4


async def test_a_pool_in_a_task() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        assert sorted(await handed_on.make_pool.remote(2)) == [1, 1, 2, 2]
        with pytest.raises(aiogpu.InfeasibleError, match="room for 2 at once"):
            await handed_on.make_pool.remote(3)
        while (await aiogpu.available_resources())["GPU"] < 1:
            await asyncio.sleep(0)
