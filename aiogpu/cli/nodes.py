"""Finds the nodes of this user on this machine: the service, and those in programs.

A node inside a program listens in a private directory (`runtime.directories`), in the
first place that the program could write to. A directory to which others have access is
never used. One that a killed program has left has a socket without a listener.
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
"""Names of directories that nodes make for their own sockets."""
SERVICE: Final = "aiogpu start"
CONNECTS_WITHIN: Final = 0.5
"""Seconds that a program's full queue of connections has to get room."""
_TAKE_A_VALUE: Final = ("-W", "-X")
"""Options of Python with a value in the next word."""


class FoundNode(NamedTuple):
    """A node that listens.

    Attributes:
        address: the path of its socket.
        pid: the process that it is in; 0 if that is unknown, as in another container.
        program: the name of that program; `SERVICE` for the node of `aiogpu start`.
        seconds: how long it has been there.
    """

    address: str
    pid: int
    program: str
    seconds: float


class FoundNodes(NamedTuple):
    """All nodes that were found, the service first, then the oldest.

    Attributes:
        nodes: those that listen.
        refused: why directories of this user were not used, in words.
    """

    nodes: list[FoundNode]
    refused: list[str]


class SeenNode(NamedTuple):
    """A node with what it says of itself.

    Attributes:
        found: where it is.
        status: its answer; None if it was not asked, or has not answered.
        problem: why it has not answered, "" if it has or was not asked.
    """

    found: FoundNode
    status: NodeStatus | None = None
    problem: str = ""


def is_private(address: str) -> bool:
    """Return whether an address is that of a node's own socket."""
    directory = os.path.dirname(address)
    is_named_so = PRIVATE.fullmatch(os.path.basename(directory))
    return is_named_so is not None and address == socket_path(directory)


def find_nodes(pid: int | None = None) -> FoundNodes:
    """Find the nodes of this user.

    Args:
        pid: only those of this process, which may have other variables than this one;
            None for all that were opened with this process's variables.

    Raises:
        ClickException: there is no such process, or it is another user's.
        NodeError: another user may control the place of the service.
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
        # It has a private directory as well.
        found.nodes[:] = [one for one in found.nodes if one.pid != service.pid]
    found.nodes.sort(key=lambda one: -one.seconds)
    if service is not None:
        found.nodes.insert(0, service)
    if pid is not None:
        found.nodes[:] = [one for one in found.nodes if one.pid == pid]
    return FoundNodes(found.nodes, refused)


def place_of(environ: Mapping[str, str]) -> str:
    """The place in which a program with these variables makes a node's directory."""
    places = places_of(environ)
    usable = (place for place in places if os.access(place, os.W_OK | os.X_OK))
    return next(usable, places[-1])


def _environ_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with.

    Raises:
        ClickException: there is no such process, or it is another user's.
    """
    try:
        with open(f"{PROC}/{pid}/environ", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
    except PermissionError:
        owner = user(os.stat(f"{PROC}/{pid}").st_uid)
        raise click.ClickException(
            f"this process, of {user(os.geteuid())}, may not look at process {pid}, of "
            f"{owner}. A node answers its own user alone."
        ) from None
    except OSError:
        raise click.ClickException(
            f"there is no process {pid}. `aiogpu status` without --pid finds the nodes "
            f"that there are."
        ) from None
    return dict(word.split("=", 1) for word in words if "=" in word)


def _sockets_in(place: str) -> Iterator[str]:
    """The sockets of nodes that made their directories there."""
    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        if PRIVATE.fullmatch(name):
            yield socket_path(f"{place}/{name}")


def _service(is_optional: bool) -> FoundNode | None:
    """The node of `aiogpu start`, if it listens where it does by default."""
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
    """The node that listens at a socket; None if none does.

    Raises:
        NodeError: another user listens there.
    """
    with socket.socket(socket.AF_UNIX) as caller:
        # Not `settimeout`, with which a full queue of connections is EAGAIN at once.
        limit = struct.pack("ll", 0, int(CONNECTS_WITHIN * 1e6))
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            began = os.stat(address).st_mtime
            caller.connect(address)
            check_server(caller, address)
            pid = peer_credentials(caller).pid
        except BlockingIOError:
            pid = 0  # its loop is held up
        except OSError:
            return None
    seconds = max(0.0, time.time() - began)
    return FoundNode(address, pid, program_name(pid), seconds)


def program_name(pid: int) -> str:
    """The name of a program for people: that of its script, if Python runs one."""
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
