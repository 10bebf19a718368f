"""The gate of the tests lets nobody wait for ever, itself included."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.gate import Gate


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
