"""Tasks that have shares, fail, die, are tried again, cancelled or timed out."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, Final, NamedTuple

import aiogpu
from benchmarks.soak import tasks
from benchmarks.soak.operation import Operation


class Kind(NamedTuple):
    """How often a task is drawn, and how it may end beside giving its number."""

    weight: int
    task: Any
    legal: tuple[type[BaseException], ...] = ()


KINDS: Final = (
    Kind(30, tasks.echo),
    Kind(15, tasks.soft),
    Kind(4, tasks.prints),
    Kind(8, tasks.fail, (ValueError,)),
    Kind(4, tasks.flaky, (tasks.FlakyError,)),
    # The last of its ways is an exit by an exception, which is an error like others.
    Kind(4, tasks.die, (aiogpu.TaskError,)),
    Kind(3, tasks.deaf),
)
AMOUNTS: Final = (0.25, 0.5, 0.75, 1, 2)
LEAVES: Final = ("await", "cancel", "time out", "drop")


async def on_cpus(one: Operation) -> None:
    """One of the kinds, with options that are drawn."""
    hand = one.hand
    (kind,) = hand.choices(KINDS, [kind.weight for kind in KINDS])
    options: dict[str, Any] = {"max_retries": hand.choice((0, 1, 3))}
    if kind.task is tasks.flaky:
        options["retry_exceptions"] = hand.choice((True, [tasks.FlakyError]))
    if hand.random() < 0.1:
        options["num_gpus"] = hand.choice((0.25, 0.5, 1))
        options["max_calls"] = hand.choice((None, 0, 2))
    if hand.random() < 0.03:
        options["runtime_env"] = {"env_vars": {"SOAK": str(hand.randrange(2))}}
    if hand.random() < 0.1:
        options["priority"] = hand.randrange(-1, 2)
    await _run(one, kind.task, options, (one.number,), kind.legal)


async def on_gpus(one: Operation) -> None:
    """A share that only its task may have, in a process of its own or reused."""
    hand = one.hand
    amount = hand.choice(AMOUNTS)
    options: dict[str, Any] = {
        "num_gpus": amount,
        "max_calls": hand.choice((None, None, 0, 3)),
        "strategy": hand.choice(("pack", "spread")),
        "max_retries": hand.choice((0, 3)),
    }
    seconds = hand.choice((0, 0, 0.01, 0.1))
    await _run(one, tasks.on_gpu, options, (one.number, amount, seconds), ())


async def leaving_a_daemon(one: Operation) -> None:
    """A process that a task leaves holds its share until it is ended."""
    task = tasks.leaves_a_daemon.options(num_gpus=1)
    await one.end(one.begin("daemon", task.remote(one.number)), one.number)


async def _run(
    one: Operation,
    task: Any,
    options: dict[str, Any],
    arguments: tuple[object, ...],
    legal: tuple[type[BaseException], ...],
) -> None:
    hand, is_deaf = one.hand, task is tasks.deaf
    (leave,) = hand.choices(LEAVES, (70, 12, 6, 4))
    if is_deaf:
        options["cancel_grace"] = hand.choice((0, 0.02, 0.2))
        leave = "await"
    if is_deaf or hand.random() < 0.08:
        options["timeout"] = hand.choice((0.001, 0.01, 0.05, 0.2))
        legal = (*legal, aiogpu.TaskTimeoutError)
    handle = one.begin(f"{task} {options}", task.options(**options).remote(*arguments))
    pause = hand.choice((0, 0.001, 0.01, 0.05))
    match leave:
        case "await":
            await one.end(handle, one.number, *legal)
        case "cancel":
            await asyncio.sleep(pause)
            handle.cancel()
            await one.end(handle, one.number, *legal, asyncio.CancelledError)
        case "time out":
            waited = asyncio.wait_for(handle, pause)
            await one.attempt(handle, waited, one.number, *legal, TimeoutError)
        case "drop":
            one.drop(handle)


async def tried_once(one: Operation) -> None:
    """It runs once if it has a result, and after its cancel no more."""
    program = os.getpid()
    handle = one.begin("once", tasks.once.remote(one.number, program))
    legal: tuple[type[BaseException], ...] = ()
    if one.hand.random() < 0.3:
        await asyncio.sleep(one.hand.choice((0, 0, 0.001, 0.01)))
        handle.cancel()
        legal = (asyncio.CancelledError,)
    has_result = await one.end(handle, one.number, *legal)
    with suppress(FileNotFoundError):
        os.unlink(tasks.trace_of(one.number, program))
        return
    one.see("what has a result has begun", not has_result)


async def gone_wild(one: Operation) -> None:
    """Its end is told on its own handle alone."""
    handle = one.begin("wild", tasks.wild.remote(one.number))
    await one.end(handle, one.number)


async def together(one: Operation) -> None:
    """Many small ones, and a look at those that have ended."""
    count = one.hand.choice((5, 20, 100))
    handles = [one.begin("echo", tasks.echo.remote(each)) for each in range(count)]
    ready, pending = await aiogpu.wait(handles, num_returns=count // 2, timeout=0.05)
    assert len(ready) + len(pending) == count, (len(ready), len(pending))
    async for handle in aiogpu.as_completed(handles):
        await one.end(handle, lambda found: found in range(count))


async def several(one: Operation) -> None:
    """A task with two results, of which one is an argument of the next."""
    results: Any = tasks.split.remote(one.number)
    first, second = results
    total = tasks.add_up.remote(first, second)
    for what, handle, expected in (
        ("split", first, one.number),
        ("split", second, -one.number),
        ("add up", total, 0),
    ):
        await one.end(one.begin(what, handle), expected)


async def nested(one: Operation) -> None:
    """Tasks that have tasks of their own, cancelled now and then."""
    hand, handle = one.hand, None
    match hand.randrange(3):
        case 0:
            handle = tasks.parent.remote(one.number, hand.randrange(3))
        case 1:
            handle = tasks.soft_parent.remote(one.number)
        case _:
            handle = tasks.forgetful.remote(one.number)
    one.begin("parent", handle)
    legal: tuple[type[BaseException], ...] = ()
    if hand.random() < 0.2:
        await asyncio.sleep(hand.choice((0, 0.002, 0.02)))
        handle.cancel()
        legal = (asyncio.CancelledError,)
    await one.end(handle, one.number, *legal)


async def bloated(one: Operation) -> None:
    """Memory that is needed for a moment."""
    megabytes = one.hand.choice((50, 150, 300))
    handle = one.begin("bloat", tasks.bloat.remote(megabytes))
    await one.end(handle, megabytes)
