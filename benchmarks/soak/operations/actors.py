"""Actors of three kinds: called, cancelled, named, restarted, ended in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import aiogpu
from benchmarks.soak import actors, tasks
from benchmarks.soak.operation import Operation

KINDS: Final = (actors.SERIAL, actors.THREADED, actors.SOFT)
CANCELLED: Final = (asyncio.CancelledError,)


async def resident(one: Operation) -> None:
    """One of its own, and calls of all kinds; it ends in one of five ways."""
    hand = one.hand
    kind, amount = hand.choice(KINDS), hand.choice((0, 0, 0.25, 0.5, 1))
    options: dict[str, Any] = {
        "num_gpus": amount,
        "max_restarts": hand.choice((0, 0, 1, 3, -1)),
        "max_task_retries": hand.choice((0, 0, 2)),
    }
    actor = one.begin("actor", kind.options(**options).remote(amount))
    if hand.random() < 0.3:
        await one.attempt(actor, actor, lambda found: found is not None)
    ends = [_called(one, actor, kind, each) for each in range(hand.randrange(1, 12))]
    match hand.randrange(5):
        case 0:
            aiogpu.kill(actor, no_restart=hand.random() < 0.5)
        case 1:
            ends.append(one.end(one.begin("leave", actor.leave.remote(0)), None))
        case 2:
            async with asyncio.timeout(60):
                await one.attempt(actor, _block(actor), None)
        case 3:
            await asyncio.sleep(hand.choice((0, 0.05)))
    del actor
    await asyncio.gather(*ends)


async def _block(actor: Any) -> None:
    async with actor:
        pass


def _called(one: Operation, actor: Any, kind: Any, number: int) -> Any:
    """One call; what awaits its end."""
    hand, is_cancelled = one.hand, one.hand.random() < 0.15
    (what,) = hand.choices(list(CALLS), [weight for weight, _ in CALLS.values()])
    if what == "wait" and kind is not actors.SOFT:
        what = "spin"
    handle, expected, legal = CALLS[what][1](actor, number)
    one.begin(f"{what} of {actor!r}", handle)
    return _ended(one, handle, expected, legal, is_cancelled)


async def _ended(
    one: Operation,
    handle: Any,
    expected: object,
    legal: tuple[type[BaseException], ...],
    is_cancelled: bool,
) -> None:
    if is_cancelled:
        await asyncio.sleep(one.hand.choice((0, 0.002, 0.02)))
        handle.cancel()
        legal = (*legal, *CANCELLED)
    if isinstance(handle, aiogpu.Stream):
        await one.attempt(handle, _items(handle), expected, *legal)
    else:
        await one.end(handle, expected, *legal)


async def _items(stream: Any) -> list[int]:
    return [item async for item in stream]


def _keep(actor: Any, number: int) -> tuple[Any, object, tuple[Any, ...]]:
    view = tasks.filled(1 << 19, number)
    return actor.keep.remote(view), tasks.fingerprint(view), ()


def _count(actor: Any, number: int) -> tuple[Any, object, tuple[Any, ...]]:
    is_whole = list(range(20))
    legal = (aiogpu.TaskCancelledError, asyncio.CancelledError)
    return actor.count.remote(20), lambda found: found == is_whole[: len(found)], legal


Called = Callable[[Any, int], tuple[Any, object, tuple[Any, ...]]]
CALLS: Final[dict[str, tuple[int, Called]]] = {
    "add": (50, lambda actor, n: (actor.add.remote(n), n + 1, ())),
    "fail": (8, lambda actor, n: (actor.fail.remote(n), None, (ValueError,))),
    "spin": (8, lambda actor, n: (actor.spin.remote(n, 0.02), n + 1, ())),
    "wait": (8, lambda actor, n: (actor.wait.remote(n, 0.05), n + 1, ())),
    "ask": (8, lambda actor, n: (actor.ask.remote(n), n + 1, ())),
    "task": (
        8,
        lambda actor, n: (actors.call.remote(actor, n), n + 1, (AssertionError,)),
    ),
    "keep": (6, _keep),
    "count": (6, _count),
    "die": (4, lambda actor, n: (actor.die.remote(n), None, ())),
}


async def named(one: Operation) -> None:
    """One that several share by its name, made by whoever is first."""
    hand = one.hand
    name = f"shared-{hand.randrange(3)}"
    (kind,) = hand.choices((actors.SOFT, actors.THREADED))
    name = f"{name}-{kind.__name__}"
    legal: tuple[type[BaseException], ...] = ()
    try:
        if hand.random() < 0.2:
            if one.is_joined:
                legal = (aiogpu.errors.ActorNameError,)  # told by the calls
            actor = aiogpu.get_actor(name)
        else:
            is_shared = hand.random() < 0.9
            # Another program may take the name in the very moment: its calls tell.
            if one.is_joined and not is_shared:
                legal = (aiogpu.errors.ActorNameError,)
            named = kind.options(name=name, max_restarts=1, get_if_exists=is_shared)
            actor = named.remote()
    except aiogpu.errors.ActorNameError as error:
        one.note(name, error, (aiogpu.errors.ActorNameError,))
        return
    one.begin(name, actor)
    handles = [one.begin("add", actor.add.remote(each)) for each in range(5)]
    if hand.random() < 0.1:
        aiogpu.kill(actor)
    for each, handle in enumerate(handles):
        await one.end(handle, each + 1, *legal)


async def pooled(one: Operation) -> None:
    """Several that are called as one."""
    expected = list(range(1, 31))
    pool = aiogpu.ActorPool(actors.THREADED.options(max_restarts=2), 2)
    await one.attempt("pool", _map_over(one.begin("pool", pool)), expected)


async def _map_over(pool: Any) -> list[int]:
    async with pool:
        return [item async for item in pool.add.map(range(30))]
