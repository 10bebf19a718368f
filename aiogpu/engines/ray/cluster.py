"""Joining a cluster, starting one, leaving it; and whether its head is still there.

Ray tries for long to reach a cluster, so it is asked first whether one answers there:
Ray's servers speak HTTP/2, and whoever listens sends the first frame of it. Ray waits
for a head that has gone, its calls without end; and after a minute it ends the program.
So the head is looked for (`Pulse`), and a cluster that has lost it is left in time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from aiogpu.engines.base import CLIENT, NodeOptions, no_client
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.ray_api import OneThread, begun, unless_left
from aiogpu.errors import DeviceError, NodeError, NodeStartError, OptionError

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


BEAT: Final = 2.0
"""Seconds between two looks."""


LOST_AFTER: Final = 30.0
"""Seconds without a head after which it is given up; one that restarts is back then.

Ray's own limit is 60 s, and to leave such a cluster takes up to 20 s.
"""


class Pulse:
    """See above, for one event loop.

    Attributes:
        is_missed: whether it did not answer when it was looked for last.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_lost: Callable[[], object],
        on_beat: Callable[[], Awaitable[object]],
    ) -> None:
        self._host = host
        self._port = port
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._task: asyncio.Task[None] | None = None
        self.is_missed = False

    def __repr__(self) -> str:
        return f"<Pulse of {self._host}:{self._port}>"

    def begin(self) -> None:
        """Look for it from now on."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def end(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < LOST_AFTER:
            said = await answers(self._host, self._port, LOST_AFTER / 3)
            self.is_missed = said is not None
            if not self.is_missed:
                seen = loop.time()
                await self._on_beat()
            await asyncio.sleep(BEAT)
        self._task = None
        self._on_lost()


T = TypeVar("T")


JOINING: Final = 120.0
"""Seconds in which a cluster that answers was joined: five, or fifty if it is busy."""


LEAVING: Final = 60.0
"""Seconds in which a cluster that was lost is left; Ray itself takes up to 20."""


LOGS: Final = "logs"
"""What is kept of the files of a cluster that was started here."""


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
        told: what it was told at its start; empty where it runs without us.
        session: the directory of the files of one that was started here.
        thread: where it was made.
        pid: of the process whose it is.
        leaving: ends when one is left that was lost or came too late; None if none is.
    """

    users: int = 0
    is_ours: bool = False
    told: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    thread: OneThread | None = None
    pid: int = 0
    leaving: Future[None] | None = None


_tie: Final = _Tie()


class Membership:
    """See above, for one engine."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._is_in = False
        named = os.environ.get("RAY_ADDRESS", "")
        is_joining = ":" in named and not _for_start(options)
        self._named = named if is_joining else None

    def __repr__(self) -> str:
        return f"<Membership of {self._named or 'a local cluster'}>"

    async def enter(self) -> None:
        """Join the cluster, or start one.

        Raises:
            NodeError: it does not answer, or Ray is too old.
            OptionError: Ray has no such option, or the cluster is one of Ray Client.
        """
        ray.check_release()
        self._check_options()
        if self._named is not None and self._named.startswith(CLIENT):
            raise OptionError(no_client(f"RAY_ADDRESS={self._named!r}"))
        await _left()
        if ray.is_connected():
            if ray.is_client():
                raise OptionError(no_client("ray.init('ray://...') in this program"))
            self._check_same()
            if not _tie.users:
                _tie.is_ours, _tie.told = False, {}
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

    def _check_same(self) -> None:
        """Raise `NodeError` where the tie that there is will not do."""
        if _tie.users and _tie.pid != os.getpid():
            raise NodeError(
                "init(address='ray'): this process is a fork of one that is in a Ray "
                "cluster, and Ray works in that one only. Start a new interpreter for "
                "it, as multiprocessing's 'spawn' does."
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
            await check_reachable(self._named)
        _tie.thread = OneThread("aiogpu-ray")
        joining = _tie.thread.submit(self._connect)
        limit = None if self._named is None else JOINING
        try:
            async with asyncio.timeout(limit):
                await asyncio.wrap_future(unless_left(joining))
        except BaseException as error:
            await self._undo(joining)
            _end_thread()
            if not isinstance(error, TimeoutError):
                raise
            raise NodeError(
                f"init(address='ray'): what answers at {self._named} was not joined "
                f"within {JOINING:g} s.{self._hint()} A "
                f"head's logs may say why; by default they are in "
                f"/tmp/ray/session_latest/logs."
            ) from error
        _tie.is_ours = True

    async def _undo(self, joining: Future[None]) -> None:
        """Leave what nobody waits for any more, as soon as it is joined or started."""
        if not joining.done() and self._named is None:
            # What Ray starts it starts to the end: a half of it would be left behind.
            await asyncio.wait([asyncio.wrap_future(unless_left(joining))])
        if not joining.done() or joining.exception() is None:
            _tie.leaving = begun(partial(_leave_when_joined, joining))
            if self._named is None:
                await asyncio.wait([asyncio.wrap_future(unless_left(_tie.leaving))])

    def _hint(self, error: BaseException | None = None) -> str:
        """What may be wrong with the address that was named, and what Ray says."""
        if self._named is None:
            return ""
        if "AuthenticationError" in str(error and error.__cause__):
            return f" By what Ray says, {TOKENS}"
        return (
            f" Is it the port of the cluster itself, {CLUSTER_PORT} unless `ray start "
            f"--port` has said otherwise?"
        )

    def _connect(self) -> None:
        """In the thread that is kept."""
        shows = self._options.log_to_driver
        told = _for_start(self._options)
        try:
            if self._named is not None:
                ray.join(self._named, shows_output=shows)
            elif told or not ray.join(None, shows_output=shows):
                _tie.session = ray.start({**told, "log_to_driver": shows})
        except DeviceError:
            raise
        except (OSError, RuntimeError, ValueError, ray.RayError) as error:
            where = "on this machine" if self._named is None else f"at {self._named}"
            raise NodeStartError(
                f"init(address='ray'): no cluster could be joined or started {where}: "
                f"{type(error).__name__}: {error}."
                f"{self._hint(error)}"
            ) from error
        _tie.told = told

    def place(self) -> tuple[str, int]:
        """The host and port of the cluster's head."""
        return place_of(ray.head())

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


def _leave_when_joined(joining: Future[None]) -> None:
    if joining.exception() is None:
        _leave()


def _for_start(options: NodeOptions) -> dict[str, Any]:
    """Return what Ray is told of a node that it starts."""
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
        thread.end()
