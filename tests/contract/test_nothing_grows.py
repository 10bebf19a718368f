"""A node keeps nothing of a task, call, actor or lease that has ended.

Each case ends many in one way, twice. After the second time, no container of the node
and of the program that has joined it holds more than after the first.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.errors import ActorNameError
from tests.contract.growth_tasks import (
    OnALoop,
    OneByOne,
    count,
    die,
    fail,
    forever,
    give,
    leave_children,
)
from tests.contract.node_here import node_here
from tests.support.containers import container_sizes
from tests.support.waits import until

pytestmark = pytest.mark.usefixtures("no_leaks")
MANY: Final = 60
FEW: Final = 8
"""Deaths of processes, each of which takes a fork."""
SLACK: Final = MANY // 3
CACHES: Final = "functions with options, and requests: caches with a limit"
PROCESSES: Final = "keepers stay: as many as there were processes at a time"
BOUNDED: Final = {
    "Slots._free_indices": PROCESSES,
    "Supervisor._peers": PROCESSES,
    "Peer._transport": PROCESSES,
    "Timers._heap": "cancelled alarms stay while they are few, or until they are due",
    "History.ring": "the last tasks, up to a limit",
    "Client.declared": CACHES,
    "Accounts._portions": CACHES,
    "FunctionSpec.environ": CACHES,
    "FunctionSpec.resources": CACHES,
    "RemoteEngine._declared": CACHES,
    "Requests._funcs": CACHES,
}


async def ended(handles: Iterable[Any]) -> None:
    """Wait for the ends of tasks or calls, whatever these ends are."""
    await asyncio.gather(*handles, return_exceptions=True)


async def cancelled(handles: list[Any]) -> None:
    """Cancel tasks or calls that have reached the node."""
    await asyncio.sleep(0)
    for handle in handles:
        handle.cancel()
    await ended(handles)


async def cancel_tasks(_actors: list[Any]) -> None:
    blocker = forever.remote()
    await cancelled([give.remote(blocker) for _ in range(MANY)])
    await cancelled([forever.remote() for _ in range(MANY)])
    await cancelled([give.options(num_gpus=1).remote(0) for _ in range(MANY)])
    await cancelled([blocker])


async def fail_tasks(_actors: list[Any]) -> None:
    await ended(fail.remote(fail.remote(0)) for _ in range(MANY))
    await ended(die.remote() for _ in range(FEW))
    await ended(forever.options(timeout=0.01).remote() for _ in range(MANY))
    await ended(forever.options(run_timeout=0.01).remote() for _ in range(MANY))


async def stop_streams(_actors: list[Any]) -> None:
    for _ in range(MANY):
        async for _ in count.remote(100):
            break


async def leave_children_behind(actors: list[Any]) -> None:
    await ended(leave_children.remote(MANY, actor) for actor in actors)


async def drop_values(_actors: list[Any]) -> None:
    values = [aiogpu.put(number) for number in range(MANY)]
    await ended(give.remote(value) for value in values)
    await ended(give.remote([value]) for value in values)


async def end_calls(actors: list[Any]) -> None:
    """End calls that waited for arguments: their numbers on the node change."""
    for actor in actors:
        await ended(actor.give.remote(give.remote(0)) for _ in range(MANY))
        await ended(actor.give.remote(fail.remote(0)) for _ in range(MANY))
        blocker = forever.remote()
        await cancelled([actor.give.remote(blocker) for _ in range(MANY)])
        await cancelled([blocker])
        await cancelled([actor.give.remote(give.remote(0)) for _ in range(MANY)])
    await cancelled([actors[1].wait.remote() for _ in range(MANY)])
    await ended(actors[1].overrun.remote() for _ in range(MANY))


async def cancel_calls_that_wait_behind(actors: list[Any]) -> None:
    """Cancel calls whose arguments have come, and that wait for the process."""
    holding = actors[0].hold.remote()
    arguments = [give.remote(0) for _ in range(2 * MANY)]
    calls = [actors[0].give.remote(argument) for argument in arguments]
    await ended(arguments)
    await cancelled([*calls, holding])


async def lose_calls(actors: list[Any]) -> None:
    for actor in actors:
        # Once: a process that dies again and again is not restarted.
        calls = [actor.die.remote()]
        calls += [actor.give.remote(give.remote(0)) for _ in range(2 * MANY)]
        await ended(calls)


async def end_actors(_actors: list[Any]) -> None:
    for kind in (OneByOne, OnALoop):
        kept = kind.options(name="kept").remote()
        for _ in range(MANY):
            with pytest.raises(ActorNameError):
                await kind.options(name="kept").remote()
        killed = [kind.remote() for _ in range(FEW)]
        await ended(killed)
        for actor in (kept, *killed):
            aiogpu.kill(actor)
            await ended(actor.give.remote(0) for _ in range(MANY))
        waiting = [kind.options(num_gpus=1).remote() for _ in range(MANY)]
        await ended(actor.give.remote(0) for actor in waiting[:1])


async def end_shares(_actors: list[Any]) -> None:
    for _ in range(MANY):
        async with aiogpu.lease(num_gpus=0.1), aiogpu.placement([{"GPU": 0.1}]):
            pass
    async with aiogpu.lease(num_gpus=1):
        groups = [aiogpu.placement([{"GPU": 1}]) for _ in range(MANY)]
        members = [give.options(placement=group).remote(0) for group in groups]
        for group in groups:
            await group.remove()
        await ended(members)
        for lease in [aiogpu.lease(num_gpus=1) for _ in range(MANY)]:
            await lease.release()


CASES: Final = (
    *(cancel_tasks, fail_tasks, stop_streams, leave_children_behind, drop_values),
    *(end_calls, cancel_calls_that_wait_behind, lose_calls, end_actors, end_shares),
)


@asynccontextmanager
async def opened(way: str, directory: Path) -> AsyncIterator[tuple[object, ...]]:
    """Open a node, or join one in this process; yield what may not grow."""
    if way == "embedded":
        async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as node:
            yield (node._session._engine,)
        return
    async with node_here(directory, learns=False) as here, here.join() as node:
        yield here.engine, node._session._engine


@pytest.mark.parametrize("way", ["embedded", "joined"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_nothing_grows(
    case: Callable[[list[Any]], Awaitable[None]], way: str, tmp_path: Path
) -> None:
    async with opened(way, tmp_path) as roots:
        actors = [OneByOne.remote(), OnALoop.remote()]

        async def run() -> None:
            await case(actors)
            # All that came before has been handled, here and in the workers.
            await ended(actor.give.remote(0) for actor in actors)
            await ended(give.remote(0) for _ in range(FEW))
            gc.collect()

        await run()
        before = container_sizes(roots)
        await run()
        grown: dict[str, tuple[int, int]] = {}

        def is_level() -> bool:
            after = container_sizes(roots)
            grown.clear()
            grown.update(
                (name, (before.get(name, 0), size))
                for name, size in after.items()
                if size > before.get(name, 0) + SLACK and name not in BOUNDED
            )
            return not grown

        try:
            await until(is_level)
        except TimeoutError:
            pytest.fail(f"grew, (before, after): {grown}")
