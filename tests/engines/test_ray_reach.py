"""What is told of an address where no Ray cluster answers; needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiogpu.engines.cluster import reach
from aiogpu.engines.cluster.reach import (
    GREETING,
    answers,
    check_reachable,
    place_of,
    with_port,
)
from aiogpu.errors import NodeError

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
        assert await answers("127.0.0.1", port, 10) is None
        await check_reachable(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "closes the connection at once"),
        (b"SSH-2.0-OpenSSH", "is not Ray, and says b'SSH-2.0-O'"),
        (b"no", "is not Ray, and says b'no'"),
    ],
)
async def test_what_listens_in_its_place_is_named(said, told):
    async with listening(saying(said)) as port:
        with pytest.raises(NodeError) as caught:
            await check_reachable(f"ray://127.0.0.1:{port}")
    assert told in str(caught.value)
    assert f"`ray start --head --ray-client-server-port={port}`" in str(caught.value)


async def test_one_that_says_nothing_is_waited_for_in_bounds(monkeypatch):
    monkeypatch.setattr(reach, "REACHABLE", 0.1)
    async with listening(staying_silent) as port:
        with pytest.raises(NodeError, match=r"says nothing within 0\.1 s"):
            await check_reachable(f"127.0.0.1:{port}")


async def test_where_nobody_listens_it_is_said_so():
    with pytest.raises(NodeError, match=r"Errno 111.*--port=1`"):
        await check_reachable("127.0.0.1:1")


async def test_a_server_with_certificates_is_left_to_ray(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    async with listening(staying_silent) as port:
        assert await answers("127.0.0.1", port, 10) is None
        await check_reachable(f"ray://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (("OK", ""), None),
        (("UNIMPLEMENTED", ""), "no server for ray://.*6379.*RAY_ADDRESS=host:port"),
        (("UNAUTHENTICATED", "no token"), "RAY_AUTH_MODE=token.*RAY_AUTH_TOKEN"),
        (("DEADLINE_EXCEEDED", ""), "no ping of Ray's within 10 s: DEADLINE_EXCEEDED"),
        (("UNAVAILABLE", "is gone"), "is gone.*ray_client_server.err"),
    ],
)
async def test_the_answer_to_a_ping_is_put_in_words(monkeypatch, answer, told):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def ping(*given: Any) -> tuple[str, str]:
        return answer

    monkeypatch.setattr(reach, "ping", ping)
    async with listening(saying(SETTINGS)) as port:
        checking = check_reachable(f"ray://127.0.0.1:{port}")
        if told is None:
            await checking
        else:
            with pytest.raises(NodeError, match=told):
                await checking


async def test_a_program_with_a_token_is_left_to_ray(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(reach, "ping", lambda *given: ("UNAUTHENTICATED", ""))
    async with listening(saying(SETTINGS)) as port:
        await check_reachable(f"ray://127.0.0.1:{port}")


def test_ports_have_defaults():
    assert place_of("ray://head") == ("head", 10001)
    assert place_of("head:6379") == ("head", 6379)
    with pytest.raises(NodeError, match="names no host and port"):
        place_of("ray://head:many")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("ray://head", "ray://head:10001"),
        ("ray://head:", "ray://head:10001"),
        ("ray://[::1]", "ray://[::1]:10001"),
        ("ray://head:7", "ray://head:7"),
        ("head:6379", "head:6379"),
    ],
)
def test_ray_is_given_the_port(given, asked):
    assert with_port(given) == asked
