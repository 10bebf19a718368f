"""Maps addresses to engines; each is imported at first use."""

from __future__ import annotations

import asyncio
import os

from aiogpu.engines.base import CLIENT, Engine, NodeOptions, no_client
from aiogpu.errors import NodeError, OptionError

OF_PROGRAMS = frozenset({"preload", "learns", "log_to_driver", "only_looks"})
"""What a program itself chooses that joins a node; all else is the node's."""


def create_engine(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Engine:
    """Make the engine for an address; it is not open yet.

    Args:
        address: None or "local" for a node embedded in this program, "inline" for
            one without processes, "auto" for the user's node that runs on this
            machine, the path of a node's socket, or "ray" for a Ray cluster.
        options: what `init` was asked for.
        loop: the running loop.

    Raises:
        OptionError: no engine is known by that address, or it is one of Ray Client.
    """
    if address is None or address == "local":
        from aiogpu.engines.local import LocalEngine

        return LocalEngine(options, loop)
    if address == "inline":
        from aiogpu.engines.inline.engine import InlineEngine

        return InlineEngine(options, loop)
    if address == "auto" or address.startswith(("/", "unix:")):
        from aiogpu.engines.remote import RemoteEngine
        from aiogpu.runtime.directories import default_socket

        path = default_socket() if address == "auto" else address
        return RemoteEngine(path.removeprefix("unix:"), options, loop)
    if address == "ray":
        return _cluster(options, loop)
    if address.startswith(CLIENT):
        raise OptionError(no_client(_said(address)))
    raise OptionError(
        f"{_said(address)}: no node is known by that. Give 'auto' to join the "
        f"node that `aiogpu start --head` has started, or the path of its socket; or "
        f"leave address out for a node inside this program, or give 'inline' to have "
        f"tasks run in this very process, or 'ray' for a Ray cluster."
    )


def _cluster(options: NodeOptions, loop: asyncio.AbstractEventLoop) -> Engine:
    try:
        from aiogpu.engines.ray.engine import RayEngine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise NodeError(
            f"{_said('ray')}: Ray is not installed here. Install it by: "
            f"pip install 'aiogpu[ray]'."
        ) from error
    return RayEngine(options, loop)


def _said(address: str) -> str:
    """Describe the source of an address that the program did not give itself."""
    if os.environ.get("AIOGPU_ADDRESS") == address:
        return f"AIOGPU_ADDRESS={address!r}"
    return f"init(address={address!r})"
