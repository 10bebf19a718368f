"""What a call costs in calls, bytecodes, bytes and objects, which no load changes.

    python -m benchmarks.counts                 # all of it, each with its dearest parts
    python -m benchmarks.counts awaited --all   # one of them, every function
    python -m benchmarks.counts --against benchmarks/counts.json  # what has changed
    python -m benchmarks.counts --keep          # what is counted now is the measure

Counted are the functions of aiogpu that are called, and what these call of C, by
`sys.setprofile`, or the bytecodes that they run, by `sys.settrace`. Where replies come
together, how many do is chance, so the least of some rounds counts. Garbage is not
collected meanwhile.
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
from aiogpu.runtime.workers import message_router as burst
from benchmarks import tasks

KEPT: Final = Path(__file__).with_name("counts.json")
SLACK: Final = 1.05
"""Of what was kept, that may be counted."""
SPARE: Final = 0.5
"""Besides: what is done once in a while falls into a round, or does not."""
ROUNDS: Final = 3
FEW: Final = 100
MANY: Final = 1000
SHOWN: Final = 12
LEAST: Final = 0.05
"""What is called less often by each is not listed."""
_TIMED: Final = re.compile(r"Channel\._wait$|memory_bounds|MemoryWatch\._|wakefulness")
"""What is done as often as time passes, or as others give time to."""
_ROOT: Final = os.path.dirname(aiogpu.__file__) + os.sep


class Count(NamedTuple):
    """What was counted.

    Attributes:
        each: of one call, or item, or import.
        of: the same by function, or module.
    """

    each: float
    of: dict[str, float]

    @classmethod
    def shared(cls, total: Counter[str], units: int) -> Count:
        """What falls to each of so many."""
        of = {name: round(number / units, 2) for name, number in total.most_common()}
        listed = {name: each for name, each in of.items() if each >= LEAST}
        return cls(round(total.total() / units, 2), listed)


class Tally:
    """Counts the calls that aiogpu's code takes and makes, in one thread."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def note(self, frame: FrameType, what: str, argument: object) -> None:
        """See `sys.setprofile`."""
        name = self.name_of(frame)
        if what not in ("call", "c_call") or not name:
            return
        if what == "c_call":
            name += f" > {getattr(argument, '__qualname__', argument)}"
        self.calls[name] += 1

    def name_of(self, frame: FrameType) -> str:
        """The function that runs, if it counts; else ""."""
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return ""
        name = f"{code.co_filename[len(_ROOT) :]}:{code.co_qualname}"
        return "" if _TIMED.search(name) else name

    def begin(self) -> None:
        """Count from here on."""
        gc.disable()
        sys.setprofile(self.note)

    def end(self) -> Counter[str]:
        """Return what was called since."""
        sys.setprofile(None)
        gc.enable()
        return self.calls


class BytecodeTally(Tally):
    """Counts the bytecodes that aiogpu's code runs."""

    def trace(self, frame: FrameType, what: str, _argument: object) -> Any:
        """See `sys.settrace`."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if what == "opcode" and (name := self.name_of(frame)):
            self.calls[name] += 1
        return self.trace

    def begin(self) -> None:
        """Count from here on."""
        gc.disable()
        sys.settrace(self.trace)

    def end(self) -> Counter[str]:
        """Return what was run since."""
        sys.settrace(None)
        gc.enable()
        return self.calls


Call = Callable[[int], Awaitable[object]]
Way = Callable[[Call, int], Awaitable[object]]
"""Makes so many calls."""


async def _one_by_one(call: Call, number: int) -> None:
    for each in range(number):
        await call(each)


async def _gathered(call: Call, number: int) -> None:
    # How often answers are heard while others are submitted is a matter of time.
    before, burst.EVERY = burst.EVERY, math.inf  # type: ignore[misc]
    try:
        await asyncio.gather(*map(call, range(number)))
    finally:
        burst.EVERY = before  # type: ignore[misc]


async def _streamed(call: Any, number: int) -> None:
    async for _ in call(number):
        pass


def _each(count: Count) -> float:
    """Rounds that count the same are not told apart by what they count it of."""
    return count.each


async def _least(
    make: Callable[[], Call], way: Way, number: int, kind: type[Tally] = Tally
) -> Count:
    call, found = make(), []
    await way(call, number)
    for _ in range(ROUNDS):
        tally = kind()
        tally.begin()
        try:
            await way(call, number)
        finally:
            tally.end()
        found.append(Count.shared(tally.calls, number))
    return min(found, key=_each)


def _task(**options: Any) -> Call:
    made = aiogpu.remote(tasks.noop)
    return cast("Call", (made.options(**options) if options else made).remote)


def _method() -> Call:
    return cast("Call", aiogpu.remote(tasks.Plain).remote().noop.remote)


def _stream() -> Call:
    return cast("Call", aiogpu.remote(tasks.numbers).remote)


_in_worker: Final[list[Tally]] = []


def begin_counting(_number: int) -> None:
    """Count what the worker of this task calls from here on."""
    _in_worker[:] = [Tally()]
    _in_worker[0].begin()


def end_counting(_number: int) -> Counter[str]:
    """What it has called since."""
    return _in_worker[0].end()


async def _worker() -> Count:
    begin, end = aiogpu.remote(begin_counting), aiogpu.remote(end_counting)
    call, found = _task(), []
    for _ in range(ROUNDS):
        await _one_by_one(call, 20)
        await begin.remote(0)
        await _one_by_one(call, FEW)
        found.append(Count.shared(await end.remote(0), FEW))
    return min(found, key=_each)


_weights: Final[Counter[str]] = Counter()
"""What has gone through the connections of this process."""


class _Transport:
    """Counts what goes through a peer's transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        _weights.update({"to workers": len(data), "writes": 1})
        self._transport.write(data)


