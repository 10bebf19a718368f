"""The operations of the load: tasks, streams, values, actors, leases and placements."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import aiogpu
from benchmarks.soak import tasks
from benchmarks.soak.operation import Error, Operate, Operation


class Kind(NamedTuple):
    """A task, its weight, and its legal errors. The right result is its argument."""

    weight: int
    task: Any
    legal: tuple[Error, ...] = ()


TASKS: Final = (
    Kind(30, tasks.echo),
    Kind(15, tasks.sleep),
    Kind(4, tasks.prints),
    Kind(8, tasks.fail, (ValueError,)),
    Kind(4, tasks.flaky, (tasks.FlakyError,)),
    # The last way to die is SystemExit, which is an error like others.
    Kind(4, tasks.die, (aiogpu.TaskError,)),
    Kind(3, tasks.uninterruptible),
)
AMOUNTS: Final = (0.25, 0.5, 0.75, 1, 2)
LEAVES: Final = {"await": 70, "cancel": 12, "time out": 6, "drop": 4}
CANCELLED_STREAM: Final = (asyncio.CancelledError, aiogpu.TaskCancelledError)
SIZES: Final = (1 << 10, 1 << 18, 1 << 20, 5 << 20)
ACTORS: Final = (tasks.SERIAL, tasks.THREADED, tasks.ASYNC)
NAME_ERROR: Final = (aiogpu.errors.ActorNameError,)
BUNDLES: Final[tuple[list[dict[str, float]], ...]] = (
    [{"GPU": 0.5, "CPU": 1}, {"CPU": 1}],
    [{"GPU": 1}, {"GPU": 1}],
    [{"GPU": 0.25}, {"GPU": 0.25}, {"GPU": 0.25}],
)


async def on_cpus(op: Operation) -> None:
    """One of the task kinds, with random options."""
    random = op.random
    (kind,) = random.choices(TASKS, [kind.weight for kind in TASKS])
    options: dict[str, Any] = {"max_retries": random.choice((0, 1, 3))}
    if kind.task is tasks.flaky:
        options["retry_exceptions"] = random.choice((True, [tasks.FlakyError]))
    if random.random() < 0.1:
        options["num_gpus"] = random.choice((0.25, 0.5, 1))
        options["max_calls"] = random.choice((None, 0, 2))
    if random.random() < 0.03:
        options["runtime_env"] = {"env_vars": {"SOAK": str(random.randrange(2))}}
    if random.random() < 0.1:
        options["priority"] = random.randrange(-1, 2)
    await _run(op, kind.task, options, (op.number,), kind.legal)


async def on_gpus(op: Operation) -> None:
    """A share of GPUs that only one task may have, in a fresh or a reused process."""
    random = op.random
    amount = random.choice(AMOUNTS)
    options: dict[str, Any] = {
        "num_gpus": amount,
        "max_calls": random.choice((None, None, 0, 3)),
        "gpu_strategy": random.choice(("pack", "spread")),
        "max_retries": random.choice((0, 3)),
    }
    seconds = random.choice((0, 0, 0.01, 0.1))
    await _run(op, tasks.on_gpu, options, (op.number, amount, seconds), ())


async def _run(
    op: Operation,
    task: Any,
    options: dict[str, Any],
    arguments: tuple[object, ...],
    legal: tuple[Error, ...],
) -> None:
    random, is_stuck = op.random, task is tasks.uninterruptible
    (leave,) = random.choices(list(LEAVES), list(LEAVES.values()))
    if is_stuck:
        options["cancel_grace"] = random.choice((0, 0.02, 0.2))
        leave = "await"
    if is_stuck or random.random() < 0.08:
        options["timeout"] = random.choice((0.001, 0.01, 0.05, 0.2))
        legal = (*legal, aiogpu.TaskTimeoutError)
    handle = op.begin(f"{task} {options}", task.options(**options).remote(*arguments))
    if leave == "drop":
        op.drop()
    elif leave == "time out":
        waited = asyncio.wait_for(handle, random.choice((0, 0.001, 0.01, 0.05)))
        await op.attempt(handle, waited, op.number, *legal, TimeoutError)
    else:
        legal += await op.cancel(handle, leave == "cancel")
        await op.end(handle, op.number, *legal)


async def leaving_a_daemon(op: Operation) -> None:
    """A task leaves a process behind, which holds the share until it is ended."""
    task = tasks.leaves_a_daemon.options(num_gpus=1)
    await op.end(op.begin("daemon", task.remote(op.number)), op.number)


async def misbehaving(op: Operation) -> None:
    """A task damages its own process; no other handle may end with an error."""
    await op.end(op.begin("misbehave", tasks.misbehave.remote(op.number)), op.number)


async def bloated(op: Operation) -> None:
    """A task that needs much memory for a moment."""
    megabytes = op.random.choice((50, 150, 300))
    await op.end(op.begin("bloat", tasks.bloat.remote(megabytes)), megabytes)


async def tried_once(op: Operation) -> None:
    """A task that may begin only once, and never after a cancel."""
    program = os.getpid()
    handle = op.begin("once", tasks.once.remote(op.number, program))
    legal = await op.cancel(handle, 0.3)
    has_result = await op.end(handle, op.number, *legal)
    with suppress(FileNotFoundError):
        os.unlink(tasks.trace_of(op.number, program))
        return
    op.expect("what has a result has begun", not has_result)


async def together(op: Operation) -> None:
    """Many small tasks, with `wait` and `as_completed`."""
    count = op.random.choice((5, 20, 100))
    handles = [op.begin("echo", tasks.echo.remote(each)) for each in range(count)]
    ready, pending = await aiogpu.wait(handles, num_returns=count // 2, timeout=0.05)
    assert len(ready) + len(pending) == count, (len(ready), len(pending))
    async for handle in aiogpu.as_completed(handles):
        await op.end(handle, lambda number: number in range(count))


async def several(op: Operation) -> None:
    """A task with two results, which are arguments of the next task."""
    results: Any = tasks.split.remote(op.number)
    first, second = results
    total = tasks.add_up.remote(first, second)
    for handle, expected in ((first, op.number), (second, -op.number), (total, 0)):
        await op.end(op.begin("several", handle), expected)


async def nested(op: Operation) -> None:
    """Tasks that submit tasks; some are cancelled."""
    random = op.random
    start: Any = random.choice((tasks.parent, tasks.async_parent, tasks.forgetful))
    more = (random.randrange(3),) if start is tasks.parent else ()
    handle = op.begin("parent", start.remote(op.number, *more))
    await op.end(handle, op.number, *await op.cancel(handle, 0.2))


async def stream(op: Operation) -> None:
    """A stream: all items in order, each once, whatever process dies."""
    random = op.random
    to = random.choice((1, 10, 200))
    fatal_at = random.randrange(to) if random.random() < 0.1 else -1
    task: Any = random.choice((tasks.count, tasks.count_async, tasks.pass_on))
    more = (fatal_at,) if task is tasks.count else ()
    source = task.options(
        max_buffered=random.choice((1, 4, 64)), max_retries=random.choice((0, 1, 3))
    ).remote(to, *more)
    taken = op.begin("stream", source)
    until = random.randrange(to) if random.random() < 0.3 else to
    if random.random() < 0.1:
        # Cancelled from outside: the stream ends early, after items in order.
        asyncio.get_running_loop().call_later(0.01, taken.cancel)
        beginning = _is_beginning(until)
        await op.attempt(taken, _consume(taken, until), beginning, *CANCELLED_STREAM)
    else:
        await op.attempt(taken, _consume(taken, until), list(range(until)))


def _is_beginning(until: int) -> Callable[[list[int]], bool]:
    return lambda items: items == list(range(len(items))) and len(items) <= until


async def _consume(source: AsyncIterator[int], until: int) -> list[int]:
    items: list[int] = []
    async for item in source:
        if len(items) == until:
            break
        items.append(item)
    return items


async def mapped(op: Operation) -> None:
    """A map with or without chunks, ordered or not, read to the end or left."""
    random = op.random
    count = random.choice((10, 100, 1000))
    is_ordered = random.random() < 0.7
    options: dict[str, Any] = {
        "limit": random.choice((4, 32, 256)) * 4,
        "ordered": is_ordered,
        "chunk": random.choice((1, 3, 4, "auto")),
    }
    results: Any = op.begin("map", tasks.echo.map(range(count), **options))
    until = random.randrange(count) if random.random() < 0.3 else count
    expected = list(range(until)) if is_ordered else lambda it: len({*it}) == until

    async def consume() -> list[int]:
        async with results:
            return await _consume(results, until)

    await op.attempt(results, consume(), expected)


async def shared(op: Operation) -> None:
    """One value for several tasks; some keep the view."""
    view = tasks.filled(op.random.choice(SIZES), op.number)
    mark = tasks.fingerprint(view)
    value = op.begin("put", aiogpu.put(view))
    handles: list[Any] = []
    for _ in range(op.random.randrange(1, 6)):
        task = op.random.choice((tasks.measure, tasks.keep))
        handles.append(op.begin(f"{task}", task.remote(value)))
    inside = op.begin("inside", tasks.measure_inside.remote([value, value]))
    del value, view
    for handle in handles:
        await op.end(handle, mark)
    await op.end(inside, [mark, mark])


async def passed_on(op: Operation) -> None:
    """A value from task to task; the last view comes here and must not change."""
    size = op.random.choice(SIZES)
    mark = tasks.fingerprint(tasks.filled(size, op.number))
    made = op.begin("make", tasks.make.remote(size, op.number))
    relayed = op.begin("relay", tasks.relay.remote(made))
    measured = op.begin("measure", tasks.measure.remote(relayed))
    await op.end(measured, mark)
    await op.end(relayed, lambda view: tasks.fingerprint(view) == mark)
    if not relayed.exception():
        view = relayed.result()
        del relayed, made
        await asyncio.sleep(op.random.choice((0, 0.05, 0.3)))
        op.expect("a view that was kept", tasks.fingerprint(view) == mark)


async def sent_along(op: Operation) -> None:
    """A large value as a plain argument."""
    view = tasks.filled(op.random.choice(SIZES), op.number)
    handle = op.begin("measure", tasks.measure.remote(view))
    await op.end(handle, tasks.fingerprint(view))


async def given_up(op: Operation) -> None:
    """A task that needs the result of a cancelled task ends with an error."""
    made = op.begin("make", tasks.make.remote(SIZES[2], op.number))
    needs = op.begin("measure", tasks.measure.remote(made))
    await op.cancel(made, 1)
    mark = tasks.fingerprint(tasks.filled(SIZES[2], op.number))
    await op.end(needs, mark, aiogpu.TaskCancelledError)
    await op.end(made, lambda _: True, asyncio.CancelledError)


async def hoarded(op: Operation) -> None:
    """More values than fit into the object memory."""
    views = [tasks.filled(8 << 20, each) for each in range(6)]
    marks = [tasks.fingerprint(view) for view in views]
    values = [op.begin("put", aiogpu.put(view)) for view in views]
    del views
    await op.end(op.begin("inside", tasks.measure_inside.remote(values)), marks)
    for value, mark in zip(values, marks, strict=True):
        await op.end(op.begin("measure", tasks.measure.remote(value)), mark)


async def private_actor(op: Operation) -> None:
    """An actor of this operation alone, with all kinds of calls and of ends."""
    random = op.random
    kind, amount = random.choice(ACTORS), random.choice((0, 0, 0.25, 0.5, 1))
    options: dict[str, Any] = {
        "num_gpus": amount,
        "max_restarts": random.choice((0, 0, 1, 3, -1)),
        "max_task_retries": random.choice((0, 0, 2)),
    }
    actor: Any = op.begin("actor", kind.options(**options).remote(amount))
    if random.random() < 0.3:
        await op.attempt(actor, actor, lambda ready: ready is not None)
    ends = [_called(op, actor, kind, each) for each in range(random.randrange(1, 12))]
    match random.randrange(5):
        case 0:
            aiogpu.kill(actor, no_restart=random.random() < 0.5)
        case 1:
            ends.append(op.end(op.begin("leave", actor.leave.remote(0)), None))
        case 2:
            async with asyncio.timeout(60):
                await op.attempt(actor, _block(actor), None)
        case 3:
            await asyncio.sleep(random.choice((0, 0.05)))
    del actor
    await asyncio.gather(*ends)


async def _block(actor: Any) -> None:
    async with actor:
        pass


def _called(op: Operation, actor: Any, kind: Any, number: int) -> Any:
    """Make a random call; return a coroutine that waits for its end."""
    (what,) = op.random.choices(list(CALLS), [weight for weight, _ in CALLS.values()])
    if what == "wait" and kind is not tasks.ASYNC:
        what = "spin"
    handle, expected, *legal = CALLS[what][1](actor, number)
    op.begin(f"{what} of {actor!r}", handle)
    return _ended(op, handle, expected, legal)


async def _ended(op: Operation, handle: Any, expected: object, legal: Any) -> None:
    legal += await op.cancel(handle, 0.15)
    if isinstance(handle, aiogpu.Stream):
        await op.attempt(handle, _items(handle), expected, *legal)
    else:
        await op.end(handle, expected, *legal)


async def _items(stream: Any) -> list[int]:
    return [item async for item in stream]


def _keep(actor: Any, number: int) -> tuple[Any, ...]:
    view = tasks.filled(1 << 19, number)
    return actor.keep.remote(view), tasks.fingerprint(view)


CALLS: Final[dict[str, tuple[int, Callable[[Any, int], tuple[Any, ...]]]]] = {
    "add": (50, lambda actor, n: (actor.add.remote(n), n + 1)),
    "fail": (8, lambda actor, n: (actor.fail.remote(n), None, ValueError)),
    "spin": (8, lambda actor, n: (actor.spin.remote(n, 0.02), n + 1)),
    "wait": (8, lambda actor, n: (actor.wait.remote(n, 0.05), n + 1)),
    "ask": (8, lambda actor, n: (actor.ask.remote(n), n + 1)),
    "task": (8, lambda actor, n: (tasks.call.remote(actor, n), n + 1, AssertionError)),
    "keep": (6, _keep),
    "count": (
        6,
        lambda actor, _: (actor.count.remote(20), _is_beginning(20), *CANCELLED_STREAM),
    ),
    "die": (4, lambda actor, n: (actor.die.remote(n), None)),
}
"""Calls with their weights; each gives a handle, the right result, legal errors."""


async def named_actor(op: Operation) -> None:
    """A named actor that several operations share; the first one creates it."""
    random = op.random
    kind = random.choice((tasks.ASYNC, tasks.THREADED))
    name = f"shared-{random.randrange(3)}-{kind.__name__}"
    is_looked_up, is_shared = random.random() < 0.2, random.random() < 0.9
    # If another program takes the name at the same time, the calls fail.
    calls_may_fail = op.is_joined and (is_looked_up or not is_shared)
    legal = NAME_ERROR if calls_may_fail else ()
    try:
        if is_looked_up:
            actor: Any = aiogpu.get_actor(name)
        else:
            options = kind.options(name=name, max_restarts=1, get_if_exists=is_shared)
            actor = options.remote()
    except aiogpu.errors.ActorNameError as error:
        op.note(name, error, NAME_ERROR)
        return
    op.begin(name, actor)
    handles = [op.begin("add", actor.add.remote(each)) for each in range(5)]
    if random.random() < 0.1:
        aiogpu.kill(actor)
    for each, handle in enumerate(handles):
        await op.end(handle, each + 1, *legal)


async def actor_pool(op: Operation) -> None:
    """A pool of actors."""
    pool = op.begin("pool", aiogpu.ActorPool(tasks.THREADED.options(max_restarts=2), 2))

    async def map_over() -> list[int]:
        async with pool:
            return await _items(pool.add.map(range(30)))

    await op.attempt("pool", map_over(), list(range(1, 31)))


async def leased(op: Operation) -> None:
    """A lease for this program, sometimes used by a subprocess."""
    amount = op.random.choice((0.25, 0.5, 1, 2))
    timeout = op.random.choice((0.01, 0.5, 20))
    wanted = op.begin("lease", aiogpu.lease(num_gpus=amount, timeout=timeout))

    async def use() -> None:
        beside = None
        async with wanted as gpu:
            with tasks.locked([int(each) for each in gpu.ids], amount):
                await asyncio.sleep(op.random.choice((0, 0.02, 0.1)))
            if op.random.random() < 0.3:
                environ = {**os.environ, **gpu.environ}
                words = "sleep", "0.1"
                beside = await asyncio.create_subprocess_exec(*words, env=environ)
        # The subprocess keeps the share, though the program has returned it.
        if beside is not None:
            await beside.wait()

    await op.attempt("lease", use(), None, aiogpu.TaskTimeoutError)


async def placed(op: Operation) -> None:
    """Tasks and an actor in bundles, some removed while they run."""
    random, bundles = op.random, op.random.choice(BUNDLES)
    strategy: Any = random.choice(("PACK", "SPREAD"))
    group = op.begin("placement", aiogpu.placement(bundles, strategy))
    legal: tuple[Error, ...] = (aiogpu.errors.PlacementRemovedError,)
    handles: list[Any] = []
    try:
        for index, bundle in [*enumerate(bundles)] * 2:
            task: Any = tasks.echo
            more: tuple[float, ...] = ()
            options: dict[str, Any] = {"placement": group, "bundle": index}
            if amount := bundle.get("GPU"):
                task, more = tasks.on_gpu, (amount, 0.01)
                options["num_gpus"] = amount
            handle = task.options(**options).remote(op.number, *more)
            handles.append(op.begin("in a bundle", handle))
        if random.random() < 0.5:
            kind: Any = tasks.SERIAL.options(placement=group, num_cpus=0)
            handles.append(op.begin("actor's", kind.remote().add.remote(op.number - 1)))
        if random.random() < 0.7:
            async with asyncio.timeout(30):
                await group
        if random.random() < 0.7:
            legal = ()
            for handle in handles:
                await op.end(handle, op.number)
    except TimeoutError as error:
        op.note(group, error, (TimeoutError,))
    finally:
        await group.remove()
    if legal:
        for handle in handles:
            await op.end(handle, op.number, *legal)


OPERATIONS: Final[dict[Operate, int]] = {
    on_cpus: 300,
    on_gpus: 100,
    leaving_a_daemon: 3,
    tried_once: 60,
    misbehaving: 6,
    together: 10,
    several: 15,
    nested: 40,
    bloated: 2,
    stream: 40,
    mapped: 12,
    shared: 20,
    passed_on: 20,
    sent_along: 15,
    given_up: 8,
    hoarded: 3,
    private_actor: 50,
    named_actor: 15,
    actor_pool: 3,
    leased: 15,
    placed: 10,
}
