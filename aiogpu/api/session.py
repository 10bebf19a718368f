"""A program's tie to a node: opened, found again by the running loop, closed.

One session for each event loop. A `.remote()` without one opens an embedded node
with the defaults, which closes with its loop. A fork of the program inherits an
inert session: it neither works nor harms the parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import warnings
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from aiogpu.api.handle import Handle
from aiogpu.api.options import check_resources, check_seconds, check_text
from aiogpu.core.resources import quantity
from aiogpu.core.snapshot import NodeStatus
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from aiogpu.errors import (
    AiogpuError,
    NodeClosedError,
    NodeError,
    NodeRunningError,
    NoLoopError,
    OptionError,
)
from aiogpu.runtime.call import Site
from aiogpu.worker.context import current

T = TypeVar("T")

_sessions: Final[dict[asyncio.AbstractEventLoop, Session]] = {}


class SessionState(Enum):
    """Where a session is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the one that opened it."""


class Early(NamedTuple):
    """A call made while the node was still opening."""

    site: Site
    payload: bytes
    handle: Handle[Any]


class Session:
    """One node, as this event loop's program sees it. Made by `init`."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._state = SessionState.OPENING
        self._pid = os.getpid()
        self._early: list[Early] = []
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        _sessions[loop] = self

    def __repr__(self) -> str:
        return f"<Session {self._state.value} {self._engine!r}>"

    @property
    def is_open(self) -> bool:
        """Whether tasks can be started."""
        return self._state is SessionState.OPEN

    async def __aenter__(self) -> Session:
        await self.opened()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    def submit(self, site: Site, payload: bytes) -> Handle[Any]:
        """Start a task; see `RemoteFunction.remote`."""
        handle: Handle[Any] = Handle(site.spec.name, self._engine.cancel, self._loop)
        if self._state is SessionState.OPEN:
            handle.task_id = self._engine.submit(site, payload, handle)
        elif self._state is SessionState.OPENING:
            self._early.append(Early(site, payload, handle))
        else:
            raise self._unusable()
        return handle

    def _unusable(self) -> NodeError:
        if self._state is SessionState.FORKED:
            return NodeError(
                f"this node belongs to process {self._pid}, of which process "
                f"{os.getpid()} is a fork. Call .remote() there, or run a program "
                f"of its own here."
            )
        return NodeClosedError("this node is shut down; open one by aiogpu.init().")

    def start_opening(self) -> None:
        """Open the engine in the background; calls are kept meanwhile."""
        self._closer = self._close_with_loop()
        first = self._closer.__anext__()
        with suppress(StopIteration):
            # Its first step registers it with the loop, which closes it at the end.
            first.send(None)
        self._opening = self._loop.create_task(self._open())

    async def opened(self) -> None:
        """Wait until the node is open; raises what kept it from opening."""
        if self._opening is not None:
            await asyncio.shield(self._opening)

    async def _open(self) -> None:
        try:
            await self._engine.open()
        except BaseException as error:
            self._forget(SessionState.CLOSED)
            self._fail_early(error)
            raise
        self._state = SessionState.OPEN
        early, self._early = self._early, []
        for site, payload, handle in early:
            if not handle.done():
                try:
                    handle.task_id = self._engine.submit(site, payload, handle)
                except AiogpuError as error:
                    handle.fail(error)

    def _fail_early(self, error: BaseException) -> None:
        early, self._early = self._early, []
        told = error if isinstance(error, Exception) else NodeClosedError(str(error))
        for call in early:
            call.handle.fail(told)
        if early and self._opening is not None:
            # The handles carry the error; the task need not warn of it as well.
            self._opening.add_done_callback(lambda task: task.exception())

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._closer = None
            if self._state is not SessionState.CLOSED:
                await self.shutdown()

    async def shutdown(self) -> None:
        """Stop all tasks and wait until nothing of the node is left; idempotent."""
        if self._state is SessionState.FORKED or self._pid != os.getpid():
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            with suppress(AiogpuError):
                await self._opening
        if self._state is not SessionState.CLOSED:
            self._state = SessionState.CLOSING
            try:
                await self._engine.close()
            finally:
                self._forget(SessionState.CLOSED)
        if self._closer is not None:
            closer, self._closer = self._closer, None
            await closer.aclose()

    def _forget(self, state: SessionState) -> None:
        self._state = state
        if _sessions.get(self._loop) is self:
            del _sessions[self._loop]

    def cluster_resources(self) -> dict[str, float]:
        """All resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
        return self._ask().total()

    def available_resources(self) -> dict[str, float]:
        """What is free of each; 0.0 where nothing is."""
        return self._ask().available()

    def status(self) -> NodeStatus:
        """Who holds what share of which device, what waits and why."""
        return self._ask().status()

    def _ask(self) -> Engine:
        if self._state is not SessionState.OPEN:
            raise self._unusable()
        return self._engine

    def disown(self) -> None:
        """This process is a fork: the session is its parent's."""
        self._state = SessionState.FORKED

    def abandon(self) -> None:
        """The interpreter ends and no loop runs any more: leave no files."""
        if self._state is not SessionState.FORKED and self._pid == os.getpid():
            self._engine.abandon()


