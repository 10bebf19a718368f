"""Calls of functions and actors, awaited and gathered; streams; batches; maps.

On a node of this process; on a service, a node of another process; and on Ray.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import monotonic, perf_counter
from typing import Any, Final, NamedTuple

import aiogpu
from benchmarks import floors, tasks, timing
from benchmarks import service as services
from benchmarks.micro import rows
from benchmarks.micro.rows import Goal, Row, Scale
from benchmarks.processes import descendants, private_memory, status_bytes
from benchmarks.timing import Block, Call, Pair

STREAM: Final = Goal(50_000, "items/s", is_least=True)
BATCHED: Final = Goal(0.85, "x by hand", is_least=True)
BATCH: Final = 32
CLIENTS: Final = 2 * BATCH
"""So that while a batch runs as many wait as make another."""
MAPPED: Final = Goal(1.5, "x by hand")
CHUNK: Final = 400
"""Items of a chunk by hand: 4 ms of work."""
FLAT: Final = Goal(16, "MiB")
MIB: Final = 1 << 20
ON_RAY: Final = Goal(1.15, "x Ray's own")
MB: Final = 1_000_000
CREATION: Final = Goal(10, "ms")
PRIVATE: Final = Goal(10, "MB")
BESIDE_ONE: Final = Goal(2, "x single")
BESIDE_BARE: Final = Goal(2, "x bare in turn")
THROUGH_SERVICE: Final = Goal(1.6, "x two-hop floor")
GATHERED_THROUGH: Final = Goal(0.3, "x floor", is_least=True)
FAIR: Final = Goal(0.95, "Jain's index", is_least=True)
PROGRAMS: Final = 4
IN_FLIGHT: Final = 64
"""Calls that each of the programs has under way."""


async def task(**options: Any) -> Call:
    """Return `f.remote` of a function that does nothing."""
    remote: Any = aiogpu.remote(tasks.noop)
    call: Call = (remote.options(**options) if options else remote).remote
    return call


async def method(cls: Any) -> Call:
    """Return the method of a new actor, which lives as long as the method is held."""
    call: Call = (await aiogpu.remote(cls).remote()).noop.remote
    return call


class Target(NamedTuple):
    """Something to call.

    Attributes:
        make: returns the call, on an open node.
        floor: kind of the floor.
        awaited: goal of the ratio of awaited calls.
        gathered: goal of the ratio of gathered calls.
    """

    make: Callable[[], Awaitable[Call]]
    floor: str
    awaited: Goal
    gathered: Goal | None


OF_TASKS = Goal(1.6, "x floor"), Goal(0.4, "x floor", is_least=True)
OF_ACTORS = Goal(1.5, "x floor"), Goal(0.5, "x floor", is_least=True)
QUARTER: Final = partial(task, num_gpus=0.25, max_calls=0)
TARGETS: Final = {
    "task": Target(task, "blocking", *OF_TASKS),
    "quarter GPU": Target(QUARTER, "blocking", *OF_TASKS),
    "actor": Target(partial(method, tasks.Plain), "blocking", *OF_ACTORS),
    "actor's coroutine": Target(
        partial(method, tasks.Interleaved), "coroutine", OF_ACTORS[0], None
    ),
}


async def latency(scale: Scale) -> list[Row]:
    """Warm calls that do nothing, awaited one at a time.

    With the floor's worker on another core than the driver; and with all on one core.
    """
    found: list[Row] = []
    fault = ""
    for name, target in TARGETS.items():
        with floors.pinned_to(floors.first_core()):
            alone = await _awaited(target, floors.open_floor(target.floor), scale)
        apart = await _awaited(target, floors.open_floor_apart(target.floor), scale)
        # Whether the machine was quiet is told by the floor on one core.
        if target.floor == "blocking":
            fault = rows.slow_floor(alone.floor)
        for where, pair in (("", apart), (", one core", alone)):
            name_here, goal = f"latency: {name}{where}", target.awaited
            found.append(rows.times(name_here, "us", pair, goal, fault=fault))
    return found


async def _awaited(
    target: Target, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        return await beside_floor(await target.make(), floor, scale)


async def beside_floor(
    call: Call, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    """Calls awaited one at a time, in turn with the floor's; ends the floor."""
    async with floor as opened:
        return await one_by_one(opened.call, call, scale(500, 20), scale(40, 2))


