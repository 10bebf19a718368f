"""Whether a cluster answers at an address: asked before Ray is, which tries for long.

Ray's servers speak HTTP/2, so whoever listens there sends the first frame of it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from aiogpu.errors import NodeError

REACHABLE: Final = 10.0
"""Seconds in which a server must say something."""
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
    parts = urlsplit(f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise NodeError(
            f"RAY_ADDRESS={address!r} names no host and port; write "
            f"host:{CLUSTER_PORT}, as `ray start --head` has printed it."
        )
    return host, port


async def check_reachable(address: str) -> None:
    """Make sure that a cluster answers there, in a bounded time.

    Raises:
        NodeError: says what is there instead.
    """
    host, port = place_of(address)
    said = await answers(host, port, REACHABLE)
    if said is not None:
        raise NodeError(
            f"init(address='ray') with RAY_ADDRESS={address!r}: no Ray cluster answers "
            f"at {host}:{port}: {said}. Is its head started, by `ray start --head "
            f"--port={port}`? One that has just been started takes some seconds to "
            f"listen."
        )


def _is_encrypted() -> bool:
    """Whether Ray was told to use certificates; only it can speak to the server."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


async def answers(host: str, port: int, seconds: float) -> str | None:
    """Return what keeps a server of Ray's from being there; None if one is."""
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
