"""Joins the node that a command asks, and defines option types for quantities.

A command that is not told which node takes the only one that there is: the service, or
the node inside a program of this user.

The option types name themselves for users: click would call one "float range".
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import aiogpu
from aiogpu.api.node import Opening, no_such_task
from aiogpu.api.session import current_session
from aiogpu.cli.nodes import (
    SERVICE,
    FoundNode,
    SeenNode,
    find_nodes,
    is_private,
    place_of,
    program_name,
)
from aiogpu.core.model.units import LEAST, byte_count, parse_size, too_small
from aiogpu.core.model.units import size as told_size
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.remote import RemoteEngine
from aiogpu.errors import NoSuchTaskError, OptionError
from aiogpu.observe.status import EndedTask, NodeStatus
from aiogpu.observe.trace import Span
from aiogpu.observe.why import Why
from aiogpu.runtime.directories import check_socket, default_socket


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
        raise click.BadParameter(f"{text!r} is read as {byte_count(count)}; {advice}.")
    return count if is_bytes else text


def size_or_share(text: str) -> str | int:
    """An amount of GPU memory, or "share": in proportion to the share of the GPU."""
    return text if text == "share" else size(text)


AUTO: Final = "auto"
UNIX: Final = "unix:"
"""Optional prefix of a socket's path, as in `aiogpu.init`."""
ANY: Final = "any"
"""The only node that there is, if none is named."""
OF_PROCESS: Final = "pid:"
"""The node of a process, whose number follows."""
EMBEDDED: Final = ("local", "inline")
"""Addresses by which a program opens a node inside itself; they name none."""
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
            try:
                return await aiogpu.why(task_id)
            except NoSuchTaskError:
                raise no_such_task(task_id, "`aiogpu list tasks`") from None

    async def timeline(self) -> list[Span]:
        """The last tasks that have run on it."""
        async with asyncio.timeout(self._patience):
            return await self._engine.timeline()

    async def ended(self) -> tuple[EndedTask, ...]:
        """The last tasks that have ended on it, the latest first."""
        async with asyncio.timeout(self._patience):
            return await self._engine.ended()

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        """The last call of each method of an actor that has failed, with traceback."""
        async with asyncio.timeout(self._patience):
            return await self._engine.ended(actor)

    async def stop(self, what: str, number: int) -> tuple[str, Why | None]:
        """Cancel a task or kill an actor; see `RemoteEngine.stop_task`."""
        async with asyncio.timeout(self._patience):
            return await self._engine.stop_task(what, number)

    @property
    def _engine(self) -> RemoteEngine:
        engine = current_session().engine
        assert isinstance(engine, RemoteEngine)
        return engine


def service_option(command: Command) -> Command:
    """Add the option that names a service."""
    return click.option(
        "--address",
        "--socket",
        "address",
        metavar="SOCKET",
        callback=_checked,
        help="The node's socket; if not given, AIOGPU_ADDRESS, or where "
        "`aiogpu start` listens.",
    )(command)


def address_option(command: Command) -> Command:
    """Add the options that name the node to ask, whether a service or in a program.

    The command gets `address`, which is for `joined` and `ask`, or for `resolved`.
    """
    by_pid = click.option(
        "--pid",
        type=Whole(1),
        metavar="PID",
        is_eager=True,
        expose_value=False,
        callback=_note_pid,
        shell_complete=_pids,
        help="The process that the node is in: a program, or a service.",
    )
    by_address = click.option(
        "--address",
        "--socket",
        "address",
        metavar="SOCKET",
        callback=_chosen,
        help="The node's socket; if neither is given, AIOGPU_ADDRESS, or the only "
        "node that this user has.",
    )
    return by_pid(by_address(command))


def _checked(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str:
    if value in EMBEDDED:
        raise click.BadParameter(
            f"{value!r} is a node inside a program, which runs that program's tasks "
            f"alone. Give the socket of one that `aiogpu start` has started."
        )
    return value or default_address()


def _chosen(ctx: click.Context, _option: click.Parameter, value: str | None) -> str:
    pid = ctx.meta.get(OF_PROCESS)
    if pid is not None and value:
        raise click.UsageError("--pid and --address both name a node: give one.", ctx)
    if pid is not None:
        return f"{OF_PROCESS}{pid}"
    if value in EMBEDDED:
        raise click.BadParameter(
            f"{value!r} is how a program opens a node inside itself, and names none. "
            f"Give that program's --pid, or the socket of a node."
        )
    return value or named_address() or ANY


def _note_pid(ctx: click.Context, _option: click.Parameter, pid: int | None) -> None:
    ctx.meta[OF_PROCESS] = pid


def check_unnamed(why: str) -> None:
    """Raise `UsageError` if the running command was given a node by an option."""
    ctx = click.get_current_context()
    source = ctx.get_parameter_source("address")
    if ctx.meta.get(OF_PROCESS) or source is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"{why}: leave out --pid and --address.", ctx)