async def one_by_one(floor: Call, call: Call, calls: int, blocks: int) -> Pair:
    """Calls awaited one at a time, in turn with others."""
    return await timing.alternate(
        partial(timing.one_at_a_time, floor, calls),
        partial(timing.one_at_a_time, call, calls),
        blocks,
    )


async def gathered(floor: Call, call: Call, calls: int, blocks: int) -> Pair:
    """Calls that are all made before the first is awaited, in turn with others."""
    return await timing.alternate(
        partial(timing.all_at_once, floor, calls),
        partial(timing.all_at_once, call, calls),
        blocks,
    )


async def throughput(scale: Scale) -> list[Row]:
    """Calls that do nothing, 20 000 gathered, beside the floor's with one worker.

    Two workers serve the tasks: two quarters of a GPU fit as well, since each takes a
    CPU besides.
    """
    found, count = [], scale(20_000, 200)
    for name, target in TARGETS.items():
        async with aiogpu.init(num_cpus=2, num_gpus=1), floors.open_floor() as floor:
            call = await target.make()
            pair = await gathered(floor.call, call, count, scale(5, 2))
            del call
        row = f"throughput: {name}"
        found.append(rows.rates(row, "calls/s", pair, count, target.gathered))
    return found


async def streams(scale: Scale) -> list[Row]:
    """Small items of a generator with the default window, beside a bare sender."""
    found, count = [], scale(100_000, 500)
    kinds = {"plain": tasks.numbers, "coroutine": tasks.numbers_async}
    async with aiogpu.init(num_cpus=1), floors.open_floor("stream") as floor:
        for name, generator in kinds.items():
            start: Any = aiogpu.remote(generator).remote
            pair = await timing.alternate(
                partial(timing.timed, partial(floor.items, count)),
                partial(timing.timed, partial(timing.consume, start, count)),
                scale(5, 2),
            )
            found.append(
                rows.rates(
                    f"streams: {name}", "items/s", pair, count, STREAM, absolute=True
                )
            )
    return found


class Batching:
    """An actor with a plain method and one under `batch`; each batch takes 1 ms."""

    async def on_loop(self, numbers: list[int]) -> list[int]:
        return await tasks.batch_on_loop(numbers)

    async def in_thread(self, numbers: list[int]) -> list[int]:
        return await tasks.batch_in_thread(numbers)

    batched_on_loop = aiogpu.batch(max_size=BATCH)(on_loop)
    batched_in_thread = aiogpu.batch(max_size=BATCH)(in_thread)


async def batching(scale: Scale) -> list[Row]:
    """Single calls gathered by `batch`, beside lists of 32 passed by hand.

    64 clients call again and again; a batch takes 1 ms, on the loop or in a thread; in
    this process, and in an actor, to which each call is sent by itself.
    """
    batch: Any = aiogpu.batch(max_size=BATCH)
    on_loop, in_thread = tasks.batch_on_loop, tasks.batch_in_thread
    async with aiogpu.init(num_cpus=2):
        actor: Any = await aiogpu.remote(Batching).remote()
        by_hand, by_item = actor.on_loop.remote, actor.batched_on_loop.remote
        threaded, each = actor.in_thread.remote, actor.batched_in_thread.remote
        return [
            await _batched("on the loop", on_loop, batch(on_loop), scale),
            await _batched("in a thread", in_thread, batch(in_thread), scale),
            await _batched("in an actor, on the loop", by_hand, by_item, scale),
            await _batched("in an actor, in a thread", threaded, each, scale),
        ]


async def _batched(where: str, by_hand: Any, by_item: Any, scale: Scale) -> Row:
    count = scale(20_000, 200)

    async def lists() -> None:
        for first in range(0, count, BATCH):
            items = list(range(first, min(first + BATCH, count)))
            assert await by_hand(items) == items

    async def client(items: Iterator[int]) -> None:
        for item in items:
            assert await by_item(item) == item

    async def clients() -> None:
        items = iter(range(count))
        await asyncio.gather(*(client(items) for _ in range(CLIENTS)))

    runs = partial(timing.timed, lists), partial(timing.timed, clients)
    pair = await timing.alternate(*runs, scale(5, 2))
    return rows.rates(f"batching: {where}", "calls/s", pair, count, BATCHED, lowest=0)


