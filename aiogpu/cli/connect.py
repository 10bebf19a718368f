"""Joins a node for a command, and defines option types for quantities.

If no option names a node, a command uses the service or, without a service, the only
node inside a program. The option types have names for users; click would call one
"float range".
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import aiogpu
from aiogpu.api.node import Opening, no_such_task
from aiogpu.api.session import find_session
from aiogpu.cli.nodes import (
    SERVICE,
    FoundNode,
    SeenNode,
    find_nodes,
    is_private,
    place_of,
    program_name,
)
from aiogpu.cli.terminal import echo
from aiogpu.core.model.text import SHOWN, listing, printable
from aiogpu.core.model.units import LEAST, byte_count, parse_size, too_small
from aiogpu.core.model.units import size as told_size
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.remote import RemoteEngine
from aiogpu.errors import NoSuchTaskError, OptionError
from aiogpu.observe.status import EndedTask, NodeStatus
from aiogpu.observe.trace import Span
from aiogpu.observe.why import StopReport, Why
from aiogpu.runtime.directories import check_socket, default_socket


class Seconds(click.FloatRange):
    """A length of time."""

    name = "number of seconds"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Return the placeholder for the help."""
        return "SECONDS"


class Number(click.FloatRange):
    """An amount that may be a fraction."""

    name = "number"


class Whole(click.IntRange):
    """A count."""

    name = "whole number"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Return the placeholder for the help."""
        return "NUMBER"


def size(text: str) -> str | int:
    """Parse an amount of memory: with a unit, or in bytes as in Ray's command.

    Raises:
        BadParameter: the text is not an amount of memory.
    """
    is_bytes = text.isdecimal()
    try:
        count = parse_size("", int(text) if is_bytes else text)
    except OptionError:
        raise click.BadParameter(
            f"{text!r} is not an amount of memory; write one with a unit, such as "
            f"64GiB or 500MB, or in bytes."
        ) from None
    if count and (suggestion := too_small(count)):
        advice = f"write it with a unit, such as {suggestion}"
        if not is_bytes:
            advice = f"the minimum is {told_size(LEAST)}"
        raise click.BadParameter(f"{text!r} means {byte_count(count)}; {advice}.")
    return count if is_bytes else text


def size_or_share(text: str) -> str | int:
    """Parse an amount of GPU memory, or "share": in proportion to the GPU's share."""
    return text if text == "share" else size(text)


