"""Maps addresses to engines; each is imported at first use."""

from __future__ import annotations

import asyncio
import os

from aiogpu.engines.base import CLIENT, Engine, NodeOptions, no_client
from aiogpu.errors import NodeError, OptionError

OF_PROGRAMS = frozenset(
    {"preload", "learns", "log_to_driver", "only_looks", "dashboard"}
)
"""Options of a program that joins a node; other options belong to the node."""


def create_engine(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Engine:
    """Make the engine for an address; it is not open yet.

    Args:
        address: None or "local" for a node embedded in this program, "inline" for
            one without processes, "auto" for the user's node that runs on this
            machine, the path of a node's socket, or "ray" for a Ray cluster.
        options: the options of `init`.
        loop: the running loop.

    Raises:
        OptionError: the address is unknown, or an address of Ray Client; or a
            `runtime_env` is given for another engine than Ray.
    """
    if options.runtime_env is not None and address != "ray":
        where = "this node" if address is None else f"address={address!r}"
        raise OptionError(
            f"init(runtime_env=...) brings modules and files to the nodes of a Ray "
            f"cluster, and {where} needs none brought. Leave it out, or give "
            f"address='ray'. Variables of one task: "
            f"@aiogpu.remote(runtime_env={{'env_vars': {{...}}}})."
        )
    if options.dashboard and address == "inline":
        raise OptionError(
            "init(address='inline', dashboard=True): an inline node runs tasks in this "
            "process and has nothing that a dashboard could ask. Leave the option out."
        )
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
        raise OptionError(no_client(_source(address)))
    raise OptionError(
        f"{_source(address)}: unknown address. Give 'auto' to join the node that "
        f"`aiogpu start --head` has started, or the path of its socket; leave address "
        f"out for a node inside this program; or give 'inline' to run tasks in this "
        f"process, or 'ray' for a Ray cluster."
    )


def _cluster(options: NodeOptions, loop: asyncio.AbstractEventLoop) -> Engine:
    try:
        from aiogpu.engines.ray.engine import RayEngine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise NodeError(
            f"{_source('ray')}: Ray is not installed here. Install it by: "
            f"pip install 'aiogpu[ray]'."
        ) from error
    return RayEngine(options, loop)


def _source(address: str) -> str:
    """Name the source of an address: the environment or the program."""
    if os.environ.get("AIOGPU_ADDRESS") == address:
        return f"AIOGPU_ADDRESS={address!r}"
    return f"init(address={address!r})"
