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
from time import monotonic, perf_counter, sleep
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
"""While a batch runs, enough clients wait to fill the next one."""
MAPPED: Final = Goal(1.5, "x by hand")
CHUNK: Final = 400
"""Items of a chunk made by hand: 4 ms of work."""
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
"""Unanswered calls of each program."""


async def task(**options: Any) -> Call:
    """Return `f.remote` of a function that does nothing."""
    remote: Any = aiogpu.remote(tasks.noop)
    call: Call = (remote.options(**options) if options else remote).remote
    return call


async def method(cls: Any) -> Call:
    """Return the method of a new actor, which lives as long as the method."""
    call: Call = (await aiogpu.remote(cls).remote()).noop.remote
    return call


class Target(NamedTuple):
    """A kind of call.

    Attributes:
        make: returns the call, on an open node.
        floor: kind of the floor's worker.
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
    table: list[Row] = []
    fault = ""
    for name, target in TARGETS.items():
        with floors.pinned_to(floors.first_core()):
            alone = await _awaited(target, floors.open_floor(target.floor), scale)
        apart = await _awaited(target, floors.open_floor_apart(target.floor), scale)
        # The blocking floor on one core shows if the machine was busy.
        if target.floor == "blocking":
            fault = rows.slow_floor(alone.floor)
        for where, pair in (("", apart), (", one core", alone)):
            name_here, goal = f"latency: {name}{where}", target.awaited
            table.append(rows.times(name_here, "us", pair, goal, fault=fault))
    return table


async def _awaited(
    target: Target, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        return await beside_floor(await target.make(), floor, scale)


async def beside_floor(
    call: Call, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    """Measure calls awaited one at a time, in turn with the floor's; end the floor."""
    async with floor as opened:
        counts = scale(500, 20), scale(40, 2)
        return await in_turn(timing.one_at_a_time, opened.call, call, *counts)


async def in_turn(
    run: Callable[[Call, int], Awaitable[Block]],
    floor: Call,
    call: Call,
    calls: int,
    blocks: int,
) -> Pair:
    """Measure blocks of calls, in turn with the floor's.

    Args:
        run: `timing.one_at_a_time` or `timing.all_at_once`.
        floor, call: the calls.
        calls: calls in a block.
        blocks: blocks of each.
    """
    runs = partial(run, floor, calls), partial(run, call, calls)
    return await timing.alternate(*runs, blocks)


async def throughput(scale: Scale) -> list[Row]:
    """Calls that do nothing, 20 000 gathered, beside the floor's with one worker.

    Two workers serve the tasks. Two quarters of a GPU fit as well: each takes one CPU.
    """
    table, count = [], scale(20_000, 200)
    for name, target in TARGETS.items():
        async with aiogpu.init(num_cpus=2, num_gpus=1), floors.open_floor() as floor:
            call = await target.make()
            both = floor.call, call
            pair = await in_turn(timing.all_at_once, *both, count, scale(5, 2))
            del call, both
        row = f"throughput: {name}"
        table.append(rows.rates(row, "calls/s", pair, count, target.gathered))
    return table


async def streams(scale: Scale) -> list[Row]:
    """Small items of a generator with the default window, beside a bare sender."""
    table, count = [], scale(100_000, 500)
    kinds = {"plain": tasks.numbers, "coroutine": tasks.numbers_async}
    async with aiogpu.init(num_cpus=1), floors.open_floor("stream") as floor:
        for name, generator in kinds.items():
            start: Any = aiogpu.remote(generator).remote
            both = partial(floor.items, count), partial(timing.consume, start, count)
            runs = [partial(timing.timed, each) for each in both]
            pair = timing.Pair(*await timing.rotate(runs, scale(5, 2)))
            row = f"streams: {name}"
            table.append(rows.rates(row, "items/s", pair, count, STREAM, absolute=True))
    return table


class Batching:
    """An actor with a plain method and one under `batch`; each batch takes 1 ms."""

    async def on_loop(self, numbers: list[int]) -> list[int]:
        """Hold the event loop for a millisecond."""
        tasks.be_busy(0.001)
        return numbers

    async def in_thread(self, numbers: list[int]) -> list[int]:
        """Release the interpreter for a millisecond, as code on a GPU does."""
        await asyncio.to_thread(sleep, 0.001)
        return numbers

    batched_on_loop = aiogpu.batch(max_size=BATCH)(on_loop)
    batched_in_thread = aiogpu.batch(max_size=BATCH)(in_thread)


async def batching(scale: Scale) -> list[Row]:
    """Single calls gathered by `batch`, beside lists of 32 passed by hand.

    64 clients call again and again; a batch takes 1 ms, on the loop or in a thread. In
    this process, and in an actor that gets each call by itself.
    """
    here = Batching()
    async with aiogpu.init(num_cpus=2):
        actor: Any = await aiogpu.remote(Batching).remote()
        on_loop, each_on_loop = actor.on_loop.remote, actor.batched_on_loop.remote
        threaded, each_threaded = actor.in_thread.remote, actor.batched_in_thread.remote
        return [
            await _batched(f"batching: {where}", by_hand, by_item, scale)
            for where, by_hand, by_item in (
                ("on the loop", here.on_loop, here.batched_on_loop),
                ("in a thread", here.in_thread, here.batched_in_thread),
                ("in an actor, on the loop", on_loop, each_on_loop),
                ("in an actor, in a thread", threaded, each_threaded),
            )
        ]


async def _batched(name: str, by_hand: Any, by_item: Any, scale: Scale) -> Row:
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
    return rows.rates(name, "calls/s", pair, count, BATCHED, lowest=0)