AUTO: Final = "auto"
UNIX: Final = "unix:"
"""Optional prefix of a socket's path, as in `aiogpu.init`."""
ANY: Final = "any"
"""The address if no option names a node: the service, or the only node of this
user."""
OF_PROCESS: Final = "pid:"
"""Prefix of an address that is the number of a process."""
EMBEDDED: Final = ("local", "inline")
"""Addresses by which a program opens a node inside itself; no command can join them."""
PATIENCE: Final = 15.0
"""Seconds that a node has to answer; a busy node needs a tenth of a second."""
ADVICE: Final = "Start one by `aiogpu start --head`"
T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Node:
    """The node that this loop has joined.

    Each method raises TimeoutError if the node does not answer within `patience`
    seconds; a patience of None waits without limit.
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
        """Return the last tasks that ran on the node."""
        async with asyncio.timeout(self._patience):
            return await self._engine.timeline()

    async def ended(self) -> tuple[EndedTask, ...]:
        """Return the last tasks that ended on the node, the latest first."""
        async with asyncio.timeout(self._patience):
            return await self._engine.ended()

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        """Return the last failed call of each method of an actor, with traceback."""
        async with asyncio.timeout(self._patience):
            return await self._engine.ended(actor)

    async def stop(self, what: str, number: int) -> tuple[str, Why | None]:
        """Cancel a task or kill an actor; see `RemoteEngine.stop_task`."""
        async with asyncio.timeout(self._patience):
            return await self._engine.stop_task(what, number)

    async def stop_named(self, what: str, name: str) -> StopReport:
        """Stop the tasks with a name, without a limit of time: they may be a million.

        See `RemoteEngine.stop_named`.
        """
        return await self._engine.stop_named(what, name)

    @property
    def _engine(self) -> RemoteEngine:
        engine = find_session().engine
        assert isinstance(engine, RemoteEngine)
        return engine


def service_option(command: Command) -> Command:
    """Add the option `--address` for a service."""
    return click.option(
        "--address",
        "--socket",
        "address",
        metavar="SOCKET",
        callback=_checked,
        help="Socket of the node; default AIOGPU_ADDRESS, or the default socket of "
        "`aiogpu start`.",
    )(command)


def address_option(command: Command) -> Command:
    """Add the options `--address` and `--pid`, for a service or a node in a program.

    The command gets the parameter `address` for `joined`, `ask` or `resolved`.
    """
    by_pid = click.option(
        "--pid",
        type=Whole(1),
        metavar="PID",
        is_eager=True,
        expose_value=False,
        callback=_note_pid,
        shell_complete=_pids,
        help="Process of the node: a program or a service.",
    )
    by_address = click.option(
        "--address",
        "--socket",
        "address",
        metavar="SOCKET",
        callback=_chosen,
        help="Socket of the node; default AIOGPU_ADDRESS, or the only node of this "
        "user.",
    )
    return by_pid(by_address(command))


def _checked(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str:
    if value in EMBEDDED:
        raise click.BadParameter(
            f"{value!r} means a node inside a program, which other programs cannot "
            f"use. Give the socket of a node of `aiogpu start`."
        )
    return value or default_address()


def _chosen(ctx: click.Context, _option: click.Parameter, value: str | None) -> str:
    pid = ctx.meta.get(OF_PROCESS)
    if pid is not None and value:
        raise click.UsageError("--pid and --address exclude each other: give one.", ctx)
    if pid is not None:
        return f"{OF_PROCESS}{pid}"
    if value in EMBEDDED:
        raise click.BadParameter(
            f"{value!r} means any node inside a program. Give the program's --pid, or "
            f"the socket of a node."
        )
    return value or named_address() or ANY


def _note_pid(ctx: click.Context, _option: click.Parameter, pid: int | None) -> None:
    ctx.meta[OF_PROCESS] = pid


def check_unnamed(why: str) -> None:
    """Raise `UsageError` if an option of the running command names a node."""
    ctx = click.get_current_context()
    source = ctx.get_parameter_source("address")
    if ctx.meta.get(OF_PROCESS) or source is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"{why}: leave out --pid and --address.", ctx)


def _pids(
    _context: click.Context, _option: click.Parameter, prefix: str
) -> list[CompletionItem]:
    """Return the processes with a node whose numbers begin with a prefix."""
    try:
        nodes = find_nodes().nodes
    except aiogpu.errors.NodeError:
        return []  # a shell cannot show the error
    return [
        CompletionItem(str(node.pid), help=printable(node.program))
        for node in nodes
        if node.pid and str(node.pid).startswith(prefix)
    ]


def named_address() -> str | None:
    """Return the address in AIOGPU_ADDRESS, if it names a node of another process."""
    value = os.environ.get("AIOGPU_ADDRESS")
    return None if value in EMBEDDED else value or None


def default_address() -> str:
    """Return the address of a service if no option gives one."""
    return named_address() or AUTO


def resolved(address: str) -> str:
    """Return the address of one node, for `ANY` or a process too.

    Raises:
        SeveralNodesError: there are several nodes.
        ClickException: there is no node, or the process has none.
    """
    if address == ANY:
        return _only_node()
    if not address.startswith(OF_PROCESS):
        return address
    pid = int(address.removeprefix(OF_PROCESS))
    nodes, refused = find_nodes(pid)
    if not nodes:
        reasons = "".join(f" {reason}" for reason in refused)
        program = printable(program_name(pid))
        raise click.ClickException(
            f"process {pid} ({program}) has no node that answers commands: "
            f"it has not opened one, has closed it, or uses an inline node or Ray."
            f"{reasons} `aiogpu status` without --pid finds all nodes."
        )
    return _single(nodes, pid)


def _only_node() -> str:
    """Return the address of the service or, without a service, of the only node."""
    nodes, refused = find_nodes()
    path = default_socket()
    if not nodes and not os.path.lexists(path):
        reasons = "".join(f". {reason.rstrip('.')}" for reason in refused)
        raise NoNodeError(
            f"there is no socket {path}, and no socket of a program in "
            f"{place_of(os.environ)}{reasons}"
        )
    if not nodes:
        return AUTO
    if nodes[0].program == SERVICE and len(nodes) > 1:
        others = (f"--pid {node.pid} ({printable(node.program)})" for node in nodes[1:])
        listed = listing(tuple(islice(others, SHOWN)), len(nodes) - 1)
        echo(f"node of `{SERVICE}`; this user's other nodes: {listed}", err=True)
        return AUTO
    return _single(nodes)


def _single(nodes: Sequence[FoundNode], pid: int | None = None) -> str:
    if len(nodes) > 1:
        raise SeveralNodesError(nodes, pid)
    return nodes[0].address


class SeveralNodesError(click.ClickException):
    """There are several nodes, and no option names one.

    Attributes:
        pid: the process of all the nodes, if --pid names it.
    """

    exit_code = 2

    def __init__(self, nodes: Sequence[FoundNode], pid: int | None) -> None:
        from aiogpu.cli.views.tables import node_table, plain

        self.pid = pid
        listed = "\n".join(plain(node_table(map(SeenNode, nodes))))
        super().__init__(f"{how_to_choose(nodes)}\n{listed}")


def how_to_choose(nodes: Sequence[FoundNode]) -> str:
    """Return a sentence that says which option chooses one of several nodes."""
    pids = Counter(node.pid for node in nodes)
    if len(pids) < 2:
        count = f"process {''.join(map(str, pids)) or 0} has {len(nodes)} nodes"
        example = f", such as --address {nodes[0].address}" if nodes else ""
        return f"{count}; choose one by --address{example}."
    examples = []
    for node in nodes:
        if node.program != SERVICE and node.pid and pids[node.pid] == 1:
            examples.append(f"--pid {node.pid}")
            break
    if any(node.program == SERVICE for node in nodes):
        examples.append(f"--address auto for the node of `{SERVICE}`")
    example = f", such as {', or '.join(examples)}" if examples else ""
    return (
        f"this user has {len(nodes)} nodes; choose one by --pid or --address{example}."
    )


def socket_path(address: str) -> str:
    """Return the path of the socket of an address."""
    return default_socket() if address == AUTO else address.removeprefix(UNIX)


def check_there(address: str) -> None:
    """Raise an error with advice if no node can be at an address.

    Raises:
        ClickException: there is no socket.
        NodeError: another user may control the directory of the socket.
    """
    if address == "ray" or address.startswith("ray://"):
        raise click.ClickException(
            f"{address!r} is a Ray cluster; use Ray's own command, such as `ray "
            f"status`, or give the --address of a node of `aiogpu start`."
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
    """There is no node."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"no node runs: {why}. {ADVICE}, or give another node by --address."
        )


