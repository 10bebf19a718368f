"""Values on their way: as arguments of one task, and from a task to another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Final

from benchmarks.field.question import (
    Amount,
    Ask,
    Figures,
    Metric,
    Question,
    Stage,
    awaited,
)
from benchmarks.floor import open_floor
from benchmarks.port import Environment
from benchmarks.tasks import first_of, give_kept

SIZES: Final = {
    "1 KB": 1_000,
    "100 KB": 100_000,
    "10 MB": 10_000_000,
    "100 MB": 100_000_000,
}


def _array(size: int) -> Any:
    return import_module("numpy").ones(size, "uint8")


def _quick(size: int, amount: Amount) -> int:
    """A value's size, but small where few calls show that all of it runs."""
    return min(size, 1_000_000) if amount.calls < 100 else size


async def _copying(name: str, size: int, calls: int, stage: Stage) -> Ask:
    """So many calls of the floor, and a copy to memory that has been written."""
    numpy = import_module("numpy")
    call = (await stage.stack.enter_async_context(open_floor())).call
    arrays: dict[int, tuple[Any, Any]] = {}

    async def ask(amount: Amount) -> Figures:
        actual = _quick(size, amount)
        if actual not in arrays:
            arrays[actual] = _array(actual), numpy.zeros(actual, "uint8")
        source, target = arrays[actual]

        async def copy(number: int) -> None:
            for _ in range(calls):
                await call(number)
            numpy.copyto(target, source)

        return await awaited(name, copy, amount)

    return ask


def _argument(label: str, size: int) -> Question:
    name = f"argument-{label.replace(' ', '')}"

    async def prepare(environment: Environment, _stage: Stage) -> Ask:
        use = environment.taking(first_of)
        arrays: dict[int, Any] = {}

        async def ask(amount: Amount) -> Figures:
            actual = _quick(size, amount)
            if actual not in arrays:
                arrays[actual] = _array(actual)
            return await awaited(name, lambda _: use(arrays[actual]), amount)

        return ask

    async def floor(stage: Stage) -> Ask:
        return await _copying(name, size, 1, stage)

    return _question(name, f"an array of {label} as argument", prepare, floor, "a call")


def _passing(label: str, size: int) -> Question:
    name = f"passing-{label.replace(' ', '')}"

    async def prepare(environment: Environment, _stage: Stage) -> Ask:
        give, use = environment.taking(give_kept), environment.taking(first_of)

        async def ask(amount: Amount) -> Figures:
            actual = _quick(size, amount)
            return await awaited(name, lambda _: use(give(actual)), amount)

        return ask

    async def floor(stage: Stage) -> Ask:
        return await _copying(name, size, 2, stage)

    title = f"an array of {label} from task to task"
    return _question(name, title, prepare, floor, "two calls")


def _question(
    name: str,
    title: str,
    prepare: Callable[[Environment, Stage], Awaitable[Ask]],
    floor: Callable[[Stage], Awaitable[Ask]],
    calls: str,
) -> Question:
    return Question(
        name,
        "values",
        (Metric(name, title),),
        prepare,
        floor,
        f"{calls} of the floor and a copy of the array within one process",
        seconds=14,
        needs="numpy",
    )


QUESTIONS = (
    *(_argument(label, size) for label, size in SIZES.items()),
    *(_passing(label, SIZES[label]) for label in ("1 KB", "100 MB")),
)
