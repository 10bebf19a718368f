"""The workloads: the work that every system does, whatever the system."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from socket import socket
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, Final, NamedTuple

from aiogpu.core.model.units import UNIT
from benchmarks import tasks
from benchmarks.field.systems import Need, Preload, System, UnsupportedError
from benchmarks.floors import frame, open_floor
from benchmarks.forks import open_forks, zygote_image
from benchmarks.latch import connected, open_latch
from benchmarks.processes import cpu_time, descendants, memory
from benchmarks.simulation.policies import FirstFit
from benchmarks.simulation.simulate import simulate
from benchmarks.simulation.trace import SizeClass, Trace, draw
from benchmarks.timing import Call, consume, percentile

Figures = list[list[float]]
"""The samples of each metric of the workload, in seconds or bytes."""


class Amount(NamedTuple):
    """The work of one block.

    Attributes:
        calls: the most calls.
        seconds: time after which no further call begins.
        waiting: tasks that wait at once, in `waiting`.
        tasks: tasks of one day.
    """

    calls: int
    seconds: float
    waiting: int = 0
    tasks: int = 0


class Metric(NamedTuple):
    """One figure of a workload, for one call, item or task; less is better."""

    title: str
    unit: str = "s"


class Setup(NamedTuple):
    """How a system is started for a workload.

    Attributes:
        is_fresh: start the system anew for each block, and run no other meanwhile.
        is_open: False if the workload starts the system by itself.
    """

    num_cpus: int = 2
    num_gpus: int = 0
    preload: Preload = None
    is_fresh: bool = False
    is_open: bool = True


@dataclass(slots=True)
class Context:
    """The state of a workload while it runs.

    Attributes:
        system: the system; None for the floor.
        stack: closed at the end of the workload.
        notes: facts about this system's figures.
        size: number of items at once in a block; 0 until it is known.
    """

    system: System | None
    stack: AsyncExitStack
    notes: dict[str, str] = field(default_factory=dict)
    size: int = 0

    async def open_floor(self, kind: str = "blocking") -> Any:
        """Start a bare worker."""
        return await self.stack.enter_async_context(open_floor(kind))


Block = Callable[[Amount], Awaitable[Figures]]


class Workload(NamedTuple):
    """One workload.

    Attributes:
        prepare: returns a block; raises `UnsupportedError`.
        floor: description of the floor.
        seconds: approximate time for the blocks of all systems together.
        needs: a module without which no system can run the workload.
        features: features that a system must have, by the names in `LACKS`.
    """

    metrics: Sequence[Metric]
    floor: str
    prepare: Callable[[Context], Awaitable[Block]]
    setup: Setup = Setup()
    seconds: float = 20.0
    needs: str = ""
    features: Sequence[str] = ()


async def awaited(call: Call, amount: Amount) -> Figures:
    """Make one call after the other, at least one."""
    samples: list[float] = []
    until = perf_counter() + amount.seconds
    for number in range(amount.calls):
        if samples and perf_counter() > until:
            break
        samples.append(await _seconds(call, number))
    return [samples]


async def at_once(
    whole: Call, factor: int, context: Context, amount: Amount
) -> Figures:
    """Make as many calls at once as fill a block; return the mean time of one.

    The first block finds the number, and later blocks may raise it. `factor` times the
    number of awaited calls is the most.
    """
    most = amount.calls * factor
    if not context.size:
        await whole(4)  # starts workers that start late
        size, took = 1, 0.0
        while took < amount.seconds / 4 and size < most:
            size = min(4 * size, most)
            took = await _seconds(whole, size)
        context.size = max(4, min(most, int(size * amount.seconds / (took or 1))))
    size = context.size
    took = await _seconds(whole, size)
    context.notes["size"] = f"{size:,} at once"
    if took < amount.seconds / 2:  # the machine was busy at first
        context.size = min(most, 2 * size)
    return [[took / size]]


async def _seconds(call: Call, number: int) -> float:
    start = perf_counter()
    await call(number)
    return perf_counter() - start


def gathering(call: Call) -> Call:
    """Return a function that makes a number of calls at once."""

    async def gather(count: int) -> None:
        await asyncio.gather(*map(call, range(count)))

    return gather


BARE: Final = "a blocking worker on a Unix socket, no scheduler"


def calls(title: str, is_actor: bool = False, *, factor: int = 0) -> Workload:
    """Calls that do nothing: awaited one by one, or gathered if `factor` is given."""

    async def prepare(context: Context) -> Block:
        if context.system is None:
            call: Call = (await context.open_floor()).call
        elif is_actor:
            call = await context.system.actor(tasks.Plain)
        else:
            call = context.system.task(tasks.noop, Need())
        if factor:
            return partial(at_once, gathering(call), factor, context)
        return partial(awaited, call)

    features = ["actors"] if is_actor else []
    return Workload([Metric(title)], BARE, prepare, features=features)


async def _stream(context: Context) -> Block:
    if context.system is None:
        whole: Call = (await context.open_floor("stream")).items
    else:
        whole = partial(consume, context.system.stream(tasks.numbers))
    return partial(at_once, whole, 100, context)


def value(size: int, label: str, *, is_passed: bool = False) -> Workload:
    """An array as an argument, or from task to task; a small one in a quick run."""
    times = 2 if is_passed else 1

    async def prepare(context: Context) -> Block:
        numpy = import_module("numpy")
        if context.system is None:
            floor = await context.open_floor()
        else:
            give, use = map(context.system.taking, (tasks.give_kept, tasks.first_of))
        arrays: dict[int, Any] = {}

        async def block(amount: Amount) -> Figures:
            actual = min(size, 1_000_000) if amount.calls < 100 else size
            if actual not in arrays:
                arrays[actual] = [numpy.ones(actual, "uint8") for _ in "ab"]
            source, target = arrays[actual]

            async def copy(number: int) -> None:
                for _ in range(times):
                    await floor.call(number)
                numpy.copyto(target, source)

            if context.system is None:
                return await awaited(copy, amount)
            if is_passed:
                return await awaited(lambda _: use(give(actual)), amount)
            return await awaited(lambda _: use(source), amount)

        return block

    title = f"an array of {label} {'from task to task' if is_passed else 'as argument'}"
    floor = f"{times} calls of the floor and a copy of the array within one process"
    features = ["handles"] if is_passed else []
    more: Any = {"seconds": 14, "needs": "numpy", "features": features}
    return Workload([Metric(title)], floor, prepare, **more)


STOPS_WITHIN: Final = 3.0
"""Seconds after which code counts as not stopped."""
SPINNING: Final = """
from benchmarks.tasks import spin
while True:
    try:
        spin({})
    except KeyboardInterrupt:
        pass
