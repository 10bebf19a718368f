"""What is said where asyncio's and Python's own words do not help. [B40]"""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiogpu


@aiogpu.remote
def add(number: int) -> int:
    return number + 1


@pytest.mark.usefixtures("no_leaks")
async def test_a_task_group_is_given_a_handle() -> None:
    async with aiogpu.init(address="inline", num_cpus=1):
        handle = add.remote(1)
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(handle)  # type: ignore[arg-type]
        (error,) = caught.value.exceptions
        assert "give it handle.coro()" in str(error)
        assert "coro" not in repr(handle)
        assert await handle == 2


async def test_run_inside_a_loop_says_what_to_write() -> None:
    async def main() -> None:
        """Never begun."""

    with pytest.raises(aiogpu.NoLoopError, match="write `await main\\(\\)`"):
        aiogpu.run(main())


def test_without_a_loop_servers_and_notebooks_are_named() -> None:
    with pytest.raises(aiogpu.NoLoopError, match="a server and a notebook run it on"):
        add.remote(1)


@pytest.mark.usefixtures("no_leaks")
async def test_a_call_after_the_block_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "aiogpu"):
        async with aiogpu.init(address="inline", num_cpus=1):
            assert await add.remote(1) == 2
        assert caplog.text == ""
        assert await add.remote(1) == 2
        assert caplog.text.count("opens a node with the defaults") == 1
        assert await add.remote(1) == 2
        await aiogpu.shutdown()
        async with aiogpu.init(address="inline", num_cpus=1):
            assert await add.remote(1) == 2
    assert caplog.text.count("opens a node with the defaults") == 1
