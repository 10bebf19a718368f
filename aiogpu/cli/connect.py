"""Joins the node that a command asks, and defines option types for quantities.

The option types name themselves for users: click would call one "float range".
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import click

import aiogpu
from aiogpu.api.node import Opening
from aiogpu.api.session import current_session
from aiogpu.core.model.units import LEAST, bytes_told, parse_size, too_small
from aiogpu.core.model.units import size as told_size
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.remote import RemoteEngine
from aiogpu.errors import OptionError
from aiogpu.observe.recorder import Span
from aiogpu.observe.status import NodeStatus
from aiogpu.observe.why import Why
from aiogpu.runtime.directories import check_meeting, default_socket


class Seconds(click.FloatRange):
    """A length of time."""

    name = "number of seconds"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """The placeholder in the help."""
        return "SECONDS"


class Number(click.FloatRange):
    """An amount that may be a fraction."""

    name = "number"


class Whole(click.IntRange):
    """A count."""

    name = "whole number"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """The placeholder in the help."""
        return "NUMBER"


def size(text: str) -> str | int:
    """An amount of memory: with a unit, or in bytes as in Ray's command.

    Raises:
        BadParameter: it is not an amount of memory.
    """
    is_bytes = text.isdecimal()
    try:
        count = parse_size("", int(text) if is_bytes else text)
    except OptionError:
        raise click.BadParameter(
            f"{text!r} is not an amount of memory; write it with a unit, such as 64GiB "
            f"or 500MB, or in bytes."
        ) from None
    if count and (meant := too_small(count)):
        advice = f"write it with its unit, such as {meant}"
        if not is_bytes:
            advice = f"give {told_size(LEAST)} at least"
        raise click.BadParameter(f"{text!r} is read as {bytes_told(count)}; {advice}.")
    return count if is_bytes else text


def size_or_share(text: str) -> str | int:
    """An amount of GPU memory, or "share": in proportion to the share of the GPU."""
    return text if text == "share" else size(text)


AUTO: Final = "auto"
UNIX: Final = "unix:"
"""Optional prefix of a socket's path, as in `aiogpu.init`."""
EMBEDDED: Final = ("local", "inline")
"""Addresses of nodes that are visible only to the program that opened them."""
PATIENCE: Final = 15.0
"""Seconds that a node has for an answer; a busy one needs a tenth of a second."""
ADVICE: Final = "Start one by `aiogpu start --head`"
T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Node:
    """The node that this loop has joined.

    Each method raises TimeoutError if the node does not answer within `patience`
    seconds; None waits without limit.
    """

    def __init__(self, patience: float | None) -> None:
        self._patience = patience

    async def status(self) -> NodeStatus:
        """See `aiogpu.status`."""
        async with asyncio.timeout(self._patience):
            return await aiogpu.status()

    async def why(self, task_id: int) -> Why:
        """See `aiogpu.why`."""
        async with asyncio.timeout(self._patience):
            return await aiogpu.why(task_id)

    async def timeline(self) -> list[Span]:
        """The last tasks that have run on it."""
        engine = current_session().engine
        assert isinstance(engine, RemoteEngine)
        async with asyncio.timeout(self._patience):
            return await engine.timeline()


def address_option(command: Command) -> Command:
    """Add the option that names the node to ask."""
    return click.option(
        "--address",
        "--socket",
        "address",
        metavar="SOCKET",
        callback=_checked,
        help="The node's socket; if not given, AIOGPU_ADDRESS, or where "
        "`aiogpu start` listens.",
    )(command)


def _checked(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str:
    if value in EMBEDDED:
        raise click.BadParameter(
            f"{value!r} is a node inside a program, which only that program can ask. "
            f"Give the socket of one that `aiogpu start` has started."
        )
    return value or default_address()


def default_address() -> str:
    """The address if none is given."""
    default = os.environ.get("AIOGPU_ADDRESS") or AUTO
    return AUTO if default in EMBEDDED else default


def socket_path(address: str) -> str:
    """The path of the socket of an address."""
    return default_socket() if address == AUTO else address.removeprefix(UNIX)


def check_there(address: str) -> None:
    """Raise an error with advice if no node can be at that address.

    Raises:
        ClickException: there is no socket.
        NodeError: another user may control the place.
    """
    if address == "ray" or address.startswith("ray://"):
        raise click.ClickException(
            f"{address!r} is a Ray cluster, which Ray's own `ray status` tells of; "
            f"give the --address of a node that `aiogpu start` has started."
        )
    path = socket_path(address)
    check_meeting(path)
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        raise no_node_error(f"there is no socket {path}") from None
    except OSError as error:
        raise no_node_error(f"{path}: {error.strerror}") from None
    if not is_socket:
        raise no_node_error(f"{path} is no socket")


def no_node_error(why: str) -> click.ClickException:
    """The error if there is no node to ask."""
    return click.ClickException(
        f"no node runs: {why}. {ADVICE}, or name another node by --address."
    )


def no_answer_error(address: str, patience: float | None) -> click.ClickException:
    """The error for a node that does not answer."""
    within = "" if patience is None else f" within {patience:g} s"
    return click.ClickException(
        f"the node at {socket_path(address)} has not answered{within}; `aiogpu doctor` "
        f"says how it stands, and `aiogpu stop --force` ends it."
    )


def joining(address: str) -> Opening:
    """Return an `Opening` that joins a node to look at it, not to run tasks."""
    options = NodeOptions(only_looks=True, log_to_driver=False)
    return Opening(address, options, ignore_reinit_error=False)


@asynccontextmanager
async def joined(
    address: str, patience: float | None = PATIENCE
) -> AsyncIterator[Node]:
    """Join the node at an address for the length of the block.

    Args:
        address: its socket, or `AUTO`.
        patience: seconds that it has for each answer; None for ever.

    Raises:
        ClickException: none runs there, or it does not answer.
        NodeError: another user may control the place.
    """
    check_there(address)
    try:
        async with asyncio.timeout(patience):
            node = await joining(address)
    except TimeoutError:
        raise no_answer_error(address, patience) from None
    except (aiogpu.errors.NodeError, OSError) as error:
        raise click.ClickException(str(error)) from None
    try:
        yield Node(patience)
    except (aiogpu.NodeDiedError, aiogpu.errors.NodeClosedError) as error:
        raise click.ClickException(str(error)) from None
    except TimeoutError:
        raise no_answer_error(address, patience) from None
    finally:
        # Nothing of a view has to stop first, and the node may not answer any more.
        await node.shutdown(at_once=True)


def ask(
    address: str,
    question: Callable[[Node], Awaitable[T]],
    patience: float | None = PATIENCE,
) -> T:
    """Join a node, await `question(node)`, leave, and return the answer."""

    async def main() -> T:
        async with joined(address, patience) as node:
            return await question(node)

    return aiogpu.run(main())
