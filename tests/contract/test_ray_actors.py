"""Actors and calls on Ray, where Ray's own behaviour differs from aiogpu's."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.client.current import current
from tests.contract import handed_on
from tests.contract import value_tasks as v
from tests.contract.actor_classes import Counter
from tests.contract.clusters import USUAL
from tests.contract.let_go_tasks import Model
from tests.contract.ray_actor_classes import (
    Adder,
    Grouped,
    Keeper,
    Picky,
    ThreadGroups,
    add_in_threads,
    call_narrow,
    numbers_by_name,
    pid_of,
)
from tests.support.gate import Gate
from tests.support.waits import LIMIT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.either_loop,
    pytest.mark.usefixtures("rayed"),
]

GPUS = USUAL["num_gpus"]


def node() -> Any:
    """Join the one cluster that serves the tests of Ray's own behaviour."""
    return aiogpu.init(address="ray", **USUAL)


async def gone(pid: int) -> bool:
    """Wait until a process ends, by itself; return False after a while."""
    opened = os.pidfd_open(pid)
    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.add_reader(opened, lambda: ended.done() or ended.set_result(True))
    try:
        async with asyncio.timeout(20):
            return bool(await ended)
    finally:
        loop.remove_reader(opened)
        os.close(opened)


async def test_an_actor_ends_although_a_plain_task_had_a_handle() -> None:
    async with node():
        adder = Adder.remote()
        pid = await pid_of.remote(adder)
        del adder
        assert await gone(pid)


async def test_each_caller_of_a_plain_actor_has_its_order() -> None:
    async with node():
        counter = Counter.remote()

        async def call(name: int) -> None:
            for step in range(30):
                handle = counter.note.remote((name, step))
                if step % 3:
                    await handle

        await asyncio.gather(*(call(name) for name in range(5)))
        notes = await counter.notes.remote()
        for name in range(5):
            assert [step for caller, step in notes if caller == name] == [*range(30)]


async def test_a_failed_constructor_ends_no_actor_that_gets_the_failure() -> None:
    async with node():
        healthy, broken = Picky.remote(False), Picky.remote(True)
        with pytest.raises(aiogpu.ActorDiedError) as caught:
            await healthy.take.remote(broken.take.remote(1))
        assert isinstance(caught.value.__cause__, LookupError)
        assert await healthy.take.remote(2) == 2
        again = Picky.options(name="again").remote
        with pytest.raises(aiogpu.ActorDiedError):
            await again(True)
        async with asyncio.timeout(LIMIT):  # its name is free soon after the failure
            while True:
                try:
                    assert await again(False).take.remote(3) == 3
                    break
                except aiogpu.errors.ActorNameError:
                    await asyncio.sleep(0)


async def test_threads_share_the_handles_of_their_actor() -> None:
    async with node():
        adder = Adder.remote()
        front = Adder.options(max_concurrency=3).remote(adder)
        sums = await asyncio.gather(*(front.pass_on.remote(1) for _ in range(6)))
        assert sorted(sums) == [1, 2, 3, 4, 5, 6]


async def test_threads_of_a_task_call_actors() -> None:
    async with node():
        adder = await Adder.remote()
        assert await add_in_threads.remote(adder, [*range(10)]) == 45


async def test_groups_of_coroutines_share_a_loop_and_keep_their_limits() -> None:
    async with node():
        grouped = Grouped.remote()
        waiting = grouped.wait.remote()
        assert await asyncio.gather(*(grouped.open.remote() for _ in range(5))) == [
            *(1, 1, 1, 1, 1)
        ]
        await waiting


async def test_close_is_awaited_when_the_last_handle_goes(tmp_path: Path) -> None:
    async with node():
        grouped = Grouped.remote(str(tmp_path / "closed"))
        pid = await grouped.pid.remote()
        del grouped
        assert await gone(pid)
        assert (tmp_path / "closed").exists()


async def test_an_actor_with_gpus_holds_no_cpu() -> None:
    async with node():
        holders = [Adder.options(num_gpus=0.25).remote() for _ in range(5)]
        # If each actor held one of the four CPUs, the fifth would never be made.
        async with asyncio.timeout(30):
            await asyncio.gather(*holders)


async def test_groups_of_threads_keep_their_limits_for_every_handle(gate: Gate) -> None:
    async with node():
        actor = await ThreadGroups.options(name="grouped").remote()
        sent = call_narrow.remote(actor, gate.path, "task")
        await gate.entered("task")
        by_name = aiogpu.get_actor("grouped").narrow.remote(gate.path, "name")
        others = [actor.wait.remote(gate.path, name) for name in "ab"]
        # Two calls more than the group has room for, and both places of the other one.
        await gate.entered("a", "b")
        assert gate.inside == {"task", "a", "b"}
        gate.release("task")
        await gate.entered("name")
        gate.release("name", "a", "b")
        assert await asyncio.gather(sent, by_name, *others) == [
            *("task", "name", "a", "b")
        ]