"""


async def _cancel(context: Context) -> Block:
    """Measure the time from the cancel until the code's connection ends."""
    latch = context.stack.enter_context(open_latch())
    if context.system is None:
        words = sys.executable, "-c", SPINNING.format(os.getpid())
        process = await asyncio.create_subprocess_exec(*words)
        context.stack.callback(process.kill)
    else:
        call = context.system.task(tasks.spin, Need())

    async def block(amount: Amount) -> Figures:
        samples: list[float] = []
        until = perf_counter() + amount.seconds
        while not samples or (len(samples) < 10 and perf_counter() < until):
            if context.system is None:
                interrupt = partial(process.send_signal, signal.SIGINT)
                samples.append(await _stopped(latch, interrupt))
            else:
                handle = call(os.getpid())
                samples.append(await _stopped(latch, handle.cancel))
                await asyncio.wait([handle])
        return [samples]

    return block


async def _stopped(latch: socket, cancel: Callable[[], object]) -> float:
    loop = asyncio.get_running_loop()
    with await connected(latch) as connection:
        start = perf_counter()
        cancel()
        try:
            await asyncio.wait_for(loop.sock_recv(connection, 1), STOPS_WITHIN)
        except TimeoutError:
            raise UnsupportedError(
                f"the code still ran {STOPS_WITHIN:g} s after the cancel"
            ) from None
        return perf_counter() - start


def isolation(function: Callable[[int], Any], library: str = "") -> Workload:
    """Gathered tasks with a quarter of a GPU and a fresh process each."""
    preload = (library,) if library else None

    async def prepare(context: Context) -> Block:
        if context.system is None:
            forks = context.stack.enter_context(open_forks(zygote_image(preload)))

            async def fork(amount: Amount) -> Figures:
                (each,) = await forks.fork_mean(min(amount.calls, 50))
                return [[each / 1e9]]

            return fork
        need = Need(0.25, True)
        if reason := context.system.lacks("gpus"):
            need = Need(is_isolated=True)
            context.notes["gpus"] = f"{reason}: a fresh process only"
        call = context.system.task(function, need)
        if library and context.system.lacks("preload"):
            context.notes["imports"] = f"each process imports {library} anew"

        async def tasks_at_once(amount: Amount) -> Figures:
            few = Amount(min(amount.calls, 200), 2 * amount.seconds)
            return await at_once(gathering(call), 1, context, few)

        return tasks_at_once

    beside = f", with {library}" if library else ""
    return Workload(
        [Metric(f"a GPU task in a fresh process{beside}")],
        f"fork, _exit and reaping of aiogpu's own zygote{beside}",
        prepare,
        Setup(num_cpus=4, num_gpus=1, preload=preload),
        needs=library,
        features=["isolation"],
    )


