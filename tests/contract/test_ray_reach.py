"""What is told of an address where no Ray cluster answers; needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.cluster import GREETING, check_reachable, host_and_port
from aiogpu.errors import NodeError

pytestmark = pytest.mark.ray

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SETTINGS = bytes((0, 0, 0, 4)) + bytes(5)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """The port of a server of this machine that serves so."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def saying(said: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(GREETING)) == GREETING
        writer.write(said)
        writer.close()

    return serve


async def staying_silent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read(-1)
    writer.close()


async def test_a_server_of_rays_answers():
    async with listening(saying(SETTINGS)) as port:
        await check_reachable(f"127.0.0.1:{port}", 10)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "is not Ray, and says b''"),
        (b"SSH-2.0-OpenSSH", "is not Ray, and says b'SSH-2.0-O'"),
        (b"no", "is not Ray, and says b'no'"),
    ],
)
async def test_what_listens_in_its_place_is_named(said, told):
    async with listening(saying(said)) as port:
        with pytest.raises(NodeError) as caught:
            await check_reachable(f"127.0.0.1:{port}", 10)
    assert told in str(caught.value)
    assert f"`ray start --head --port={port}`" in str(caught.value)


async def test_one_that_says_nothing_is_waited_for_in_bounds():
    async with listening(staying_silent) as port:
        with pytest.raises(NodeError, match=r"no answer within 0\.1 s"):
            await check_reachable(f"127.0.0.1:{port}", 0.1)


async def test_where_nobody_listens_it_is_said_so():
    with pytest.raises(NodeError, match=r"Errno 111.*--port=1`"):
        await check_reachable("127.0.0.1:1", 10)


async def test_a_server_with_certificates_is_left_to_ray(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    async with listening(staying_silent) as port:
        await check_reachable(f"127.0.0.1:{port}", 10)


@pytest.mark.parametrize("address", ["head", "head:", "head:many", ":6379"])
def test_an_address_names_host_and_port(address):
    assert host_and_port("head:6379") == ("head", 6379)
    assert host_and_port("[::1]:7") == ("::1", 7)
    with pytest.raises(NodeError, match=f"RAY_ADDRESS='{address}' names no host"):
        host_and_port(address)
