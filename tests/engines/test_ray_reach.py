"""What is told of an address where no Ray cluster answers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aiogpu.errors import NodeError

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.cluster import connection_error, host_and_port

pytestmark = pytest.mark.ray


async def test_a_server_that_accepts_connections_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        assert await connection_error(address, 10) is None


async def test_where_nobody_listens_it_is_said_so() -> None:
    error = await connection_error("127.0.0.1:1", 10)
    assert error is not None
    assert "Errno 111" in error


async def test_a_server_that_does_not_answer_is_waited_for_in_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_address: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    assert await connection_error("head:6379", 0.1) == "no answer within 0.1 s"


@pytest.mark.parametrize("address", ["head", "head:", "head:many", ":6379"])
def test_an_address_names_host_and_port(address: str) -> None:
    assert host_and_port("head:6379") == ("head", 6379)
    assert host_and_port("[::1]:7") == ("::1", 7)
    with pytest.raises(NodeError, match=f"RAY_ADDRESS='{address}' names no host"):
        host_and_port(address)