DAY_GPUS: Final = 4
DAY_CLASSES: Final = tuple(
    SizeClass(UNIT * quarters // 4, weight, 0.045)
    for quarters, weight in ((1, 400), (2, 250), (4, 250), (8, 100))
)
DAY_LIMIT: Final = 20.0
"""Seconds after which a day is given up."""


def day(title: str, share: float, is_isolated: bool = False) -> Workload:
    """A random load of fractions, whole GPUs and pairs, which comes in waves."""

    async def prepare(context: Context) -> Block:
        calls: list[Call] = []
        if context.system is not None:
            for each in DAY_CLASSES:
                need = Need(each.amount / UNIT, is_isolated)
                calls.append(context.system.task(tasks.hold, need))
            # Eight tasks first, to start the processes.
            await asyncio.gather(*(calls[0](50) for _ in range(8)))

        async def block(amount: Amount) -> Figures:
            count = max(4, round(amount.tasks * share))
            trace = draw(count, DAY_GPUS, 10, DAY_CLASSES, (0.005, 0.6))
            first_fit = simulate(trace, FirstFit(trace))
            makespan, waits = first_fit.ended, first_fit.waits
            if context.system is not None:
                makespan, waits = await _live(trace, calls)
            used = trace.work / DAY_GPUS
            context.notes["utilisation"] = f"utilisation {used / makespan:.0%}"
            p50, p99 = (percentile([waits], each) for each in (50, 99))
            return [[makespan], [p50], [p99]]

        return block

    what = ("makespan", "waiting, p50", "waiting, p99")
    return Workload(
        [Metric(f"{title}: {each}") for each in what],
        "first fit, at no cost",
        prepare,
        Setup(num_cpus=16, num_gpus=DAY_GPUS),
        seconds=45,
        features=["gpus", "isolation"] if is_isolated else ["gpus"],
    )


async def _live(trace: Trace, calls: Sequence[Call]) -> tuple[float, list[float]]:
    """Submit each task when it arrives; return the makespan and all waiting times."""
    begin = monotonic() + 0.05

    async def one(arrival: float, size: int, duration: float) -> Any:
        await asyncio.sleep(begin + arrival - monotonic())
        return await calls[size](round(1000 * duration))

    drawn = zip(trace.arrivals, trace.sizes, trace.durations, strict=True)
    try:
        async with asyncio.timeout(DAY_LIMIT):
            spans = await asyncio.gather(*(one(*each) for each in drawn))
    except TimeoutError:
        raise UnsupportedError(
            f"the day's {len(trace)} tasks had not ended within {DAY_LIMIT:g} s"
        ) from None
    pairs = zip(spans, trace.arrivals, strict=True)
    waits = [max(0.0, start - begin - arrival) for (start, _), arrival in pairs]
    return max(end for _, end in spans) - begin, waits


async def _start(context: Context) -> Block:
    source = context.system.first_result() if context.system else "print(0, flush=True)"

    async def block(_amount: Amount) -> Figures:
        return [[await _until_number(source)]]

    return block


async def _until_number(source: str, **variables: str) -> float:
    """Run a program to its end; return the seconds until it printed a number."""
    start = perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source),
        stdout=PIPE,
        stderr=DEVNULL,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    took = perf_counter() - start
    await process.wait()  # not timed, but must not disturb the next block
    if not line.strip().isdigit():
        raise RuntimeError("the program ended without a result")
    return took


IMPORTS: Final = """
from benchmarks.field.programs.{} import work
work(0)
print(1, flush=True)
"""


def real_work(title: str, program: str, library: str) -> Workload:
    """A whole program: forty tasks that need a library whose import is slow."""

    async def prepare(context: Context) -> Block:
        system = context.system
        source = IMPORTS.format(program) if system is None else ""
        if system is not None:
            source = system.real_work(program)
            if system.lacks("isolation"):
                context.notes["processes"] = "processes are used again"

        async def block(_amount: Amount) -> Figures:
            with TemporaryDirectory() as cache:
                return [
                    [await _until_number(source, XDG_CACHE_HOME=cache)] for _ in "12"
                ]

        return block

    return Workload(
        [Metric(f"{title}: {run} run") for run in ("first", "second")],
        "a program that does one of the tasks itself",
        prepare,
        Setup(is_open=False),
        seconds=120,
        needs=library,
    )


