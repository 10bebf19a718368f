"""Count what one call costs in function calls, bytecodes, bytes and objects.

    python -m benchmarks.counts                 # everything, with the largest parts
    python -m benchmarks.counts awaited --all   # one count, with every function
    python -m benchmarks.counts --against benchmarks/counts.json  # what has changed
    python -m benchmarks.counts --keep          # make this the new baseline

The machine's load does not change these counts. `sys.setprofile` counts the functions
of aiogpu that are called and the C functions that they call; `sys.settrace` counts the
bytecodes that they run. Replies are batched by chance, so the lowest of several rounds
is the result. The garbage collector is off meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, cast

import click

import aiogpu
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.workers import message_router
from benchmarks import tasks

BASELINE: Final = Path(__file__).with_name("counts.json")
SLACK: Final = 1.05
"""The factor by which a count may exceed the baseline."""
SPARE: Final = 0.5
"""May come on top: work that is done once in a while may fall into a round."""
ROUNDS: Final = 3
FEW: Final = 100
MANY: Final = 1000
SHOWN: Final = 12
LEAST: Final = 0.05
"""Functions that are called less often for each unit are not listed."""
_TIMED: Final = re.compile(r"Channel\._wait$|memory_bounds|MemoryWatch\._|wakefulness")
"""Functions that are called as often as time passes, not as often as work comes."""
_ROOT: Final = os.path.dirname(aiogpu.__file__) + os.sep


class Count(NamedTuple):
    """A count.

    Attributes:
        each: for one call, item or import.
        of: the same by function, or by module.
    """

    each: float
    of: dict[str, float]

    @classmethod
    def per_unit(cls, total: Counter[str], units: int) -> Count:
        """Divide a total by the number of units."""
        of = {name: round(number / units, 2) for name, number in total.most_common()}
        listed = {name: each for name, each in of.items() if each >= LEAST}
        return cls(round(total.total() / units, 2), listed)


def lower(*counts: Count) -> Count:
    """Return the lowest count; equal ones may consist of different functions."""
    return min(counts, key=lambda count: count.each)


class CallCounter:
    """Counts the calls that aiogpu's code receives and makes, in one thread."""

    install: Callable[[Any], None] = staticmethod(sys.setprofile)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_event(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count an event; see `sys.setprofile`."""
        name = self.name_of(frame)
        if event not in ("call", "c_call") or not name:
            return
        if event == "c_call":
            name += f" > {getattr(argument, '__qualname__', argument)}"
        self.counts[name] += 1

    def name_of(self, frame: FrameType) -> str:
        """Return the name of a frame's function, or "" if it does not count."""
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return ""
        name = f"{code.co_filename[len(_ROOT) :]}:{code.co_qualname}"
        return "" if _TIMED.search(name) else name

    def begin(self) -> None:
        """Count from here on."""
        gc.disable()
        self.install(self.on_event)

    def end(self) -> Counter[str]:
        """Stop; return the counts since `begin`."""
        self.install(None)
        gc.enable()
        return self.counts


class BytecodeCounter(CallCounter):
    """Counts the bytecodes that aiogpu's code runs."""

    install = staticmethod(sys.settrace)

    def on_event(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count an event; see `sys.settrace`."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and (name := self.name_of(frame)):
            self.counts[name] += 1
        return self.on_event


Call = Callable[[int], Awaitable[object]]
Way = Callable[[Call, int], Awaitable[object]]
"""Makes a number of calls."""


async def _one_by_one(call: Call, number: int) -> None:
    for each in range(number):
        await call(each)


async def _gathered(call: Call, number: int) -> None:
    # How often replies are read while calls are submitted depends on time.
    before, message_router.EVERY = message_router.EVERY, math.inf  # type: ignore[misc]
    try:
        await asyncio.gather(*map(call, range(number)))
    finally:
        message_router.EVERY = before  # type: ignore[misc]


async def _streamed(call: Any, number: int) -> None:
    async for _ in call(number):
        pass


async def _lowest(measure: Callable[[], Awaitable[Counter[str]]], units: int) -> Count:
    rounds = [Count.per_unit(await measure(), units) for _ in range(ROUNDS)]
    return lower(*rounds)


async def _in_driver(
    make: Callable[[], Call], way: Way, number: int, kind: type[CallCounter]
) -> Count:
    call = make()
    await way(call, number)

    async def measure() -> Counter[str]:
        counter = kind()
        counter.begin()
        await way(call, number)
        return counter.end()

    return await _lowest(measure, number)


def _task(**options: Any) -> Call:
    function = aiogpu.remote(tasks.noop)
    return cast("Call", (function.options(**options) if options else function).remote)


def _method() -> Call:
    return cast("Call", aiogpu.remote(tasks.Plain).remote().noop.remote)


def _stream() -> Call:
    return cast("Call", aiogpu.remote(tasks.numbers).remote)


_in_worker: Final[list[CallCounter]] = []


BEGIN: Final = -1
END: Final = -2


def counted(number: int) -> Counter[str] | None:
    """Do nothing; by `BEGIN` and `END`, count what this task's worker calls between.

    One function does all, since a worker restores `sys.setprofile` before another.
    """
    if number == BEGIN:
        _in_worker[:] = [CallCounter()]
        _in_worker[0].begin()
    return _in_worker[0].end() if number == END else None


async def _worker() -> Count:
    call = aiogpu.remote(counted).remote

    async def measure() -> Counter[str]:
        await _one_by_one(call, 20)
        await call(BEGIN)
        await _one_by_one(call, FEW)
        total = await call(END)
        assert total is not None
        return total

    return await _lowest(measure, FEW)


_traffic: Final[Counter[str]] = Counter()
"""Bytes and transfers on the connections of this process."""


class _Transport:
    """A peer's transport that counts what is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        _traffic.update({"to workers": len(data), "writes": 1})
        self._transport.write(data)


@contextmanager
def _counted_traffic() -> Iterator[None]:
    """Count the traffic of all connections that are made within the block."""
    made, received = Peer.connection_made, Peer.data_received

    def connection_made(self: Peer, transport: Any) -> None:
        made(self, cast("asyncio.Transport", _Transport(transport)))

    def data_received(self: Peer, data: bytes) -> None:
        _traffic.update({"from workers": len(data), "reads": 1})
        received(self, data)

    Peer.connection_made = connection_made  # type: ignore[method-assign]
    Peer.data_received = data_received  # type: ignore[method-assign]
    try:
        yield
    finally:
        Peer.connection_made = made  # type: ignore[method-assign]
        Peer.data_received = received  # type: ignore[method-assign]


async def _on_the_wire(*names: str) -> Count:
    call = _task()
    await _one_by_one(call, FEW)

    async def measure() -> Counter[str]:
        _traffic.clear()
        await _one_by_one(call, FEW)
        return Counter({name: _traffic[name] for name in names})

    return await _lowest(measure, FEW)


async def _objects() -> Count:
    """Count the tracked objects of a task that waits, its handle included.

    The only CPU is leased meanwhile: a call that started would end while others are
    submitted, and its objects would be missing.
    """
    call = _task()
    await _one_by_one(call, FEW)
    async with aiogpu.lease(num_cpus=1):
        gc.collect()
        before = Counter(type(each).__name__ for each in gc.get_objects())
        gc.disable()
        handles = [call(number) for number in range(MANY)]
        after = Counter(type(each).__name__ for each in gc.get_objects())
        gc.enable()
    await asyncio.gather(*handles)
    return Count.per_unit(after - before, MANY)


_IMPORTED: Final = """
import sys
{}
print(*(name for name in sys.modules if name.startswith('aiogpu')))
"""
_FIRST_RESULT: Final = """
import sys
import asyncio, cloudpickle, msgpack, uvloop
before = set(sys.modules)
import aiogpu

@aiogpu.remote
def noop():
    return None

async def main():
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        await noop.remote()
        print(*(name for name in sys.modules if name not in before))

aiogpu.run(main())
"""
"""Prints all modules that aiogpu loads, those of the standard library included."""


def _calls(
    make: Callable[[], Call],
    way: Way,
    number: int = FEW,
    kind: type[CallCounter] = CallCounter,
) -> Callable[[], Awaitable[Count]]:
    return partial(_in_driver, make, way, number, kind)


ON_A_NODE: Final[dict[str, Callable[[], Awaitable[Count]]]] = {
    "awaited": _calls(_task, _one_by_one),
    "gathered": _calls(_task, _gathered, MANY),
    "actor": _calls(_method, _one_by_one),
    "actor gathered": _calls(_method, _gathered, MANY),
    "stream": _calls(_stream, _streamed, MANY),
    "isolated": _calls(partial(_task, num_gpus=0.25), _one_by_one, FEW // 10),
    "bytecodes": _calls(_task, _one_by_one, kind=BytecodeCounter),
    "bytecodes of an actor": _calls(_method, _one_by_one, kind=BytecodeCounter),
    "worker": _worker,
    "bytes": partial(_on_the_wire, "to workers", "from workers"),
    "transfers": partial(_on_the_wire, "writes", "reads"),
    "objects": _objects,
}
PROGRAMS: Final = {
    "import: aiogpu": _IMPORTED.format("import aiogpu"),
    "import: remote": _IMPORTED.format("from aiogpu import remote"),
    "import: init": _IMPORTED.format("from aiogpu import init, remote, run"),
    "import: worker": _IMPORTED.format("import aiogpu.worker.zygote.main"),
    "import: first result": _FIRST_RESULT,
}
NAMES: Final = (*ON_A_NODE, *PROGRAMS)


def count(name: str) -> Count:
    """Return one count, taken in a new interpreter or on a new node."""
    if name in PROGRAMS:
        command = [sys.executable, "-c", PROGRAMS[name]]
        modules = subprocess.check_output(command, text=True).split()
        return Count.per_unit(Counter(modules), 1)
    with _counted_traffic():
        return asyncio.run(_on_a_node(ON_A_NODE[name]))


async def _on_a_node(measure: Callable[[], Awaitable[Count]]) -> Count:
    async with aiogpu.init(num_cpus=1, num_gpus=1, log_to_driver=False):
        return await measure()


def load(path: Path = BASELINE) -> dict[str, Count]:
    """Return the counts of a file."""
    counts = json.loads(path.read_text())
    return {name: Count(*count) for name, count in counts.items()}


def limit(before: Count) -> float:
    """Return the highest count that still passes, given the baseline."""
    return before.each * SLACK + SPARE


def describe(name: str, now: Count, before: Count | None, most: int) -> str:
    """Render a count with its largest parts, or with the largest changes of parts."""
    if before is None:
        parts = [f"  {each:8.2f}  {of}" for of, each in now.of.items()]
        return "\n".join([f"{name}: {now.each}", *parts[:most]])
    names = {*now.of, *before.of}
    changes = {of: now.of.get(of, 0.0) - before.of.get(of, 0.0) for of in names}
    worst = sorted(changes, key=lambda of: (-abs(changes[of]), of))
    parts = [f"  {changes[of]:+8.2f}  {of}" for of in worst if abs(changes[of]) > LEAST]
    return "\n".join([f"{name}: {before.each} before, {now.each} now", *parts[:most]])


FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
@click.option("--against", type=FILE, help="Show what has changed since FILE.")
@click.option("--all", "is_all", is_flag=True, help="Show every function.")
@click.option("--keep", is_flag=True, help="Write benchmarks/counts.json.")
def main(
    names: tuple[str, ...],
    is_json: bool,
    against: Path | None,
    is_all: bool,
    keep: bool,
) -> None:
    """Count NAMES, by default all of them."""
    counts = {name: count(name) for name in names or NAMES}
    if keep:
        text = json.dumps({**(load() if names else {}), **counts}, indent=1)
        BASELINE.write_text(text + "\n")
    if is_json:
        click.echo(json.dumps(counts))
        return
    before = load(against) if against is not None else {}
    most = 10_000 if is_all else SHOWN
    for name, now in counts.items():
        click.echo(describe(name, now, before.get(name), most))


if __name__ == "__main__":
    # Imported under its own name, as workers import it.
    import_module("benchmarks.counts").main()
