"""What a call costs in calls of functions, bytes and objects, which no load changes.

    python -m benchmarks.counts                 # all of it, each with its dearest parts
    python -m benchmarks.counts awaited --all   # one of them, every function
    python -m benchmarks.counts --against benchmarks/counts.json  # what has changed
    python -m benchmarks.counts --keep          # what is counted now is the measure

Counted are the functions of aiogpu that are called, and what these call of C, by
`sys.setprofile`. Where replies come together, how many do is chance, so the least of
some rounds counts. Garbage is not collected meanwhile.
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
        code = frame.f_code
        if what not in ("call", "c_call") or not code.co_filename.startswith(_ROOT):
            return
        name = f"{code.co_filename[len(_ROOT) :]}:{code.co_qualname}"
        if _TIMED.search(name):
            return
        if what == "c_call":
            name += f" > {getattr(argument, '__qualname__', argument)}"
        self.calls[name] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count until the block ends."""
        gc.disable()
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


Call = Callable[[int], Awaitable[object]]


async def _one_by_one(call: Call) -> Count:
    return await _least(call, FEW, _await_each)


async def _gathered(call: Call) -> Count:
    # How often answers are heard while others are submitted is a matter of time.
    before, burst.EVERY = burst.EVERY, math.inf  # type: ignore[misc]
    try:
        return await _least(call, MANY, _await_all)
    finally:
        burst.EVERY = before  # type: ignore[misc]


async def _await_each(call: Call, number: int) -> None:
    for each in range(number):
        await call(each)


async def _await_all(call: Call, number: int) -> None:
    await asyncio.gather(*map(call, range(number)))


def _each(count: Count) -> float:
    """Rounds that count the same are not told apart by what they count it of."""
    return count.each


async def _least(
    call: Call, number: int, way: Callable[[Call, int], Awaitable[None]]
) -> Count:
    await way(call, number)
    found = []
    for _ in range(ROUNDS):
        tally = Tally()
        with tally.counting():
            await way(call, number)
        found.append(Count.shared(tally.calls, number))
    return min(found, key=_each)


def _task(**options: Any) -> Call:
    made = aiogpu.remote(tasks.noop)
    return cast("Call", (made.options(**options) if options else made).remote)


def _method() -> Call:
    return cast("Call", aiogpu.remote(tasks.Plain).remote().noop.remote)


async def _awaited() -> Count:
    return await _one_by_one(_task())


async def _gathered_calls() -> Count:
    return await _gathered(_task())


async def _actor() -> Count:
    return await _one_by_one(_method())


async def _actor_gathered() -> Count:
    return await _gathered(_method())


