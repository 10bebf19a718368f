"""[B16] Thousands of calls in a row, each of which needs the result before it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from tests.contract import chain_tasks as c
from tests.contract.node_here import node_here

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

LENGTH: Final = 3_000
ENDS: Final = {
    "fails": KeyError,
    "is cancelled": aiogpu.TaskCancelledError,
    "is late": aiogpu.TaskTimeoutError,
    "gives": int,
}
"""How the head of a chain may end, and of what type all links are then."""


@pytest.fixture(params=["local", "joined", "inline"])
async def node(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[str]:
    """Two CPUs; nothing is logged, since nothing goes wrong on the node."""
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(120):
            if request.param == "joined":
                async with node_here(tmp_path) as here, here.join():
                    yield request.param
            else:
                async with aiogpu.init(address=request.param, num_cpus=2):
                    yield request.param
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("has_actor", [False, True], ids=["tasks", "actor"])
@pytest.mark.parametrize("how", ENDS)
async def test_all_links_end_as_the_head_does(
    how: str, has_actor: bool, node: str
) -> None:
    """And the node goes on: a call that needs nothing of it is served."""
    adder = c.Adder.remote() if has_actor else None
    first = c.head(how)
    chain = c.links(first, LENGTH, adder)
    if how == "is cancelled":
        first.cancel()
    ended = await asyncio.gather(*chain, return_exceptions=True)
    assert {type(one) for one in ended} == {ENDS[how]}
    if how == "fails":
        assert str(ended[-1]) == str(ended[0]) == "'the head'"
    if how == "gives":
        assert ended == list(range(1, LENGTH + 1))
    assert await c.increase.remote(1) == 2
    if adder is not None:
        assert await adder.increase.remote(1) == 2


@pytest.mark.parametrize("has_actor", [False, True], ids=["tasks", "actor"])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(
    "code", [c.end_softly, c.end_plainly], ids=["softly", "plainly"]
)
async def test_so_they_do_where_a_task_has_made_them(
    code: Any, how: str, has_actor: bool, node: str
) -> None:
    if node == "joined":
        pytest.skip("the task is the node's own, as where it is local")
    kinds = await code.remote(how, LENGTH, has_actor)
    assert kinds == [ENDS[how].__name__]
    assert await c.increase.remote(1) == 2