async def test_a_plain_actor_runs_in_the_main_thread() -> None:
    async with node():
        assert await Keeper.remote().is_in_its_thread.remote()


async def test_cancelled_calls_of_plain_methods_run_in_order(gate: Gate) -> None:
    """Asking Ray 2.60 to cancel a waiting call would hang the actor."""
    async with node():
        keeper = await Keeper.remote()
        busy = keeper.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        calls = [keeper.tell.remote(number) for number in range(40)]
        for call in (busy, *calls[::2]):
            call.cancel()
        gate.release("busy")
        assert await keeper.all_told.remote() == [*range(40)]
        assert await calls[1] is None


@pytest.mark.parametrize("threads", [1, 2])
async def test_leaving_a_stream_ends_its_method(threads: int, gate: Gate) -> None:
    async with node():
        keeper = await Keeper.options(max_concurrency=threads).remote()
        async for _ in keeper.endless.remote():
            break
        async with asyncio.timeout(30):
            while await keeper.all_told.remote() != ["ended"]:
                await asyncio.sleep(0)


async def test_cancelling_a_waiting_stream_ends_its_method(
    gate: Gate,
) -> None:
    async with node():
        keeper = await Keeper.remote()
        busy = keeper.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        waiting = keeper.endless.remote()
        await asyncio.sleep(0)
        waiting.cancel()
        behind = keeper.all_told.remote()
        gate.release("busy")
        assert await busy == "busy"
        assert await behind == ["ended"]


async def test_a_coroutine_is_given_handles_in_a_container() -> None:
    """The handles belong to the loop that runs the coroutine."""
    async with node():
        handles = [aiogpu.put(number) for number in (1, 2)]
        assert await Grouped.remote().total.remote(handles) == 3


async def test_a_threaded_actor_has_streams() -> None:
    async with node():
        actor = await ThreadGroups.remote()
        assert [number async for number in actor.numbers.remote()] == [1]


async def test_the_end_of_a_block_waits_for_calls_in_threads(gate: Gate) -> None:
    async with node():
        async with ThreadGroups.remote() as actor:
            calls = [actor.wait.remote(gate.path, name) for name in "ab"]
            await gate.entered("a", "b")
            asyncio.get_running_loop().call_soon(gate.release, "a", "b")
        assert await asyncio.gather(*calls) == ["a", "b"]


async def test_get_actor_finds_the_class_after_a_handle_has_come() -> None:
    """A handle tells the engine nothing of its class."""
    async with node():
        actor = await ThreadGroups.options(name="counting").remote()
        assert await numbers_by_name.remote(actor, "counting") == [1]


@pytest.fixture
async def joined() -> AsyncIterator[Any]:
    async with node() as session:
        yield session


async def test_a_call_keeps_its_actors_while_it_waits_to_be_sent(joined: Any) -> None:
    """Other calls are sent meanwhile."""
    counter = await Counter.remote(1)
    promised = joined._session.new_handle("promised", joined._session)
    waiting = handed_on.add_to.remote(counter, promised)
    assert await v.give.remote(2) == 2
    given = v.give.remote(5)
    promised.on_submitted(given.task_id)
    del counter
    gc.collect()
    assert await waiting == 6


async def test_a_put_value_keeps_the_actors_inside_it(joined: Any) -> None:
    counter = await Counter.remote(1)
    small = aiogpu.put([counter])
    large = aiogpu.put([counter, bytes(1 << 20)])
    assert await v.give.remote(2) == 2
    del counter
    gc.collect()
    for box in (small, large):
        found = await v.give.remote(box)
        assert await handed_on.add_to.remote(found[0], 1) in (2, 3)


async def test_a_function_that_holds_an_actor_is_refused(joined: Any) -> None:
    counter = await Counter.remote(1)

    @aiogpu.remote
    def closure() -> Any:
        return counter

    with pytest.raises(
        aiogpu.errors.SerializationError, match=r"counter.*as an argument"
    ):
        closure.remote()
    assert await counter.add.remote(1) == 2


async def test_an_actor_passes_on_a_nested_handle(joined: Any) -> None:
    """A container with a handle goes through three processes unread."""
    counter = await Counter.remote(1)
    box = v.give.remote(v.give.remote([counter]))
    del counter
    gc.collect()
    (found,) = await box
    assert await found.add.remote(1) == 2