def no_answer_error(address: str, patience: float | None) -> click.ClickException:
    """Return the error for a node that does not answer."""
    within = "" if patience is None else f" within {patience:g} s"
    path = socket_path(address)
    advice = (
        "the event loop of its program is blocked, or the program is stopped"
        if is_private(path)
        else "`aiogpu doctor` checks it, and `aiogpu stop --force` ends it"
    )
    return click.ClickException(
        f"the node at {path} has not answered{within}; {advice}."
    )


def joining(address: str) -> Opening:
    """Return an `Opening` that joins a node only to view it, not to run tasks."""
    options = NodeOptions(only_looks=True, log_to_driver=False)
    return Opening(address, options, ignore_reinit_error=False)


@asynccontextmanager
async def joined(
    address: str, patience: float | None = PATIENCE
) -> AsyncIterator[Node]:
    """Join the node at an address for the time of the block.

    Args:
        address: the node's socket, or an address of `address_option`.
        patience: seconds that the node has for each answer; None for no limit.

    Raises:
        ClickException: no node runs there, it does not answer, or there are several.
        NodeError: another user may control the directory of the socket.
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
        # A view has no tasks to stop, and the node may not answer any more.
        await node.shutdown(at_once=True)


LISTED_WITHIN: Final = 3.0
"""Seconds that each of several nodes has to answer."""


async def status_of_all(nodes: Sequence[FoundNode]) -> list[SeenNode]:
    """Ask several nodes at the same time for their status."""
    return list(await asyncio.gather(*map(_status_of, nodes)))


async def _status_of(node: FoundNode) -> SeenNode:
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
    """Join a node, await `question(node)`, leave the node, and return the answer."""

    async def main() -> T:
        async with joined(address, patience) as node:
            return await question(node)

    return aiogpu.run(main())
