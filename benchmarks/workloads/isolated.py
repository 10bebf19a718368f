"""What does a process of its own cost each GPU task, beside a fork?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Final, NamedTuple

from benchmarks.forks import open_forks
from benchmarks.method import (
    Block,
    Pair,
    Scale,
    one_at_a_time,
    percentile,
    rotate,
    shared_out,
)
from benchmarks.port import Call, Environment, Need, Preload
from benchmarks.rows import MS, Goal, Row, beside_row, judge, missing_row
from benchmarks.script import in_script
from benchmarks.tasks import noop, use_numpy, use_torch

QUARTER: Final = Need(num_gpus=0.25, is_isolated=True)
BACK_TO_BACK: Final = Goal(1.2, "x fork")
MANY_TIMES: Final = Goal(100, "x faster", is_least=True)


class Kind(NamedTuple):
    """Tasks of one kind.

    Attributes:
        name: what the row calls it.
        preload: what is imported before the first fork.
        goal: of the ratio to a fork; None to report only.
    """

    name: str
    function: Callable[[int], object]
    preload: Preload = None
    goal: Goal | None = None


BARE: Final = Kind("bare", in_script(noop), None, Goal(1.5, "x fork"))
OF_A_MODULE: Final = Kind("of a module", noop)
NUMPY: Final = Kind("numpy", in_script(use_numpy), ("numpy",), Goal(1.5, "x fork"))
TORCH: Final = Kind("torch", in_script(use_torch), ("torch",), Goal(1.2, "x fork"))


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Many gathered on four quarters of a GPU, of each kind; and one at a time."""
    rows = [
        await _gathered(environment, kind, scale)
        for kind in (BARE, OF_A_MODULE, NUMPY, TORCH)
    ]
    return [
        *rows,
        await _importing(environment, rows[-1], scale),
        await _back_to_back(environment, scale),
    ]


def not_there(library: str) -> str | None:
    """Why a row that needs this library cannot be had; None if it can."""
    return None if find_spec(library) else f"{library} is not installed"


async def _gathered(environment: Environment, kind: Kind, scale: Scale) -> Row:
    """What each of many adds to the whole."""
    name = f"isolated: {scale.isolated} gathered, {kind.name}"
    for library in kind.preload or ():
        if reason := not_there(library):
            return missing_row(name, reason)
    return await _beside_forks(environment, name, kind, scale, shared_out)


async def _back_to_back(environment: Environment, scale: Scale) -> Row:
    """One after the other, with nothing between them."""
    kind = BARE._replace(goal=BACK_TO_BACK)
    name = "isolated: back to back"
    return await _beside_forks(environment, name, kind, scale, one_at_a_time)


async def _beside_forks(
    environment: Environment,
    name: str,
    kind: Kind,
    scale: Scale,
    run: Callable[[Call[object], int], Coroutine[None, None, Block]],
) -> Row:
    """A row beside forks of what the workers are forked from, and bare ones."""
    are_gathered = run is shared_out
    count = scale.isolated if are_gathered else scale.singles
    async with opened(environment, kind.preload):
        call = environment.task(kind.function, QUARTER)
        with (
            open_forks() as bare,
            open_forks(environment.image(kind.preload)) as image,
        ):
            floors = (
                (bare.fork_in_a_row, image.fork_in_a_row)
                if are_gathered
                else (bare.fork, image.fork)
            )
            bares, floor, workload = await rotate(
                [
                    *(partial(fork, scale.singles) for fork in floors),
                    partial(run, call, count),
                ],
                scale.isolates,
            )
    beside_bare = Pair(bares, workload)
    return beside_row(
        name,
        Pair(floor, workload),
        kind.goal,
        scale,
        f"{beside_bare.ratio:.2f} x a bare interpreter's "
        f"{percentile(bares, 50) / MS:.2f} ms",
    )


async def _importing(environment: Environment, forked: Row, scale: Scale) -> Row:
    """The same tasks, each of which imports torch, beside those that need not."""
    name = "isolated: each imports torch"
    if reason := not_there("torch"):
        return missing_row(name, reason)
    async with opened(environment, ()):
        call = environment.task(TORCH.function, QUARTER)
        await call(0)  # warms up the disk
        block = await one_at_a_time(call, scale.imports)
    assert forked.p50 is not None
    took = percentile([block], 50) / MS
    ratio = took / forked.p50
    return Row(
        name,
        "ms",
        judge(ratio, MANY_TIMES, scale),
        p50=took,
        p99=percentile([block], 99) / MS,
        floor=forked.p50,
        floor_p99=forked.p99,
        ratio=ratio,
        note=f"beside {forked.name.partition(': ')[2]}",
        goal=str(MANY_TIMES),
        samples=[block],
        floor_samples=forked.samples,
    )


@asynccontextmanager
async def opened(
    environment: Environment, preload: Preload = None
) -> AsyncIterator[None]:
    """Four CPUs and one GPU, until the end of the block."""
    await environment.open(num_cpus=4, num_gpus=1, preload=preload)
    try:
        yield
    finally:
        await environment.close()
