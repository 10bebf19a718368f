"""Actors found by name, also before a node of another process answers."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.contract.actor_classes import Async, Counter, Methods
from tests.contract.raw_client import Service, all_is_free, program, service
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.program import run as run_program
from tests.support.waits import no_complaints, turns, until

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


@contextmanager
def stopped(node: Service) -> Iterator[None]:
    """Suspend the node, so that it does not answer."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


async def test_names_are_looked_up_without_blocking_the_loop(node: Service) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        methods = await Methods.options(name="it", num_cpus=0).remote()
        doomed = await Counter.options(name="doomed", num_cpus=0).remote()
        with stopped(node):
            found = aiogpu.get_actor("it")
            call = found.one.remote(5)
            nobody = aiogpu.get_actor("nobody")
            other = Counter.options(name="counter", num_cpus=0).remote(1)
            same: Any = Methods.options(name="it", get_if_exists=True).remote()
            again = same.one.remote(6)
            taken = Counter.options(name="it").remote()
            aiogpu.kill(aiogpu.get_actor("doomed"))
            await turns(20)
            assert not call.done()
            assert not again.done()
        assert await asyncio.gather(call, again, other.add.remote(1)) == [5, 6, 2]
        assert await found is found
        await raises(errors.ActorNameError, nobody, match="no actor named 'nobody'")
        await raises(
            errors.ActorNameError,
            lambda: nobody.one.remote(),
            match="no actor named 'nobody'",
        )
        await raises(errors.ActorNameError, taken, match="'it' exists already")
        await raises(errors.ActorDiedError, lambda: doomed.add.remote(), match="killed")
        assert await methods.one.remote(7) == 7


