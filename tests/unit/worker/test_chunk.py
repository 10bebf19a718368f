"""A function called with one item after the other, without a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiogpu.client.current import current
from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import ChunkOutcome, unpack_failure
from aiogpu.serialization.serializer import (
    dump_function,
    dump_result,
    load_function,
    load_result,
)
from aiogpu.wire.messages import Failed
from aiogpu.worker import chunk
from aiogpu.worker.chunk import CHUNKED, Chunk, Sent, method_of


def double(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return double(number)


class Doubler:
    async def later(self, number: int) -> int:
        return await double_later(number)

    def now(self, number: int) -> int:
        return double(number)


KINDS: list[Any] = [
    double,
    double_later,
    Doubler().later,
    lambda number: double(number) if number % 2 else double_later(number),
]


def run(function: Any, seconds: float, *items: Any) -> ChunkOutcome:
    found = Chunk(function)(seconds, *items)
    if not isinstance(found, ChunkOutcome):
        found = asyncio.run(found)
    assert isinstance(found, ChunkOutcome)
    return found


def error_in(outcome: ChunkOutcome) -> Exception:
    assert outcome.failure is not None
    return unpack_failure(Failed(*outcome.failure), "double")


@pytest.mark.parametrize("function", KINDS)
def test_each_item_gives_its_value(function: Any) -> None:
    outcome = run(function, 0, 1, 2, 3, 4)
    assert (outcome.values, outcome.failure) == ([2, 4, 6, 8], None)
    assert 0 < outcome.seconds < 10
    assert run(function, 0).values == []


@pytest.mark.parametrize("function", KINDS)
def test_what_an_item_raises_comes_with_the_values_before_it(function: Any) -> None:
    outcome = run(function, 0, 1, 2, -3, 4)
    assert outcome.values == [2, 4]
    error = error_in(outcome)
    assert (type(error), error.args) == (ValueError, (-3,))
    told = str(error.__cause__)
    assert "raise ValueError(number)" in told
    assert "chunk.py" not in told.replace("test_chunk.py", "")


@pytest.mark.parametrize("function", KINDS)
def test_it_ends_early_after_its_seconds(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(chunk, "perf_counter", lambda: next(clock))
    outcome = run(function, 1.5, 1, 2, 3, 4)
    assert outcome.values in ([2, 4], [2]), "one or two looks at the clock"
    assert outcome.failure is None
    assert run(function, 1e-9, 1, 2, 3).values == [2], "one item at least is run"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_what_stops_the_task_is_not_the_items(kind: type[BaseException]) -> None:
    def stop(number: int) -> None:
        raise kind

    with pytest.raises(kind):
        Chunk(stop)(0, 1, 2)


def test_a_cancelled_coroutine_stops_the_task() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(Chunk(hang)(0, 1, 2))
        await asyncio.sleep(0)
        task.cancel()
        await task

    async def hang(number: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
    ids=["a spoilt device", "no memory left"],
)
def test_an_error_of_the_device_fails_the_whole_task(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(number: int) -> None:
        raise RuntimeError(text)

    assert str(error_in(run(use, 0, 1))) == text, "no device here"
    monkeypatch.setattr(current, "accelerators", {"GPU": (0,)})
    with pytest.raises(RuntimeError, match="CUDA"):
        Chunk(use)(0, 1)
    assert type(error_in(run(double, 0, -1))) is ValueError, "others are the items'"


def test_the_rest_is_not_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a worker has no children of its own: see `Worker._leave`."""

    def leave(number: int) -> int:
        monkeypatch.setattr(current, "client", None)
        if number < 0:
            raise ValueError(number)
        return number

    monkeypatch.setattr(current, "client", object())
    assert run(leave, 0, 1, 2, 3).values == [1]
    monkeypatch.setattr(current, "client", object())
    with pytest.raises(ValueError, match="-1"):
        Chunk(leave)(0, -1)


def test_a_function_on_its_way() -> None:
    sent = dump_function("double", Sent(dump_function("double", lambda x: x + 1)))
    loaded = load_function(sent)
    assert isinstance(loaded, Chunk)
    assert loaded(0, 1, 2).values == [2, 3]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("never")


def test_a_value_that_cannot_be_pickled_fails_in_its_place() -> None:
    values = [1, [2], Unpicklable(), 4, Unpicklable()]
    outcome = load_result(dump_result(ChunkOutcome(list(values), 1.0, None)))
    assert (outcome.values, outcome.seconds) == ([1, [2]], 1.0)
    error = error_in(outcome)
    assert isinstance(error, SerializationError)
    assert str(error).startswith("double ran, but the result cannot be pickled: result")


def test_methods_by_name() -> None:
    actor = Doubler()
    assert method_of(actor, "now")(2) == 4
    assert method_of(actor, "now" + CHUNKED)(0, 1, 2).values == [2, 4]
    with pytest.raises(AttributeError):
        method_of(actor, "never" + CHUNKED)