@contextmanager
def _weighed() -> Iterator[None]:
    """Connections that are made meanwhile are weighed for good."""
    made, received = Peer.connection_made, Peer.data_received

    def connection_made(self: Peer, transport: Any) -> None:
        made(self, cast("asyncio.Transport", _Transport(transport)))

    def data_received(self: Peer, data: bytes) -> None:
        _weights.update({"from workers": len(data), "reads": 1})
        received(self, data)

    Peer.connection_made = connection_made  # type: ignore[method-assign]
    Peer.data_received = data_received  # type: ignore[method-assign]
    try:
        yield
    finally:
        Peer.connection_made = made  # type: ignore[method-assign]
        Peer.data_received = received  # type: ignore[method-assign]


async def _on_the_wire(*names: str) -> Count:
    call, found = _task(), []
    await _one_by_one(call, FEW)
    for _ in range(ROUNDS):
        _weights.clear()
        await _one_by_one(call, FEW)
        picked = Counter({name: _weights[name] for name in names})
        found.append(Count.shared(picked, FEW))
    return min(found, key=_each)


async def _objects() -> Count:
    """What the collector looks through for a task that waits, and for its handle."""
    call = _task()
    await asyncio.gather(*map(call, range(MANY)))
    gc.collect()
    before = Counter(type(each).__name__ for each in gc.get_objects())
    gc.disable()
    handles = [call(number) for number in range(MANY)]
    after = Counter(type(each).__name__ for each in gc.get_objects())
    gc.enable()
    await asyncio.gather(*handles)
    return Count.shared(after - before, MANY)


async def _listed(program: str) -> Count:
    words = [sys.executable, "-c", program]
    ran = await asyncio.to_thread(subprocess.check_output, words, text=True)
    return Count.shared(Counter(ran.split()), 1)


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
"""All that aiogpu brings, its own modules and those of the standard library."""
ON_A_NODE: Final[dict[str, Callable[[], Awaitable[Count]]]] = {
    "awaited": partial(_least, _task, _one_by_one, FEW),
    "gathered": partial(_least, _task, _gathered, MANY),
    "actor": partial(_least, _method, _one_by_one, FEW),
    "actor gathered": partial(_least, _method, _gathered, MANY),
    "stream": partial(_least, _stream, _streamed, MANY),
    "isolated": partial(_least, partial(_task, num_gpus=0.25), _one_by_one, FEW // 10),
    "bytecodes": partial(_least, _task, _one_by_one, FEW, BytecodeTally),
    "bytecodes of an actor": partial(_least, _method, _one_by_one, FEW, BytecodeTally),
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


async def _count(name: str) -> Count:
    """Count one of them, on a node of its own."""
    if name in PROGRAMS:
        return await _listed(PROGRAMS[name])
    with _weighed():
        async with aiogpu.init(num_cpus=1, num_gpus=1, log_to_driver=False):
            return await ON_A_NODE[name]()


def kept(path: Path = KEPT) -> dict[str, Count]:
    """What was counted before."""
    return {name: Count(*it) for name, it in json.loads(path.read_text()).items()}


def allowed(before: Count) -> float:
    """How much may be counted of what was so much."""
    return before.each * SLACK + SPARE


def told(name: str, now: Count, before: Count | None, most: int) -> str:
    """A count in words, and its dearest parts, or those that have changed most."""
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
@click.option("--json", "is_json", is_flag=True, help="All of it as JSON.")
@click.option("--against", type=FILE, help="Tell what has changed since FILE was kept.")
@click.option("--all", "is_all", is_flag=True, help="Every function, not the dearest.")
@click.option("--keep", is_flag=True, help="Write benchmarks/counts.json.")
def main(
    names: tuple[str, ...],
    is_json: bool,
    against: Path | None,
    is_all: bool,
    keep: bool,
) -> None:
    """Count NAMES, all of them unless named."""
    found = {name: asyncio.run(_count(name)) for name in names or NAMES}
    if keep:
        text = json.dumps({**(kept() if names else {}), **found}, indent=1)
        KEPT.write_text(text + "\n")
    if is_json:
        click.echo(json.dumps(found))
        return
    before = kept(against) if against is not None else {}
    most = 10_000 if is_all else SHOWN
    for name, now in found.items():
        click.echo(told(name, now, before.get(name), most))


if __name__ == "__main__":
    # As a module of that name, which workers import as well.
    import_module("benchmarks.counts").main()
