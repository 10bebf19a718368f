"""Whether a cluster answers at an address: asked before Ray is, which tries for long.

Ray's servers speak HTTP/2, so whoever listens there sends the first frame of it. What
comes by `ray://` is asked further, for a ping, as Ray's own client does.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from aiogpu.engines.cluster.asking import begun, unless_left
from aiogpu.engines.cluster.ping import ping
from aiogpu.errors import NodeError

REACHABLE: Final = 10.0
"""Seconds in which a server must say something."""
CLIENT_PORT: Final = 10001
"""Where Ray's server for `ray://` listens unless told otherwise."""
CLUSTER_PORT: Final = 6379
"""Where a cluster's own server listens unless told otherwise."""
HEADER: Final = 9
"""Bytes of a frame's header; the fourth is its kind."""
SETTINGS: Final = 4
"""The kind of a server's first frame."""
GREETING: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS)) + bytes(5)
)
"""What a client begins with."""
TOKENS: Final = (
    "the cluster has tokens, and this program sends none of them. Start it with "
    "RAY_AUTH_MODE=token in its environment, and the cluster's token in "
    "RAY_AUTH_TOKEN, or in ~/.ray/auth_token."
)


def place_of(address: str) -> tuple[str, int]:
    """The host and port that an address names.

    Raises:
        NodeError: it names none.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise NodeError(
            f"init(address={address!r}) names no host and port; write "
            f"'ray://host:{CLIENT_PORT}'."
        )
    return host, port or CLIENT_PORT


def with_port(address: str) -> str:
    """The same with a port: Ray's own client tries for long where there is none.

    Raises:
        NodeError: it names no host.
    """
    host, port = place_of(address)
    if "://" not in address or urlsplit(address).port is not None:
        return address
    written = f"[{host}]" if ":" in host else host
    return f"{urlsplit(address).scheme}://{written}:{port}"


async def check_reachable(address: str) -> None:
    """Make sure that a cluster answers there, in a bounded time.

    Raises:
        NodeError: says what is there instead.
    """
    host, port = place_of(address)
    said = await answers(host, port, REACHABLE)
    is_client = "://" in address
    if said is not None:
        start = "--ray-client-server-port" if is_client else "--port"
        raise NodeError(
            f"init(address={address!r}): no Ray cluster answers at {host}:{port}: "
            f"{said}. Is its head started, by `ray start --head {start}={port}`? One "
            f"that has just been started takes some seconds to listen."
        )
    if is_client and not _is_encrypted():
        await _check_client_server(address, host, port)


async def _check_client_server(address: str, host: str, port: int) -> None:
    answer = begun(lambda: ping(host, port, REACHABLE))
    code, details = await asyncio.wrap_future(unless_left(answer))
    if code == "UNAUTHENTICATED" and os.environ.get("RAY_AUTH_MODE") != "token":
        raise NodeError(f"init(address={address!r}): {TOKENS}")
    if code == "UNIMPLEMENTED":
        raise NodeError(
            f"init(address={address!r}): at {host}:{port} is no server for ray://, "
            f"which listens on {CLIENT_PORT} or what `ray start "
            f"--ray-client-server-port` has said. The port of the cluster itself, "
            f"{CLUSTER_PORT} or so, is for RAY_ADDRESS=host:port and address='ray'."
        )
    if code not in ("OK", "UNAUTHENTICATED"):
        raise NodeError(
            f"init(address={address!r}): the server at {host}:{port} accepts "
            f"connections and answers no ping of Ray's within {REACHABLE:g} s: "
            f"{details or code}. If it is a Ray head's, look at its log "
            f"ray_client_server.err."
        )


def _is_encrypted() -> bool:
    """Whether Ray was told to use certificates; only it can speak to the server."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


async def answers(host: str, port: int, seconds: float) -> str | None:
    """What keeps a server of Ray's from being there; None if one is."""
    doing = "no answer"
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            doing = "it accepts connections and says nothing"
            try:
                return None if _is_encrypted() else await _greeted(reader, writer)
            finally:
                await _closed(writer)
    except TimeoutError:
        return f"{doing} within {seconds:g} s"
    except OSError as error:
        return str(error) or type(error).__name__


async def _greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> str | None:
    writer.write(GREETING)
    said = b""
    while len(said) < HEADER and (more := await reader.read(HEADER - len(said))):
        said += more
    if len(said) == HEADER and said[3] == SETTINGS:
        return None
    if not said:
        return "it closes the connection at once"
    return f"what listens there is not Ray, and says {said!r}"


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