def _pids(
    _context: click.Context, _option: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Processes with a node whose numbers begin so."""
    try:
        found = find_nodes().nodes
    except aiogpu.errors.NodeError:
        return []  # a shell has no place to show why
    return [
        CompletionItem(str(one.pid), help=one.program)
        for one in found
        if one.pid and str(one.pid).startswith(begun)
    ]


def named_address() -> str | None:
    """The address in AIOGPU_ADDRESS, if that names a node of another process."""
    named = os.environ.get("AIOGPU_ADDRESS")
    return None if named in EMBEDDED else named or None


def default_address() -> str:
    """The address of the service if none is given."""
    return named_address() or AUTO


def resolved(address: str) -> str:
    """Return the address of one node, where `ANY` or a process was given.

    Raises:
        SeveralNodesError: there are several.
        ClickException: that process has none.
    """
    if address == ANY:
        return _only_node()
    if not address.startswith(OF_PROCESS):
        return address
    pid = int(address.removeprefix(OF_PROCESS))
    found, refused = find_nodes(pid)
    if not found:
        reasons = "".join(f" {one}" for one in refused)
        raise click.ClickException(
            f"process {pid} ({program_name(pid)}) has no node that can be asked: it "
            f"has opened none, or has left it, or its node is an inline one or Ray's."
            f"{reasons} `aiogpu status` without --pid finds the nodes that there are."
        )
    return _the_one(found, pid)


def _only_node() -> str:
    """The address of the only node; that of the service if nobody listens anywhere."""
    found, refused = find_nodes()
    path = default_socket()
    if not found and not os.path.lexists(path):
        reasons = "".join(f". {one.rstrip('.')}" for one in refused)
        raise NoNodeError(
            f"there is no socket {path}, and no program's in "
            f"{place_of(os.environ)}{reasons}"
        )
    return _the_one(found) if found else AUTO


def _the_one(found: Sequence[FoundNode], pid: int | None = None) -> str:
    if len(found) > 1:
        raise SeveralNodesError(found, pid)
    return found[0].address


class SeveralNodesError(click.ClickException):
    """There are several nodes, and none was named.

    Attributes:
        pid: the process that all of them are in, if that was named.
    """

    exit_code = 2

    def __init__(self, nodes: Sequence[FoundNode], pid: int | None) -> None:
        from aiogpu.cli.tables import node_table, plain

        self.pid = pid
        listed = "\n".join(plain(node_table(map(SeenNode, nodes))))
        super().__init__(f"{how_to_choose(nodes)}\n{listed}")


def how_to_choose(nodes: Sequence[FoundNode]) -> str:
    """Say that there are several nodes, and which option names one of them."""
    pids = Counter(one.pid for one in nodes)
    if len(pids) < 2:
        of = f"process {''.join(map(str, pids)) or 0} has {len(nodes)} nodes"
        such = f", such as --address {nodes[0].address}" if nodes else ""
        return f"{of}; name one by --address{such}."
    ways = []
    for one in nodes:
        if one.program != SERVICE and one.pid and pids[one.pid] == 1:
            ways.append(f"--pid {one.pid}")
            break
    if any(one.program == SERVICE for one in nodes):
        ways.append(f"--address auto for that of `{SERVICE}`")
    such = f", such as {', or '.join(ways)}" if ways else ""
    return (
        f"this user has {len(nodes)} nodes here; name one by --pid or --address{such}."
    )


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
    check_socket(path)
    try:
        os.stat(path)
    except FileNotFoundError:
        raise NoNodeError(f"there is no socket {path}") from None
    except OSError as error:
        raise NoNodeError(f"{path}: {error.strerror}") from None


class NoNodeError(click.ClickException):
    """There is no node to ask."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no node runs: {why}. {ADVICE}, or name another node by --address."
        )


def no_answer_error(address: str, patience: float | None) -> click.ClickException:
    """The error for a node that does not answer."""
    within = "" if patience is None else f" within {patience:g} s"
    path = socket_path(address)
    advice = (
        "the event loop of its program is held up, or the program is stopped"
        if is_private(path)
        else "`aiogpu doctor` says how it stands, and `aiogpu stop --force` ends it"
    )
    return click.ClickException(
        f"the node at {path} has not answered{within}; {advice}."
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
        address: its socket, or what `address_option` gives.
        patience: seconds that it has for each answer; None for ever.

    Raises:
        ClickException: none runs there, or it does not answer, or there are several.
        NodeError: another user may control the place.
    """
    address = resolved(address)
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


LISTED_WITHIN: Final = 3.0
"""Seconds that each of several nodes has for its answer."""


async def look_at_all(nodes: Sequence[FoundNode]) -> list[SeenNode]:
    """Ask several nodes at the same time for their status."""
    return list(await asyncio.gather(*map(_look_at, nodes)))


async def _look_at(node: FoundNode) -> SeenNode:
    options = NodeOptions(only_looks=True, log_to_driver=False)
    engine = RemoteEngine(node.address, options, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(LISTED_WITHIN):
            await engine.open()
            return SeenNode(node, await engine.status())
    except TimeoutError:
        return SeenNode(node, problem="does not answer")
    except (aiogpu.AiogpuError, OSError) as error:
        return SeenNode(node, problem=str(error))
    finally:
        engine.force_close()
        await engine.close()


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