PORTION: Final = 1_000
"""Calls in one turn of the loop."""
SUBMITTING: Final = 14.0
"""Seconds after which no further call is made."""
QUIET: Final = 0.25
"""Share of one core: a system that uses less has taken in all tasks."""
QUIET_WITHIN: Final = 8.0
"""Seconds after which a system counts as quiet."""


async def _waiting(context: Context) -> Block:
    """Submit a million tasks behind one that holds the only CPU."""
    system = context.system
    if system is None:
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[None]] = {}
        frames: deque[bytes] = deque()

        def call(number: int) -> asyncio.Future[None]:
            future = futures[number] = loop.create_future()
            frames.append(frame(number, ((number,), {})))
            return future

        return lambda amount: _fill(call, amount, context)
    latch = context.stack.enter_context(open_latch())
    submit = system.task(tasks.noop, Need())

    async def block(amount: Amount) -> Figures:
        await submit(0)
        running = [system.task(tasks.wait_for_release, Need())(os.getpid())]
        context.stack.enter_context(await connected(latch))
        context.stack.callback(running.clear)
        return await _fill(submit, amount, context)

    return block


async def _fill(call: Call, amount: Amount, context: Context) -> Figures:
    """Submit `amount.waiting` tasks, or as many as the time allows."""
    handles: list[Any] = [None] * amount.waiting
    gc.collect()
    before, start, count = _memory(), perf_counter(), 0
    while count < amount.waiting and perf_counter() < start + SUBMITTING:
        for _ in range(min(PORTION, amount.waiting - count)):
            handles[count] = call(count)
            count += 1
        await asyncio.sleep(0)
    took = perf_counter() - start + await _until_quiet()
    context.notes["count"] = f"{count:,} tasks"
    grown = max(0, _memory() - before)
    context.stack.callback(handles.clear)
    return [[took / count], [grown / count]]


async def _until_quiet() -> float:
    """Return the seconds until all processes are nearly idle."""
    start = perf_counter()
    while (began := perf_counter()) < start + QUIET_WITHIN:
        busy = cpu_time([os.getpid(), *descendants()])
        await asyncio.sleep(0.2)
        if cpu_time([os.getpid(), *descendants()]) - busy < QUIET * 0.2:
            break
    return began - start


def _memory() -> int:
    """Return the bytes of this process and all below it; shared pages count once."""
    total = 0
    for pid in (os.getpid(), *descendants()):
        with suppress(OSError, KeyError, IndexError):  # ended meanwhile
            total += memory(pid)["Pss"]
    return total


WORKLOADS: Final = {
    "call": calls("a call, awaited"),
    "gathered": calls("a call, of many gathered", factor=40),
    "actor-call": calls("an actor's call, awaited", is_actor=True),
    "actor-gathered": calls("an actor's call, of many gathered", True, factor=40),
    "argument-1KB": value(1_000, "1 KB"),
    "argument-100KB": value(100_000, "100 KB"),
    "argument-10MB": value(10_000_000, "10 MB"),
    "argument-100MB": value(100_000_000, "100 MB"),
    "passing-1KB": value(1_000, "1 KB", is_passed=True),
    "passing-100MB": value(100_000_000, "100 MB", is_passed=True),
    "stream": Workload(
        [Metric("an item of a stream")],
        "a bare worker that sends pickled items, without back-pressure",
        *(_stream, Setup(), 15),
        features=["streams"],
    ),
    "cancel": Workload(
        [Metric("a busy loop, from its cancel to its end")],
        "SIGINT to a process that waits for nothing else",
        *(_cancel, Setup(), 12),
    ),
    "fresh-bare": isolation(tasks.noop),
    "fresh-numpy": isolation(tasks.use_numpy, "numpy"),
    "fresh-torch": isolation(tasks.use_torch, "torch"),
    "day": day("a day on four GPUs", 1.0),
    "fresh-day": day("a day on four GPUs, a process for each task", 0.25, True),
    "start": Workload(
        [Metric("a new program, from its start to its first result")],
        "a bare interpreter that prints a number",
        *(_start, Setup(is_open=False), 50),
    ),
    "work-torch": real_work("40 steps of training", "torch_training", "torch"),
    "work-sklearn": real_work("40 fits", "sklearn_fit", "sklearn"),
    "work-pandas": real_work("40 group-bys", "pandas_groups", "pandas"),
    "waiting": Workload(
        [
            Metric("to take in a task that waits, of very many"),
            Metric("memory of a waiting task, in all processes", "B"),
        ],
        "a future and a packed frame, kept in a dict and a deque",
        *(_waiting, Setup(num_cpus=1, is_fresh=True), 100),
    ),
}
"""In the order of a full run."""