async def mapping(scale: Scale) -> list[Row]:
    """`f.map(items, chunk="auto")` of 10 us each, beside chunks of 400 made by hand."""
    count, growths = scale(1_000_000, 2_000), []
    expected = sum(range(count))
    by_hand, by_map = aiogpu.remote(tasks.busy_each), aiogpu.remote(tasks.busy)

    async def lists() -> None:
        items = list(range(count))
        starts = range(0, count, CHUNK)
        chunks = (by_hand.remote(items[start : start + CHUNK]) for start in starts)
        total = sum(map(sum, await asyncio.gather(*chunks)))
        assert total == expected, total

    async def mapped() -> None:
        total = before = 0
        async for number in by_map.map(range(count), chunk="auto"):
            total += number
            if number == count // 10:
                before = status_bytes("RssAnon")
        growths.append(status_bytes("RssAnon") - before)
        assert total == expected, total

    async def trimmed() -> Block:
        gc.collect()
        CDLL(None).malloc_trim(0)  # returns free memory, so that growth shows
        return await timing.timed(mapped)

    by_lists = partial(timing.timed, lists)
    async with aiogpu.init(num_cpus=2):
        pair = await timing.alternate(by_lists, trimmed, scale(3, 1))
    note = "largest growth from the first tenth of the items to the last item"
    growth = max(growths[1:]) / MIB
    return [
        rows.times("map: 10 us an item", "us", pair, MAPPED, calls=count),
        Row("map: memory of the driver", "MiB", growth, FLAT, note),
    ]


async def creation(scale: Scale) -> list[Row]:
    """`await A.remote()`, one after the other; no actor ends meanwhile."""

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
        rows.plain(f"actors: {name} created", samples, CREATION)
        for name, samples in zip(kinds, blocks, strict=True)
    ]


async def many_actors(scale: Scale) -> list[Row]:
    """A thousand idle actors: their memory; calls to one of them and to each in turn.

    Calls a single actor, then one of many, then each of them in turn. As many bare
    workers, also called in turn, show how much of the time is due to the machine.
    """
    count = scale(1_000, 8)

    async def each_in_turn(actors: list[Call]) -> Pair:
        turn = cycle(actors)

        def call(number: int) -> Awaitable[object]:
            return next(turn)(number)

        counts = scale(500, 20), scale(10, 2)
        return await in_turn(timing.one_at_a_time, floor.call, call, *counts)

    async with AsyncExitStack() as stack:
        # preload=() turns off learning: a new zygote would have other memory.
        await stack.enter_async_context(aiogpu.init(num_cpus=2, preload=()))
        first = await method(tasks.Plain)
        floor = await stack.enter_async_context(floors.open_floor())
        single = await each_in_turn([first])
        async with floors.open_floors(count) as workers:
            bare = await each_in_turn([each.call for each in workers])
        before, start = descendants(), perf_counter()
        rest = await asyncio.gather(*(method(tasks.Plain) for _ in range(count - 1)))
        took = perf_counter() - start
        new = [pid for pid in descendants() if pid not in before]
        private = private_memory(new) / len(rest) / MB
        one, each = await each_in_turn([first]), await each_in_turn([first, *rest])
        del first, rest
    note = f"{count:,} actors with all their processes; created in {took:.1f} s"
    return [
        Row("many_actors: memory", "MB each", private, PRIVATE, note),
        _beside("one called", single, one, BESIDE_ONE),
        _beside("each in turn", single, each, BESIDE_ONE),
        _beside("beside bare ones", bare, each, BESIDE_BARE),
    ]


def _beside(name: str, single: Pair, many: Pair, goal: Goal) -> Row:
    """Compare both with the floor of their own minutes, then with each other."""
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
                both = floor.call, call
                many = await in_turn(timing.all_at_once, *both, count, scale(5, 2))
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
    # The programs begin when their input ends.
    outputs = await asyncio.gather(*(each.communicate(b"") for each in programs))
    counts = [int(line) for line, _ in outputs]
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    note = f"calls in {seconds:g} s: {', '.join(map(str, counts))}"
    return Row(f"service: {PROGRAMS} programs", "Jain's index", jain, FAIR, note)


async def program(address: str, seconds: float) -> None:
    """Run one of the programs: call for some seconds, print how often."""
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
    """The same calls on one Ray cluster, by Ray's own interface and by aiogpu.

    One awaited and 2 000 gathered, of a task and of three kinds of actors.
    """
    rows.require("ray")
    import ray

    remote: Any = aiogpu.remote
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        theirs, ours = ray.remote(tasks.noop), remote(tasks.noop)
        table = await _on_ray("a task", theirs, ours, scale)
        for name, cls, options in (
            ("an actor", tasks.Plain, {}),
            ("a threaded actor", tasks.Plain, {"max_concurrency": 2}),
            ("an actor's coroutine", tasks.Interleaved, {}),
        ):
            ours = await remote(num_cpus=0, **options)(cls).remote()
            theirs = ray.remote(num_cpus=0, **options)(cls).remote()
            table += await _on_ray(name, theirs.noop, ours.noop, scale)
            del ours, theirs
    return table


async def _on_ray(what: str, theirs: Any, ours: Any, scale: Scale) -> list[Row]:
    # A call on Ray takes ten times as long as a call of aiogpu, so there are fewer.
    both, count = (theirs.remote, ours.remote), scale(2_000, 20)
    single = await in_turn(timing.one_at_a_time, *both, scale(50, 2), scale(40, 2))
    many = await in_turn(timing.all_at_once, *both, count, scale(5, 2))
    return [
        rows.times(f"ray: one call, {what}", "us", single, ON_RAY),
        rows.times(f"ray: gathered, {what}", "us", many, ON_RAY, calls=count),
    ]


if __name__ == "__main__":
    aiogpu.run(program(sys.argv[1], float(sys.argv[2])))
