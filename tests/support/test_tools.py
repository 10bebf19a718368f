"""The gate lets nobody wait for ever; what is drawn of cases covers each value."""

from __future__ import annotations

import asyncio
import socket
from itertools import product

import pytest

from tests.support.gate import Gate
from tests.support.sampling import covering


@pytest.mark.parametrize("turns", range(6))
async def test_who_comes_at_the_last_moment_is_not_waited_for(turns: int) -> None:
    with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
        async with asyncio.timeout(30), Gate.open() as gate:
            early.connect(gate.path)
            early.sendall(b"early 1\n")
            await gate.entered("early")
            late.connect(gate.path)
            for _ in range(turns):
                await asyncio.sleep(0)
        early.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(early, 1) == b""


MATRIX = {
    f"{engine}-{kind}-{size}": frozenset(
        {("engine", engine), ("kind", kind), ("size", size)}
    )
    for engine, kind, size in product(("local", "inline"), "abcde", range(3))
}


def test_each_value_is_in_a_case_and_no_more_than_needed() -> None:
    drawn = covering(MATRIX)
    found = set().union(*(MATRIX[name] for name in drawn))
    assert found == set().union(*MATRIX.values())
    assert len(drawn) == 5


def test_the_order_of_the_cases_does_not_matter() -> None:
    assert covering(MATRIX) == covering(dict(reversed(MATRIX.items())))


def test_a_case_by_itself_is_drawn() -> None:
    assert covering({"only": frozenset({("engine", "local")})}) == {"only"}
    assert covering({}) == set()