async def test_a_wrong_use_of_an_actor_before_the_answer_is_reported(
    node: Service,
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        methods = await Methods.options(name="it").remote()
        with stopped(node):
            found = aiogpu.get_actor("it")
            late = found.many
            refused = {
                "is a generator": found.many.remote(),
                "has several results": found.two.remote(),
                "has no method nothing": found.nothing.remote(),
            }
            with pytest.raises(errors.MisuseError, match="its node has answered; wait"):
                pickle.dumps(found)
            with pytest.raises(AttributeError, match="no public method _private"):
                found._private  # noqa: B018
            await raises(
                errors.MisuseError,
                lambda: anext(found.one.map([1, 2], chunk=2)),
                match="Await the handle first",
            )
        for message, call in refused.items():
            await raises((errors.MisuseError, AttributeError), call, match=message)
        # Now the class is known, also to a method that was taken before.
        assert [item async for item in found.many.remote()] == [0, 1, 2]
        assert [item async for item in late.remote()] == [0, 1, 2]
        assert await asyncio.gather(*found.two.remote()) == [1, 2]
        with pytest.raises(AttributeError, match="Methods has no method nothing"):
            found.nothing  # noqa: B018
        assert await tasks.echo.remote([found]) is not None
        assert await methods.one.remote() == 1


async def test_a_handle_dropped_before_the_answer_keeps_no_actor(
    node: Service,
) -> None:
    async with no_complaints(), aiogpu.init(address=node.path, log_to_driver=False):
        methods = await Methods.options(name="it", num_gpus=1).remote()
        with stopped(node):
            found = aiogpu.get_actor("it")
            call = found.one.remote(3)
            del found
            gc.collect()
            aiogpu.get_actor("nobody")
        assert await call == 3
        del methods, call
        await all_is_free()


async def nothing_is_left(runtime_directory: Path) -> None:
    """Wait until the zygotes of a killed node have removed its directory."""
    await until(lambda: not os.listdir(runtime_directory))


async def test_a_node_that_dies_before_the_answer_fails_the_calls(
    node: Service, runtime_directory: Path
) -> None:
    async with no_complaints():
        await aiogpu.init(address=node.path, log_to_driver=False)
        with stopped(node):
            found = aiogpu.get_actor("it")
            same = Methods.options(name="it", get_if_exists=True).remote()
            call = found.one.remote()
            os.kill(node.pid, signal.SIGKILL)
        await raises(errors.NodeDiedError, found, call, same)
        await raises(errors.NodeDiedError, lambda: aiogpu.get_actor("it"))
        await aiogpu.shutdown()
    await nothing_is_left(runtime_directory)


async def test_an_actor_found_by_another_class_has_its_own_methods(
    node: Service,
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        await (first := Counter.options(name="one").remote(1))
        with stopped(node):
            found: Any = Async.options(name="one", get_if_exists=True).remote()
            call = found.add.remote(2)
            with pytest.raises(AttributeError, match="Async has no method nothing"):
                found.nothing  # noqa: B018
        assert await call == 3
        with pytest.raises(AttributeError, match="Counter has no method later"):
            found.later  # noqa: B018
        assert await first.add.remote(1) == 4


@asynccontextmanager
async def left_before_the_answer(
    node: Service, *, dies: bool = False
) -> AsyncIterator[None]:
    """Join; leave at the end of the block, before the node answers.

    A node that dies may end the program's shutdown at any time.
    """
    async with no_complaints():
        await aiogpu.init(address=node.path, log_to_driver=False)
        with stopped(node):
            yield
            leaving = asyncio.create_task(aiogpu.shutdown())
            await turns(20)
            assert dies or not leaving.done()
        await leaving


DETACHED: Any = Counter.options(name="kept", lifetime="detached")


async def test_a_program_leaves_a_node_that_never_answers(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.engines.remote.DEPART_LIMIT", 0.05)
    async with no_complaints():
        await aiogpu.init(address=node.path, log_to_driver=False)
        with stopped(node):
            call = aiogpu.get_actor("kept").add.remote()
            async with asyncio.timeout(20):
                await aiogpu.shutdown()
            await raises(errors.NodeClosedError, call)


async def test_a_node_may_die_while_a_program_leaves(
    node: Service, runtime_directory: Path
) -> None:
    async with left_before_the_answer(node, dies=True):
        aiogpu.kill(aiogpu.get_actor("kept"))
        call = aiogpu.get_actor("kept").add.remote()
        os.kill(node.pid, signal.SIGKILL)
    await raises(errors.NodeDiedError, call)
    await nothing_is_left(runtime_directory)


@pytest.mark.usefixtures("each_engine")
async def test_a_name_belongs_to_one_actor_in_its_namespace() -> None:
    named = Counter.options(name="bob")
    get = aiogpu.get_actor
    async with aiogpu.init(num_cpus=1):
        bob = named.remote(1)
        assert repr(bob) == "<ActorHandle Counter 'bob'>"
        assert await get("bob").add.remote() == 2
        taken = "'bob' exists already"
        await raises(errors.ActorNameError, lambda: named.remote(), match=taken)
        assert await named.options(get_if_exists=True).remote(7).add.remote() == 3
        absent = "there is no actor named 'eve' on"
        await raises(errors.ActorNameError, lambda: get("eve"), match=absent)
        elsewhere = named.options(namespace="other").remote(10)
        assert await get("bob", "other").add.remote() == 11
        absent = "'nowhere'"
        await raises(errors.ActorNameError, lambda: get("bob", "nowhere"), match=absent)
        # An actor that another class has made has the methods of that class.
        found: Any = await Async.options(name="bob", get_if_exists=True).remote()
        assert await found.pid.remote() == await bob.pid.remote()
        with pytest.raises(AttributeError, match="Counter has no method later"):
            found.later.remote()
        aiogpu.kill(bob)
        await raises(errors.ActorNameError, lambda: get("bob"))
        second = named.remote(5)
        assert await second.add.remote() == 6
        del second
        async with asyncio.timeout(20):
            third = None
            while third is None:
                await asyncio.sleep(0)
                with suppress(errors.ActorNameError):
                    third = await named.remote(50)
        assert await third.add.remote() == 51
        assert await elsewhere.add.remote() == 12
    unnamed = Counter.options(get_if_exists=True)
    with pytest.raises(errors.OptionError, match=r"write `Counter\.options\(name="):
        unnamed.remote()
    assert await unnamed.options(name="late").remote(1).add.remote() == 2


async def make_kept(node: Service) -> None:
    """Make the detached actor in a program that leaves it."""
    async with aiogpu.init(address=node.path, log_to_driver=False):
        await DETACHED.remote()


async def kept_is_gone(node: Service) -> None:
    """Check that the detached actor is not found, and that all is free."""
    async with aiogpu.init(address=node.path, log_to_driver=False):
        with pytest.raises(errors.ActorNameError, match="no actor named 'kept'"):
            await aiogpu.get_actor("kept")
        await all_is_free()


async def test_calls_right_before_the_program_leaves_are_carried_out(
    node: Service, gate: Gate
) -> None:
    for find in (
        lambda: aiogpu.get_actor("kept"),
        Counter.options(name="kept", get_if_exists=True).remote,
    ):
        await make_kept(node)
        async with left_before_the_answer(node):
            aiogpu.kill(find())
        await kept_is_gone(node)
    # Dropped handles keep no actor.
    async with left_before_the_answer(node):
        aiogpu.get_actor("nobody")
        Counter.options(name="kept", get_if_exists=True, num_gpus=1).remote()
        gc.collect()
    await kept_is_gone(node)
    # An actor is made and called without waiting for the answer.
    async with left_before_the_answer(node):
        DETACHED.options(get_if_exists=True).remote(1)
    async with left_before_the_answer(node):
        call = aiogpu.get_actor("kept").gated.remote(gate.path, "call")
        nobody = aiogpu.get_actor("nobody").add.remote()
    await raises(errors.NodeClosedError, call, match="was shut down before")
    await raises(errors.ActorNameError, nobody, match="no actor named 'nobody'")
    async with aiogpu.init(address=node.path, log_to_driver=False):
        found = await aiogpu.get_actor("kept")
        aiogpu.kill(found)
        await raises(errors.ActorDiedError, lambda: found.add.remote(), match="killed")
    await kept_is_gone(node)


KILLS = {
    "by its name": 'aiogpu.kill(aiogpu.get_actor("kept"))',
    "at the end of a block": """
await aiogpu.shutdown()
async with aiogpu.init():
    aiogpu.kill(Counter.options(name="kept", get_if_exists=True).remote())
""",
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "run"),
    [("by its name", "asyncio.run"), ("at the end of a block", "aiogpu.run")],
)
async def test_the_last_line_of_a_program_kills_an_actor(
    node: Service, monkeypatch: pytest.MonkeyPatch, how: str, run: str
) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", node.path)
    await make_kept(node)
    source = program(node.path, KILLS[how]).replace("asyncio.run", run)
    await asyncio.to_thread(run_program, source)
    await kept_is_gone(node)
