"""[B18] `f.map(...)` end to end: what runs at once, in which order, and what stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

import aiogpu
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


@pytest.fixture(params=["local"])
def address(request: pytest.FixtureRequest) -> str:
    """The engines that must pass."""
    return str(request.param)


@pytest.fixture
def enter(gate: Gate) -> aiogpu.types.RemoteFunction[[str], str]:
    """A task of one argument: says its name at the gate and waits to go on."""
    path = gate.path

    @aiogpu.remote
    def enter(name: str) -> str:
        from tests.support.gate import pass_gate

        return pass_gate(path, name)

    return enter


@pytest.fixture
def linger(gate: Gate) -> aiogpu.types.RemoteFunction[[str], str]:
    """As `enter`, and tells of its cancelling: "a-cancelled"."""
    path = gate.path
    gated = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def linger(name: str) -> str:
        return await gated(path, name)

    return linger


async def left(number: int) -> None:
    """Wait until the node knows of that many tasks, waiting ones included."""
    async with asyncio.timeout(60):
        while len((await aiogpu.status()).tasks) != number:
            await asyncio.sleep(0)


def names() -> Iterator[str]:
    """An endless iterable."""
    return map(str, count(1))


async def later_names() -> AsyncIterator[str]:
    """An endless async iterable."""
    for name in names():
        await asyncio.sleep(0)
        yield name


@pytest.mark.parametrize("source", [names, later_names])
async def test_at_most_the_limit_runs_and_results_keep_their_order(
    address: str,
    source: object,
    gate: Gate,
    enter: aiogpu.types.RemoteFunction[[str], str],
) -> None:
    async with aiogpu.init(address=address, num_cpus=8):
        async with enter.map(source(), limit=3) as results:  # type: ignore[operator]
            first = asyncio.ensure_future(results.__anext__())
            await gate.entered("1", "2", "3")
            gate.release("2")
            await left(2)
            assert not first.done(), "it is the second that has ended"
            assert set(gate.pids) == {"1", "2", "3"}, "and it still counts"
            gate.release("1")
            assert [await first, await anext(results)] == ["1", "2"]
            third = asyncio.ensure_future(results.__anext__())
            await gate.entered("4", "5")
            assert gate.inside == {"3", "4", "5"}
            gate.release("3")
            assert await third == "3"
        assert gate.pids.keys() <= set("123456"), "three beyond the three taken"


async def test_unordered_results_come_as_they_end(
    address: str, gate: Gate, enter: aiogpu.types.RemoteFunction[[str], str]
) -> None:
    async with (
        aiogpu.init(address=address, num_cpus=8),
        enter.map("abcd", limit=2, ordered=False) as results,
    ):
        for inside, name in (("ab", "b"), ("ac", "c"), ("ad", "a"), ("d", "d")):
            task = asyncio.ensure_future(results.__anext__())
            await gate.entered(*inside)
            assert gate.inside == set(inside)
            gate.release(name)
            assert await task == name
        with pytest.raises(StopAsyncIteration):
            await anext(results)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("limit", [1, 7, None])
async def test_every_item_gives_one_result(
    address: str, limit: int | None, ordered: bool
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        results = [
            each
            async for each in tasks.add.map(range(500), limit=limit, ordered=ordered)
        ]
        if not ordered:
            results.sort()
        assert results == list(range(1, 501))
        assert [each async for each in tasks.add.map([])] == []
        await left(0)


async def test_its_first_call_opens_a_node() -> None:
    assert [each async for each in tasks.double.map([1, 2])] == [2, 4]
    await aiogpu.shutdown()


@pytest.mark.parametrize("source", [names, later_names])
async def test_break_stops_what_runs(
    address: str,
    source: object,
    gate: Gate,
    linger: aiogpu.types.RemoteFunction[[str], str],
) -> None:
    async def take_one() -> str:
        async for result in linger.map(source(), limit=3):  # type: ignore[operator]
            return result
        raise AssertionError

    async with aiogpu.init(address=address, num_cpus=8):
        task = asyncio.ensure_future(take_one())
        await gate.entered("1", "2", "3")
        gate.release("1")
        assert await task == "1"
        await gate.entered("2-cancelled", "3-cancelled")
        await left(0)
        assert (await aiogpu.available_resources())["CPU"] == 8.0


async def test_an_error_in_the_middle_cancels_the_rest(
    address: str, gate: Gate
) -> None:
    path = gate.path
    linger = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def fail_at_b(name: str) -> str:
        result = await linger(path, name)
        if name == "b":
            raise KeyError(name)
        return result

    async with aiogpu.init(address=address, num_cpus=3):
        results = fail_at_b.map("abcde", limit=4)
        first = asyncio.ensure_future(results.__anext__())
        await gate.entered("a", "b", "c")
        gate.release("b")
        await gate.entered("d")
        assert not first.done(), "what comes before the error is not lost"
        gate.release("a")
        assert await first == "a"
        with pytest.raises(KeyError, match="b") as caught:
            await anext(results)
        assert "raise KeyError(name)" in str(caught.value.__cause__)
        await gate.entered("c-cancelled", "d-cancelled")


async def test_a_cancelled_consumer_stops_what_runs(
    address: str, gate: Gate, linger: aiogpu.types.RemoteFunction[[str], str]
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        results = linger.map("abc", limit=3)
        task = asyncio.ensure_future(results.__anext__())
        await gate.entered("a", "b")
        task.cancel()
        await asyncio.wait([task])
        await gate.entered("a-cancelled", "b-cancelled")
        assert await tasks.add.remote(1) == 2
        assert "c" not in gate.pids, "what waits goes before what runs"


async def test_a_worker_that_dies_fails_its_result(address: str) -> None:
    """[B38]"""
    async with aiogpu.init(address=address, num_cpus=2, log_to_driver=False):
        with pytest.raises(aiogpu.WorkerDiedError, match="code 7"):
            async for _ in tasks.exit_at_once.map(names_of(7)):
                pass
        assert await tasks.add.remote(1) == 2


def names_of(code: int) -> Iterator[int]:
    """An iterable that is still read when its first call has failed."""
    while True:
        yield code


async def test_a_node_that_is_shut_down_ends_it(
    address: str, gate: Gate, linger: aiogpu.types.RemoteFunction[[str], str]
) -> None:
    """[B6]"""
    async with aiogpu.init(address=address, num_cpus=2):
        results = linger.map(names(), limit=4)
        task = asyncio.ensure_future(results.__anext__())
        await gate.entered("1", "2")
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await task


def test_a_program_that_ends_in_the_midst_leaves_nothing(address: str) -> None:
    async def main() -> None:
        await aiogpu.init(address=address, num_cpus=2)
        for source in (names(), later_names()):
            results = tasks.echo.map(source)
            kept.append((results, await anext(results)))

    kept: list[object] = []
    aiogpu.run(main())
    assert [result for _, result in kept] == ["1", "1"]  # type: ignore[misc,attr-defined]
