"""A program's tie to its cluster: made when first needed, undone with the last user.

A process has one tie to Ray, whichever of its event loops use it. Ray starts its
servers so that they end with the thread that has started them; so that thread is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from aiogpu.engines import ray
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeError, NodeStartError, OptionError

T = TypeVar("T")

REACHABLE: Final = 10.0
"""Seconds in which a server must accept a connection."""
CLIENT_PORT: Final = 10001
"""Where Ray's server for `ray://` listens unless told otherwise."""
NODE_OPTIONS: Final = ("num_cpus", "num_gpus", "resources", "object_memory")
"""What a cluster that is started here may be told."""
OF_PROGRAMS: Final = frozenset({"log_to_driver", "cancel_grace"})
"""What a program may say that joins a cluster."""


@dataclass(slots=True)
class _Tie:
    """This process's tie to Ray.

    Attributes:
        users: how many engines use it.
        is_ours: whether it was made here; who has made it himself ends it himself.
        address: the cluster that it is to; None for one that was started here.
        thread: where it was made.
        pid: of the process whose it is.
    """

    users: int = 0
    is_ours: bool = False
    address: str | None = None
    thread: ThreadPoolExecutor | None = None
    pid: int = 0


_tie: Final = _Tie()


class Membership:
    """See above, for one engine."""

    def __init__(self, address: str | None, options: NodeOptions) -> None:
        self._address = address
        self._options = options
        self._is_in = False

    def __repr__(self) -> str:
        return f"<Membership {self._address or 'local'}>"

    async def enter(self) -> None:
        """Join the cluster, or start one.

        Raises:
            NodeError: it does not answer, or Ray is too old.
            OptionError: it was told what only the start of a cluster can be told.
        """
        ray.check_release()
        self._check_options()
        if _tie.users and _tie.pid == os.getpid():
            self._check_same()
        elif ray.is_connected():
            _tie.is_ours, _tie.address = False, self._address
        else:
            await self._begin()
        _tie.users += 1
        _tie.pid = os.getpid()
        self._is_in = True

    def _check_options(self) -> None:
        """Raise `OptionError` for what Ray is not told, or not any more."""
        options, defaults = self._options._asdict(), NodeOptions()._asdict()
        given = [name for name in options if options[name] != defaults[name]]
        for name in given:
            if name in OF_PROGRAMS or name in NODE_OPTIONS:
                continue
            raise OptionError(
                f"init(address='ray', {name}=...): a Ray cluster knows nothing of it; "
                f"leave it out (docs/engines.md says what each engine can do)."
            )
        started = [name for name in given if name in NODE_OPTIONS]
        if started and self._address is not None:
            raise OptionError(
                f"init(address={self._address!r}, {started[0]}=...): a cluster that "
                f"runs has what it has. Leave {started[0]} out."
            )

    def _check_same(self) -> None:
        if self._address is not None and self._address != _tie.address:
            raise NodeError(
                f"init(address={self._address!r}): this process is in another Ray "
                f"cluster already, and can be in one at a time; shut that down first."
            )

    async def _begin(self) -> None:
        if self._address is not None:
            await _check_reachable(self._address)
        _tie.thread = ThreadPoolExecutor(1, "aiogpu-ray")
        try:
            await _in_thread(self._connect)
        except BaseException:
            _end_thread()
            raise
        _tie.is_ours = True

    def _connect(self) -> None:
        """In the thread that is kept."""
        options = self._options
        shows = options.log_to_driver
        try:
            if self._address is not None:
                ray.join(self._address, shows_output=shows)
                _tie.address = self._address
                return
            told = _for_start(options)
            if not told and ray.join(None, shows_output=shows):
                _tie.address = None
                return
            ray.start({**told, "log_to_driver": shows})
            _tie.address = None
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            where = self._address or "on this machine"
            raise NodeStartError(
                f"init(address='ray'): no cluster could be joined or started {where}: "
                f"{type(error).__name__}: {error}"
            ) from error

    async def leave(self) -> None:
        """Use it no more; the last one leaves the cluster, if aiogpu had entered it."""
        if not self._is_in:
            return
        self._is_in = False
        _tie.users -= 1
        if not _tie.users and _tie.is_ours:
            _tie.is_ours = False
            try:
                await _in_thread(ray.leave)
            finally:
                _end_thread()

    def abandon(self) -> None:
        """The interpreter ends."""
        if self._is_in and _tie.is_ours and _tie.pid == os.getpid():
            self._is_in = _tie.is_ours = False
            ray.leave()
            _end_thread()

    def disown(self) -> None:
        """This process is a fork."""
        self._is_in = False


def _for_start(options: NodeOptions) -> dict[str, Any]:
    """What Ray is told of a node that it starts."""
    told: dict[str, Any] = {}
    if options.num_cpus is not None:
        told["num_cpus"] = _whole("num_cpus", options.num_cpus)
    if options.num_gpus is not None:
        told["num_gpus"] = options.num_gpus
    if options.resources:
        told["resources"] = {
            name: _whole(f"resources[{name!r}]", value)
            for name, value in options.resources.items()
        }
    if options.object_memory is not None:
        told["object_store_memory"] = options.object_memory
    return told


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise OptionError(
            f"init(address='ray', {option}={value!r}): a node of Ray has whole "
            f"quantities only; tasks may ask for parts of them."
        )
    return int(value)


async def _check_reachable(address: str) -> None:
    """Raise `NodeError` where nobody listens: Ray itself would try for long."""
    parts = urlsplit(address)
    host, port = parts.hostname, parts.port or CLIENT_PORT
    if not host:
        raise NodeError(
            f"init(address={address!r}) names no host; write 'ray://host:{CLIENT_PORT}'."
        )
    try:
        async with asyncio.timeout(REACHABLE):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        said = str(error) or f"no answer within {REACHABLE:g} s"
        raise NodeError(
            f"init(address={address!r}): no Ray cluster answers at {host}:{port}: "
            f"{said}. Is its head started, by `ray start --head "
            f"--ray-client-server-port={port}`?"
        ) from error
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _in_thread(call: Callable[[], T]) -> T:
    assert _tie.thread is not None
    doing = asyncio.wrap_future(_tie.thread.submit(call))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        # What Ray has begun it ends: a half of it would be left behind.
        await asyncio.wait([doing])
        raise


def _end_thread() -> None:
    thread, _tie.thread = _tie.thread, None
    if thread is not None:
        thread.shutdown(wait=False)