async def mapping(scale: Scale) -> list[Row]:
    """`f.map(items, chunk="auto")` of 10 us each, beside chunks of 400 made by hand."""
    count, growths = scale(1_000_000, 2_000), []
    expected = sum(range(count))
    by_hand, by_map = aiogpu.remote(tasks.busy_each), aiogpu.remote(tasks.busy)

    async def lists() -> None:
        items = list(range(count))
        starts = range(0, count, CHUNK)
        chunks = (by_hand.remote(items[start : start + CHUNK]) for start in starts)
        found = sum(map(sum, await asyncio.gather(*chunks)))
        assert found == expected, found

    async def mapped() -> None:
        found = before = 0
        async for number in by_map.map(range(count), chunk="auto"):
            found += number
            if number == count // 10:
                before = status_bytes("RssAnon")
        growths.append(status_bytes("RssAnon") - before)
        assert found == expected, found

    async def trimmed() -> Block:
        gc.collect()
        CDLL(None).malloc_trim(0)  # free memory goes back, so that growth is seen
        return await timing.timed(mapped)

    async with aiogpu.init(num_cpus=2):
        pair = await timing.alternate(
            partial(timing.timed, lists), trimmed, scale(3, 1)
        )
    note = "grown from the first tenth of the items to the last, at most"
    growth = max(growths[1:]) / MIB
    return [
        rows.times("map: 10 us an item", "us", pair, MAPPED, calls=count),
        Row("map: memory of the driver", "MiB", growth, FLAT, note),
    ]


async def creation(scale: Scale) -> list[Row]:
    """`await A.remote()`, one after the other; none ends meanwhile."""

    async def create(cls: type) -> Block:
        living: list[Any] = []

        async def one(_: int) -> None:
            living.append(await aiogpu.remote(cls).remote())

        return await timing.one_at_a_time(one, scale(50, 4))

    kinds = {"plain": tasks.Plain, "coroutine": tasks.Interleaved}
    async with aiogpu.init(num_cpus=2):
        runs = [partial(create, cls) for cls in kinds.values()]
        blocks = await timing.rotate(runs, scale(8, 1))
    return [
        rows.plain(f"actors: {name} created", found, CREATION)
        for name, found in zip(kinds, blocks, strict=True)
    ]


async def many_actors(scale: Scale) -> list[Row]:
    """A thousand idle actors: their memory; calls to one of them and to each in turn.

    A single actor is called, then one of many, then each of them in turn; as many bare
    workers, called in turn as well, tell how much of it is the machine's.
    """
    count = scale(1_000, 8)

    async def in_turn(actors: list[Call]) -> Pair:
        turn = cycle(actors)

        def call(number: int) -> Awaitable[object]:
            return next(turn)(number)

        return await one_by_one(floor.call, call, scale(500, 20), scale(10, 2))

    async with AsyncExitStack() as stack:
        # Without learning: a new zygote in the middle would have other memory.
        await stack.enter_async_context(aiogpu.init(num_cpus=2, preload=()))
        first = await method(tasks.Plain)
        floor = await stack.enter_async_context(floors.open_floor())
        single = await in_turn([first])
        async with floors.open_floors(count) as workers:
            bare = await in_turn([each.call for each in workers])
        before, start = descendants(), perf_counter()
        rest = await asyncio.gather(*(method(tasks.Plain) for _ in range(count - 1)))
        took = perf_counter() - start
        new = [pid for pid in descendants() if pid not in before]
        private = private_memory(new) / len(rest) / MB
        one, each = await in_turn([first]), await in_turn([first, *rest])
        del first, rest
    note = f"{count:,} actors, all processes that came with them; made in {took:.1f} s"
    return [
        Row("many_actors: memory", "MB each", private, PRIVATE, note),
        _beside("one called", single, one, BESIDE_ONE),
        _beside("each in turn", single, each, BESIDE_ONE),
        _beside("beside bare ones", bare, each, BESIDE_BARE),
    ]


