"""A program's tie to its cluster: made when first needed, undone with the last user.

A process has one tie to Ray, whichever of its event loops use it. Ray starts its
servers so that they end with the thread that has started them; so that thread is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from aiogpu.engines import ray
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.cluster.asking import begun
from aiogpu.engines.cluster.pulse import answers
from aiogpu.errors import DeviceError, NodeError, NodeStartError, OptionError

T = TypeVar("T")

REACHABLE: Final = 10.0
"""Seconds in which a server must accept a connection."""
LEAVING: Final = 60.0
"""Seconds in which a cluster that was lost is left; Ray itself takes up to 20."""
LOGS: Final = "logs"
"""What is kept of the files of a cluster that was started here."""
ATTEMPTS: Final = 2
"""Of a program to come by `ray://`: now and then Ray fails to fork a server for it."""
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
        told: what it was told at its start; empty where it runs without us.
        session: the directory of the files of one that was started here.
        thread: where it was made.
        pid: of the process whose it is.
        leaving: ends when one that was lost is left; None if none is.
    """

    users: int = 0
    is_ours: bool = False
    address: str | None = None
    told: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    thread: ThreadPoolExecutor | None = None
    pid: int = 0
    leaving: Future[None] | None = None


_tie: Final = _Tie()


class Membership:
    """See above, for one engine."""

    def __init__(self, address: str | None, options: NodeOptions) -> None:
        self._address = address
        self._options = options
        self._is_in = False
        named = os.environ.get("RAY_ADDRESS") or None
        if address is None and named is not None and ":" in named:
            address = None if _for_start(options) else named
        self._named = address

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
        await _left()
        if ray.is_connected():
            self._check_same()
            if not _tie.users:
                _tie.is_ours, _tie.address, _tie.told = False, self._address, {}
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
        """Raise `NodeError` where the tie that there is will not do."""
        if _tie.users and _tie.pid != os.getpid():
            raise NodeError(
                "init(address='ray'): this process is a fork of one that is in a Ray "
                "cluster, and Ray works in that one only. Start a new interpreter for "
                "it, as multiprocessing's 'spawn' does."
            )
        is_other = self._address is not None and self._address != _tie.address
        if _tie.users and is_other:
            raise NodeError(
                f"init(address={self._address!r}): this process is in another Ray "
                f"cluster already, and can be in one at a time; shut that down first."
            )
        told = _for_start(self._options)
        if told and told != _tie.told:
            raise NodeError(
                f"init(address='ray', {next(iter(told))}=...): this process is in a "
                f"Ray cluster already, which has what it has. Leave it out, or shut "
                f"the other one down first."
            )

    async def _begin(self) -> None:
        if self._named is not None:
            await _check_reachable(self._named)
        _tie.thread = ThreadPoolExecutor(1, "aiogpu-ray")
        try:
            await _in_thread(self._connect)
        except BaseException:
            _end_thread()
            raise
        _tie.is_ours = True

    def _connect(self) -> None:
        """In the thread that is kept."""
        shows = self._options.log_to_driver
        told = _for_start(self._options)
        try:
            if self._named is not None:
                self._join(self._named, shows)
            elif told or not ray.join(None, shows_output=shows):
                _tie.session = ray.start({**told, "log_to_driver": shows})
        except DeviceError:
            raise
        except (OSError, RuntimeError, ValueError, ray.RayError) as error:
            where = "on this machine" if self._named is None else f"at {self._named}"
            raise NodeStartError(
                f"init(address={self._address or 'ray'!r}): no cluster could be joined "
                f"or started {where}: {type(error).__name__}: {error}"
            ) from error
        _tie.address, _tie.told = self._address, told

    def _join(self, address: str, shows: bool) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                ray.join(address, shows_output=shows)
            except ConnectionAbortedError:
                if attempt == ATTEMPTS:
                    raise
            else:
                return

    def place(self) -> tuple[str, int]:
        """Where the cluster's head, or its server for `ray://`, is to be found."""
        return _place_of(_tie.address or ray.head())

    def lose(self) -> None:
        """The cluster has gone: leave it, for which nobody need wait."""
        if self._is_in:
            self._is_in = False
            _tie.users -= 1
            if not _tie.users and _tie.is_ours:
                _tie.is_ours = False
                _tie.leaving = begun(_leave)
                _end_thread()

    async def leave(self) -> None:
        """Use it no more; the last one leaves the cluster, if aiogpu had entered it."""
        if not self._is_in:
            return
        self._is_in = False
        _tie.users -= 1
        if not _tie.users and _tie.is_ours:
            _tie.is_ours = False
            try:
                await _in_thread(_leave)
            finally:
                _end_thread()

    def abandon(self) -> None:
        """The interpreter ends."""
        if self._is_in and _tie.is_ours and _tie.pid == os.getpid():
            self._is_in = _tie.is_ours = False
            _leave()
            _end_thread()

    def disown(self) -> None:
        """This process is a fork."""
        self._is_in = False


def _leave() -> None:
    ray.leave()
    session, _tie.session = _tie.session, ""
    # Ray leaves the names of its sockets behind, and of its ports; its logs it leaves
    # on purpose.
    for entry in Path(session).iterdir() if session else ():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name != LOGS:
                rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


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


def _place_of(address: str) -> tuple[str, int]:
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


async def _check_reachable(address: str) -> None:
    """Raise `NodeError` where nobody listens: Ray itself would try for long."""
    host, port = _place_of(address)
    said = await answers(host, port, REACHABLE)
    if said is not None:
        start = "--ray-client-server-port" if "://" in address else "--port"
        raise NodeError(
            f"init(address={address!r}): no Ray cluster answers at {host}:{port}: "
            f"{said}. Is its head started, by `ray start --head {start}={port}`?"
        )


async def _left() -> None:
    """Wait until a cluster that was lost is left: this process can be in one only."""
    leaving = _tie.leaving
    if leaving is None:
        return
    try:
        async with asyncio.timeout(LEAVING):
            await asyncio.wrap_future(leaving)
    except TimeoutError as error:
        raise NodeError(
            f"init(address='ray'): Ray has not left the cluster that was lost before, "
            f"in {LEAVING:g} s; start the program anew."
        ) from error
    _tie.leaving = None


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
