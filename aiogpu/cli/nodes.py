"""Finds the nodes of this user on this machine: the service, and nodes in programs.

A node inside a program listens in a private directory (`runtime.directories`), made in
the first place that the program could write to. Directories that other users can
access are never used. The directory of a killed program has a socket without a
listener.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import click

from aiogpu.errors import NodeError
from aiogpu.linux.cgroup import PROC, read_bytes
from aiogpu.linux.procfs import read_stat
from aiogpu.linux.sockets import check_server, peer_credentials, user
from aiogpu.observe.status import NodeStatus
from aiogpu.runtime.directories import check_meeting, default_socket, places_of
from aiogpu.wire.messages import socket_path

PRIVATE: Final = re.compile(r"aiogpu-[0-9a-f]{12}")
"""The names of the directories that nodes make for their sockets."""
SERVICE: Final = "aiogpu start"
CONNECTS_WITHIN: Final = 0.5
"""Seconds to wait for room in a program's full queue of connections."""
_TAKE_A_VALUE: Final = ("-W", "-X")
"""Options of Python whose value is the next word."""


class FoundNode(NamedTuple):
    """A node that listens on a socket.

    Attributes:
        address: the path of the socket.
        pid: the node's process; 0 if unknown, as in another container.
        program: the name of the node's program; `SERVICE` for a node of `aiogpu start`.
        seconds: the time since the node was opened.
    """

    address: str
    pid: int
    program: str
    seconds: float


class FoundNodes(NamedTuple):
    """The result of `find_nodes`.

    Attributes:
        nodes: the nodes that listen, the service first, then the oldest.
        refused: for each unused directory of this user, the reason.
    """

    nodes: list[FoundNode]
    refused: list[str]


class SeenNode(NamedTuple):
    """A node with its status.

    Attributes:
        found: the node.
        status: the node's status; None if it was not asked or has not answered.
        problem: why the node has not answered; "" if it has, or was not asked.
    """

    found: FoundNode
    status: NodeStatus | None = None
    problem: str = ""


def is_private(address: str) -> bool:
    """Return whether an address is the private socket of a node in a program."""
    directory = os.path.dirname(address)
    match = PRIVATE.fullmatch(os.path.basename(directory))
    return match is not None and address == socket_path(directory)


def find_nodes(pid: int | None = None) -> FoundNodes:
    """Find the nodes of this user.

    Args:
        pid: find only nodes of this process, whose environment may differ from this
            one's; None for all nodes that the variables of this process lead to.

    Raises:
        ClickException: there is no such process, or it belongs to another user.
        NodeError: another user may control the directory of the service.
    """
    places = {place_of(os.environ)}
    if pid is not None:
        places.add(place_of(_environ_of(pid)))
    found, refused = FoundNodes([], []), list[str]()
    addresses = [address for place in places for address in _sockets_in(place)]
    for address in addresses:
        try:
            check_meeting(address)
            node = node_at(address)
        except NodeError as error:
            with suppress(OSError):
                if os.stat(os.path.dirname(address)).st_uid == os.geteuid():
                    refused.append(str(error))
            continue
        if node is not None:
            found.nodes.append(node)
    service = _service(pid is not None)
    if service is not None and service.pid:
        # The service has a private directory as well.
        found.nodes[:] = [node for node in found.nodes if node.pid != service.pid]
    found.nodes.sort(key=lambda node: -node.seconds)
    if service is not None:
        found.nodes.insert(0, service)
    if pid is not None:
        found.nodes[:] = [node for node in found.nodes if node.pid == pid]
    return FoundNodes(found.nodes, refused)


def place_of(environ: Mapping[str, str]) -> str:
    """Return where a program with these variables makes the directory of a node."""
    places = places_of(environ)
    usable = (place for place in places if os.access(place, os.W_OK | os.X_OK))
    return next(usable, places[-1])


def _environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with.

    Raises:
        ClickException: there is no such process, or it belongs to another user.
    """
    try:
        with open(f"{PROC}/{pid}/environ", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
    except PermissionError:
        owner = user(os.stat(f"{PROC}/{pid}").st_uid)
        raise click.ClickException(
            f"process {pid} belongs to {owner}, and this command runs as "
            f"{user(os.geteuid())}. A node answers only its own user."
        ) from None
    except OSError:
        raise click.ClickException(
            f"there is no process {pid}. `aiogpu status` without --pid finds all nodes."
        ) from None
    return dict(word.split("=", 1) for word in words if "=" in word)


def _sockets_in(place: str) -> Iterator[str]:
    """Yield the sockets of nodes whose directories are in a place."""
    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        if PRIVATE.fullmatch(name):
            yield socket_path(f"{place}/{name}")


def _service(is_optional: bool) -> FoundNode | None:
    """Return the node of `aiogpu start`, if it listens on its default socket."""
    address = default_socket()
    try:
        check_meeting(address)
    except NodeError:
        if not is_optional:
            raise
        return None
    node = node_at(address)
    return None if node is None else node._replace(program=SERVICE)


def node_at(address: str) -> FoundNode | None:
    """Return the node that listens on a socket; None without a listener.

    Raises:
        NodeError: another user listens on the socket.
    """
    with socket.socket(socket.AF_UNIX) as caller:
        # Not `settimeout`, which makes `connect` fail at once (EAGAIN) if the queue of
        # connections is full.
        limit = struct.pack("ll", 0, int(CONNECTS_WITHIN * 1e6))
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            opened = os.stat(address).st_mtime
            caller.connect(address)
            check_server(caller, address)
            pid = peer_credentials(caller).pid
        except BlockingIOError:
            pid = 0  # the node's event loop is blocked
        except OSError:
            return None
    seconds = max(0.0, time.time() - opened)
    return FoundNode(address, pid, program_name(pid), seconds)


def program_name(pid: int) -> str:
    """Return the name of a program; for Python, the name of the script or module."""
    line = read_bytes(f"{PROC}/{pid}/cmdline")
    command, *words = os.fsdecode(line.rstrip(b"\0")).split("\0")
    name = os.path.basename(command)
    if not name.startswith(("python", "pypy")):
        stat = read_stat(pid)
        return name or (stat.name if stat is not None else "")
    following = iter(words)
    for word in following:
        if word == "-m":
            return next(following, name)
        if word.startswith("-c"):
            return f"{name} -c"
        if word in _TAKE_A_VALUE:
            next(following, None)
        elif not word.startswith("-"):
            return os.path.basename(word)
    return name