def _beside(name: str, single: Pair, many: Pair, goal: Goal) -> Row:
    """Both beside the floor's calls of their own minutes, then beside each other."""
    note = f"{many.ratio:.2f} and {single.ratio:.2f} x the floor"
    ratio, own = many.ratio / single.ratio, rows.times("", "us", single)
    row = rows.times(f"many_actors: {name}", "us", many, goal, note, ratio=ratio)
    samples = single.workload
    return replace(row, floor=own.p50, floor_p99=own.p99, floor_samples=samples)


async def service(scale: Scale) -> list[Row]:
    """Awaited calls beside a relay's, gathered beside the floor's; four programs."""
    count = scale(20_000, 200)
    async with services.service("--num-cpus=2", "--num-gpus=1") as address:
        async with aiogpu.init(address=address, log_to_driver=False):
            call: Any = aiogpu.remote(tasks.noop).remote
            with floors.pinned_to(floors.first_core()):
                async with floors.open_floor() as floor:
                    await timing.one_at_a_time(floor.call, scale(500, 20))
                    alone = [await timing.one_at_a_time(floor.call, scale(500, 20))]
            one = await beside_floor(call, floors.open_floor("relay"), scale)
            async with floors.open_floor() as floor:
                many = await gathered(floor.call, call, count, scale(5, 2))
        fault = rows.slow_floor(alone)
        return [
            rows.times("service: one call", "us", one, THROUGH_SERVICE, fault=fault),
            rows.rates("service: gathered", "calls/s", many, count, GATHERED_THROUGH),
            await _fairness(address, scale(50, 5) / 10),
        ]


async def _fairness(address: str, seconds: float) -> Row:
    words = sys.executable, "-m", __name__, address, f"{seconds}"
    programs = [
        await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        for _ in range(PROGRAMS)
    ]
    for program in programs:
        assert program.stdout is not None
        assert await program.stdout.readline() == b"ready\n"
    # They begin when their input ends.
    found = await asyncio.gather(*(each.communicate(b"") for each in programs))
    counts = [int(line) for line, _ in found]
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    note = f"calls in {seconds:g} s: {', '.join(map(str, counts))}"
    return Row(f"service: {PROGRAMS} programs", "Jain's index", jain, FAIR, note)


async def program(address: str, seconds: float) -> None:
    """Be one of several programs, which call for so long."""
    done = 0
    async with aiogpu.init(address=address, log_to_driver=False):
        call: Any = aiogpu.remote(tasks.noop).remote
        await call(1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        until = monotonic() + seconds

        async def lane() -> None:
            nonlocal done
            while monotonic() < until:
                await call(1)
                done += 1

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        print(done, flush=True)


async def ray(scale: Scale) -> list[Row]:
    """The same calls on one Ray cluster by Ray's own interface and by aiogpu.

    One awaited and 2 000 gathered, of a task and of three kinds of actors.
    """
    rows.require("ray")
    import ray

    remote: Any = aiogpu.remote
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        theirs, ours = ray.remote(tasks.noop), remote(tasks.noop)
        found = await _on_ray("a task", theirs, ours, scale)
        for name, cls, options in (
            ("an actor", tasks.Plain, {}),
            ("a threaded actor", tasks.Plain, {"max_concurrency": 2}),
            ("an actor's coroutine", tasks.Interleaved, {}),
        ):
            mine = await remote(num_cpus=0, **options)(cls).remote()
            their = ray.remote(num_cpus=0, **options)(cls).remote()
            found += await _on_ray(name, their.noop, mine.noop, scale)
            del mine, their
    return found


async def _on_ray(what: str, theirs: Any, ours: Any, scale: Scale) -> list[Row]:
    # A call on Ray takes ten times as long as one of ours, so there are fewer.
    both, count = (theirs.remote, ours.remote), scale(2_000, 20)
    single = await one_by_one(*both, scale(50, 2), scale(40, 2))
    many = await gathered(*both, count, scale(5, 2))
    return [
        rows.times(f"ray: one call, {what}", "us", single, ON_RAY),
        rows.times(f"ray: gathered, {what}", "us", many, ON_RAY, calls=count),
    ]


if __name__ == "__main__":
    aiogpu.run(program(sys.argv[1], float(sys.argv[2])))