async def _isolated() -> Count:
    call = _task(num_gpus=0.25)
    return await _least(call, FEW // 10, _await_each)


async def _stream() -> Count:
    items = aiogpu.remote(tasks.numbers)

    async def run(_call: Call, number: int) -> None:
        async for _ in items.remote(number):
            pass

    return await _least(_task(), MANY, run)


_in_worker: Final[list[Tally]] = []


def begin_counting(_number: int) -> None:
    """Count what the worker of this task calls from here on."""
    _in_worker[:] = [Tally()]
    gc.disable()
    sys.setprofile(_in_worker[0].note)


def end_counting(_number: int) -> Counter[str]:
    """What it has called since."""
    sys.setprofile(None)
    gc.enable()
    return _in_worker[0].calls


async def _worker() -> Count:
    begin, end = aiogpu.remote(begin_counting), aiogpu.remote(end_counting)
    call, found = _task(), []
    for _ in range(ROUNDS):
        await _await_each(call, 20)
        await begin.remote(0)
        await _await_each(call, FEW)
        found.append(Count.shared(await end.remote(0), FEW))
    return min(found, key=_each)


class _Transport:
    """Counts what goes through a peer's transport."""

    def __init__(self, transport: Any, into: Counter[str]) -> None:
        self._transport = transport
        self._into = into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._into["to workers"] += len(data)
        self._into["writes"] += 1
        self._transport.write(data)


@contextmanager
def _weighed() -> Iterator[Counter[str]]:
    """Connections that are made meanwhile are weighed for good."""
    into: Counter[str] = Counter()
    made, received = Peer.connection_made, Peer.data_received

    def connection_made(self: Peer, transport: Any) -> None:
        made(self, cast("asyncio.Transport", _Transport(transport, into)))

    def data_received(self: Peer, data: bytes) -> None:
        into["from workers"] += len(data)
        into["reads"] += 1
        received(self, data)

    Peer.connection_made = connection_made  # type: ignore[method-assign]
    Peer.data_received = data_received  # type: ignore[method-assign]
    try:
        yield into
    finally:
        Peer.connection_made = made  # type: ignore[method-assign]
        Peer.data_received = received  # type: ignore[method-assign]


_weights: Final[list[Counter[str]]] = []


async def _on_the_wire(*names: str) -> Count:
    call, found = _task(), []
    await _await_each(call, FEW)
    for _ in range(ROUNDS):
        _weights[0].clear()
        await _await_each(call, FEW)
        picked = Counter({name: _weights[0][name] for name in names})
        found.append(Count.shared(picked, FEW))
    return min(found, key=_each)


async def _bytes() -> Count:
    return await _on_the_wire("to workers", "from workers")


async def _transfers() -> Count:
    return await _on_the_wire("writes", "reads")


async def _objects() -> Count:
    """What the collector looks through for a task that waits, and for its handle."""
    call = _task()
    await _await_all(call, MANY)
    gc.collect()
    before = Counter(type(each).__name__ for each in gc.get_objects())
    gc.disable()
    handles = [call(number) for number in range(MANY)]
    after = Counter(type(each).__name__ for each in gc.get_objects())
    gc.enable()
    await asyncio.gather(*handles)
    return Count.shared(after - before, MANY)


IMPORTS: Final = {
    "import: aiogpu": "import aiogpu",
    "import: remote": "from aiogpu import remote",
    "import: init": "from aiogpu import init, remote, run",
    "import: worker": "import aiogpu.worker.zygote.main",
}


FIRST_RESULT: Final = "import: first result"
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


def _imported(statement: str) -> Count:
    return _listed(
        f"import sys\n{statement}\n"
        "print(*(name for name in sys.modules if name.startswith('aiogpu')))"
    )


def _listed(program: str) -> Count:
    ran = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True
    )
    return Count.shared(Counter(ran.stdout.split()), 1)


COUNTS: Final[dict[str, Callable[[], Awaitable[Count]]]] = {
    "awaited": _awaited,
    "gathered": _gathered_calls,
    "actor": _actor,
    "actor gathered": _actor_gathered,
    "stream": _stream,
    "isolated": _isolated,
    "worker": _worker,
    "bytes": _bytes,
    "transfers": _transfers,
    "objects": _objects,
}
NAMES: Final = (*COUNTS, *IMPORTS, FIRST_RESULT)


async def _count(names: list[str]) -> dict[str, Count]:
    found = {}
    for name in names:
        if name in IMPORTS:
            found[name] = _imported(IMPORTS[name])
            continue
        if name == FIRST_RESULT:
            found[name] = _listed(_FIRST_RESULT)
            continue
        with _weighed() as weights:
            _weights[:] = [weights]
            async with aiogpu.init(num_cpus=1, num_gpus=1, log_to_driver=False):
                found[name] = await COUNTS[name]()
    return found


def count(names: list[str]) -> dict[str, Count]:
    """Count these, each on a node of its own, on asyncio's loop."""
    return asyncio.run(_count(names))


def kept(path: Path = KEPT) -> dict[str, Count]:
    """What was counted before."""
    return {name: Count(*it) for name, it in json.loads(path.read_text()).items()}


def allowed(before: Count) -> float:
    """How much may be counted of what was so much."""
    return before.each * SLACK + SPARE


def told(name: str, now: Count, before: Count | None, most: int) -> str:
    """A count in words, and its dearest parts, or those that have changed most."""
    if before is None:
        lines = [f"{name}: {now.each}"]
        parts = [f"  {each:8.2f}  {of}" for of, each in now.of.items()]
        return "\n".join(lines + parts[:most])
    lines = [f"{name}: {before.each} before, {now.each} now"]
    changes = {
        of: now.of.get(of, 0.0) - before.of.get(of, 0.0) for of in {*now.of, *before.of}
    }
    worst = sorted(changes, key=lambda of: (-abs(changes[of]), of))
    parts = [f"  {changes[of]:+8.2f}  {of}" for of in worst if abs(changes[of]) > LEAST]
    return "\n".join(lines + parts[:most])


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--json", "is_json", is_flag=True, help="All of it as JSON.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Tell what has changed since FILE was written, by `--json` or `--keep`.",
)
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
    found = count(list(names or NAMES))
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