async def test_a_program_survives_a_cancel_right_after_the_call(gate: Gate) -> None:
    """Ray alone would end the program as soon as the argument comes."""
    async with node():
        for number in range(10):
            slow = v.gated.remote(gate.path, f"slow-{number}", number)
            for _ in range(10):
                v.give.remote(slow).cancel()
            await gate.entered(f"slow-{number}")
            gate.release(f"slow-{number}")
            assert await slow == number


async def test_cancel_never_blocks_the_loop(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop turns until Ray says that it has accepted the call."""
    async with node():
        from aiogpu.engines.ray import cluster

        slow = v.gated.remote(gate.path, "slow", 1)
        await gate.entered("slow")
        when_done, cancel, here = (
            cluster.add_done_callback,
            cluster.cancel,
            threading.get_ident(),
        )
        may_answer, asked, cancelled_in = threading.Event(), [], []

        def answer_late(ref: Any, tell: Callable[[Any], object]) -> None:
            asked.append(ref)

            def come(found: Any) -> None:
                if threading.get_ident() != here:
                    may_answer.wait(60)
                tell(found)

            when_done(ref, come)

        def note_thread(ref: Any, *, force: bool = False) -> None:
            cancelled_in.append(threading.get_ident())
            cancel(ref, force=force)

        calls = [v.give.remote(slow) for _ in range(20)]
        with monkeypatch.context() as patched:
            patched.setattr(cluster, "add_done_callback", answer_late)
            patched.setattr(cluster, "cancel", note_thread)
            for call in calls:
                call.cancel()
                await asyncio.sleep(0)
            assert cancelled_in == []
            # The answer does not cover cancels that come after the question.
            questions = len(asked)
            may_answer.set()
            async with asyncio.timeout(30):
                while len(cancelled_in) < len(calls):
                    await asyncio.sleep(0)
            assert len(asked) > questions
            assert here not in cancelled_in
        gate.release("slow")
        assert await slow == 1


async def test_a_cancel_of_an_ending_call_affects_no_other() -> None:
    async with node():
        for number in range(20):
            calls = [v.give.remote(number) for _ in range(10)]
            for call in calls[::2]:
                await asyncio.sleep(0)
                call.cancel()
            assert await asyncio.gather(*calls[1::2]) == [number] * 5


async def test_a_timeout_reaches_calls_that_need_the_result(gate: Gate) -> None:
    """Ray ends those that were sent before; a later call gets the reason."""
    async with node():
        first: Any = v.gated.options(timeout=1.0).remote(gate.path, "slow", 1)
        line = [first, v.give.remote(first)]
        for _ in range(50):
            line.append(v.add.remote(line[-1]))
        with pytest.raises(aiogpu.TaskTimeoutError, match=r"gated.*start fewer tasks"):
            await first
        with pytest.raises(aiogpu.TaskTimeoutError, match="gated"):
            await v.give.remote(first)
        ended = await asyncio.gather(*line[1:], return_exceptions=True)
        assert {type(error) for error in ended} == {aiogpu.TaskCancelledError}


# Results that come to a process that waits for none are not kept


@aiogpu.remote
class Maker:
    """Returns handles of models that hold all GPUs."""

    def __init__(self) -> None:
        self.made = 0

    async def make(self) -> list[Any]:
        model = await Model.options(num_gpus=GPUS).remote()
        self.made += 1
        return [model]

    async def count(self) -> int:
        return self.made


class Leaving:
    """Calls, and does not wait for the result."""

    def leave(self, maker: Any) -> None:
        maker.make.remote()

    def leave_many(self, maker: Any) -> None:
        for _ in range(100):
            maker.count.remote()

    def waiting(self) -> int:
        """Return the number of calls that have not ended, as this process sees it."""
        client: Any = current.client
        return len(client.calls.live)


Actor = aiogpu.remote(Leaving)


@aiogpu.remote
def leave(maker: Any) -> None:
    Leaving().leave(maker)


@pytest.mark.parametrize("asker", ["actor", "task"])
async def test_an_unread_result_does_not_hold_its_actor(asker: str) -> None:
    """The result is a handle; its actor holds the GPU until the handle is dropped."""
    async with node():
        maker, idle = await Maker.remote(), await Actor.remote()
        await (idle.leave if asker == "actor" else leave).remote(maker)
        async with asyncio.timeout(LIMIT):
            while await maker.count.remote() < 1:
                await asyncio.sleep(0)
            await Model.options(num_gpus=GPUS).remote()


async def test_unawaited_calls_do_not_pile_up() -> None:
    async with node():
        maker, idle = await Maker.remote(), await Actor.remote()
        await idle.leave_many.remote(maker)
        async with asyncio.timeout(LIMIT):
            while await idle.waiting.remote():
                await asyncio.sleep(0)