class Opening:
    """What `init` gives: await it, or use it in `async with`."""

    def __init__(
        self, address: str | None, options: NodeOptions, ignore_reinit_error: bool
    ) -> None:
        self._address = address
        self._options = options
        self._ignore_reinit_error = ignore_reinit_error
        self._is_used = False
        self._mine: Session | None = None

    def __await__(self) -> Generator[Any, None, Session]:
        return self._open().__await__()

    async def __aenter__(self) -> Session:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._mine is not None:
            await self._mine.shutdown()

    async def _open(self) -> Session:
        self._is_used = True
        _refuse_in_worker("aiogpu.init()")
        loop = asyncio.get_running_loop()
        session = _sessions.get(loop)
        if session is not None:
            if self._ignore_reinit_error:
                await session.opened()
                return session
            raise NodeRunningError(
                "this event loop has a node already. Call aiogpu.shutdown() before "
                "another init(), or say init(ignore_reinit_error=True) to share it."
            )
        session = self._mine = _start(self._address, self._options, loop)
        try:
            await session.opened()
        except asyncio.CancelledError:
            await session.shutdown()
            raise
        return session

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "aiogpu.init() was called but never awaited; write `await "
                "aiogpu.init(...)` or `async with aiogpu.init(...)`.",
                RuntimeWarning,
                stacklevel=2,
            )


def _start(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Session:
    session = Session(create_engine(address, options, loop), loop)
    session.start_opening()
    return session


def init(  # noqa: PLR0913 - all by keyword, each an option of its own
    *,
    address: str | None = None,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    accelerator_type: str | None = None,
    preload: Sequence[str] = (),
    log_to_driver: bool = True,
    cancel_grace: float = 2.0,
    ignore_reinit_error: bool = False,
) -> Opening:
    """Open a node for this event loop: `await` it, or `async with` it.

    Args:
        address: None or "local" for a node inside this program. The variable
            AIOGPU_ADDRESS supplies the default.
        num_cpus: CPUs to share out; what this process may use unless given.
        num_gpus: GPUs to share out; those detected unless given. May exceed them,
            since resources are logical.
        resources: custom resources by name, such as `{"license": 2}`.
        accelerator_type: type of the node's GPUs where it is not detected.
        preload: modules that are imported once, before workers are forked.
        log_to_driver: show what tasks print, line by line.
        cancel_grace: seconds from a task's cancel to the kill of its process.
        ignore_reinit_error: give this loop's node, should it have one.

    Raises:
        OptionError: an option is ill-valued.
        NodeRunningError: at the await; this loop has a node already.
        NodeStartError: at the await; the node cannot start.
        DeviceError: at the await; CUDA_VISIBLE_DEVICES names what is not there.
    """
    options = NodeOptions(
        num_cpus=_check_cpus(num_cpus),
        num_gpus=_check_gpus(num_gpus),
        resources=_check_custom(resources),
        accelerator_type=check_text("accelerator_type", accelerator_type),
        preload=_check_preload(preload),
        log_to_driver=_check_flag("log_to_driver", log_to_driver),
        cancel_grace=check_seconds("cancel_grace", cancel_grace),
    )
    address = check_text("address", address) or os.environ.get("AIOGPU_ADDRESS") or None
    return Opening(
        address, options, _check_flag("ignore_reinit_error", ignore_reinit_error)
    )


def _check_cpus(value: object) -> float | None:
    if value is None:
        return None
    quantity("num_cpus", value)
    assert isinstance(value, int | float)
    return float(value)


def _check_gpus(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
        raise OptionError(
            f"init(num_gpus={value!r}): a node has a whole number of GPUs; give an "
            f"int from 0, or leave it out to detect them."
        )
    return value


def _check_custom(value: object) -> Mapping[str, float]:
    if value is None:
        return {}
    check_resources("resources", value)
    assert isinstance(value, Mapping)
    return dict(value)


def _check_preload(value: object) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(name, str) and name for name in value)
    ):
        raise OptionError(
            f"preload={value!r} must be a sequence of module names, such as "
            f"preload=('numpy',)."
        )
    return tuple(value)


def _check_flag(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} must be True or False.")
    return value


def current_session() -> Session:
    """The running loop's session; one is opened if there is none.

    Raises:
        NoLoopError: no event loop is running in this thread.
    """
    loop = asyncio._get_running_loop()
    session = _sessions.get(loop)  # type: ignore[arg-type]
    if session is not None:
        return session
    _refuse_in_worker(".remote()")
    if loop is None:
        raise NoLoopError(
            ".remote() needs a running event loop, and there is none in this thread. "
            "Call it inside an `async def` that runs by aiogpu.run(main())."
        )
    address = os.environ.get("AIOGPU_ADDRESS") or None
    return _start(address, NodeOptions(), loop)


def _refuse_in_worker(what: str) -> None:
    if current.worker:
        raise NodeError(
            f"{what} was called inside a task; in this version tasks start no tasks. "
            f"Return to the program what is to be run next."
        )


def _here() -> Session | None:
    loop = asyncio._get_running_loop()
    return None if loop is None else _sessions.get(loop)


async def shutdown() -> None:
    """Close this loop's node, if it has one: stop its tasks, leave nothing behind."""
    session = _here()
    if session is not None:
        await session.shutdown()


async def cluster_resources() -> dict[str, float]:
    """All resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
    session = current_session()
    await session.opened()
    return session.cluster_resources()


async def available_resources() -> dict[str, float]:
    """What is free of each resource; 0.0 where nothing is."""
    session = current_session()
    await session.opened()
    return session.available_resources()


async def status() -> NodeStatus:
    """Who holds what share of which device, what waits and why."""
    session = current_session()
    await session.opened()
    return session.status()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on uvloop.

    Args:
        main: the program's coroutine.
        debug: asyncio's debug mode; None for the interpreter's setting.
    """
    import uvloop

    with asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _disown_all() -> None:
    for session in _sessions.values():
        session.disown()


def _abandon_all() -> None:
    for session in list(_sessions.values()):
        session.abandon()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)
