"""[B18] Progress bars of others over the results of a map: tqdm's and rich's."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from tqdm.asyncio import tqdm

import aiogpu
from tests.contract import tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.mark.parametrize("chunk", [None, 7, "auto"])
async def test_tqdm_draws_a_whole_bar(address: str, chunk: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        drawn = io.StringIO()
        bar = tqdm(tasks.add.map(range(50), chunk=chunk), file=drawn)
        assert bar.total == 50
        assert [each async for each in bar] == list(range(1, 51))
        assert bar.n == 50
        assert "100%" in drawn.getvalue()
        assert "50/50" in drawn.getvalue()


async def test_tqdm_counts_what_has_no_length(address: str) -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)

    async with aiogpu.init(address=address, num_cpus=2):
        drawn = io.StringIO()
        bar = tqdm(tasks.add.map(numbers()), file=drawn)
        assert bar.total is None
        assert [each async for each in bar] == [1, 2, 3, 4, 5]
        assert "5it" in drawn.getvalue()
        named = tqdm(tasks.add.map(numbers()), total=5, file=drawn)
        assert sum([each async for each in named]) == 15
        assert "5/5" in drawn.getvalue()


async def test_an_error_goes_through_a_bar(address: str) -> None:
    @aiogpu.remote
    def check(number: int) -> int:
        if number == 3:
            raise KeyError(number)
        return number

    async with aiogpu.init(address=address, num_cpus=2):
        bar = tqdm(check.map(range(9), chunk=2), file=io.StringIO())
        with pytest.raises(KeyError, match="3"):
            async for _ in bar:
                pass
        assert bar.n == 3


async def test_leaving_a_bar_stops_what_runs(address: str) -> None:
    async def leave() -> int:
        endless: Any = iter(int, 1)
        async for each in tqdm(tasks.add.map(endless), file=io.StringIO()):
            return int(each)
        raise AssertionError

    async with aiogpu.init(address=address, num_cpus=2):
        assert await leave() == 1
        gc.collect()
        async with asyncio.timeout(60):
            while (await aiogpu.status()).tasks:
                await asyncio.sleep(0)


async def test_tqdm_over_handles_that_end(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        handles = [tasks.add.remote(number) for number in range(5)]
        bar = tqdm(aiogpu.as_completed(handles), file=io.StringIO())
        assert bar.total == 5
        assert {await handle async for handle in bar} == {1, 2, 3, 4, 5}
        assert bar.n == 5


async def test_rich_is_advanced_by_hand(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        drawn = io.StringIO()
        console = Console(file=drawn, width=80)
        results = tasks.add.map(range(50), chunk="auto")
        with Progress(MofNCompleteColumn(), console=console) as progress:
            bar = progress.add_task("adding", total=len(results))
            async for _ in results:
                progress.advance(bar)
        assert "50/50" in drawn.getvalue()
