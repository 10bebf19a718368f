"""Gangs: several processes that run the same code together, each with a rank.

The ranks of a gang are tasks or actors in the bundles of one placement, so they begin
together or not at all. Their environment has the variables by which
`torch.distributed` and its like find each other. The gang lives and dies as one: the
others would wait for a lost rank for ever.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

from aiogpu.api.actors.actor import ActorHandle, RemoteClass, kill
from aiogpu.api.decorator import remote
from aiogpu.api.options import TaskOptions, whole_number
from aiogpu.api.remote_function import RemoteFunction
from aiogpu.api.reservation import Placement, placement
from aiogpu.api.session import find_session
from aiogpu.api.usage_errors import EnteredOnLoop
from aiogpu.core.model.units import TYPE_PREFIX
from aiogpu.errors import ActorDiedError, MisuseError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.keywords import GangKeywords

ADDRESS: Final = "127.0.0.1"
"""`MASTER_ADDR`: all ranks are on one machine."""

MOST: Final = 1024
"""Most ranks of a gang."""

R = TypeVar("R")


class Gang(EnteredOnLoop):
    """Several ranks of a class or a function, made by `aiogpu.gang`.

    Attributes:
        name: name for error messages and `status()`.
        actors: the actors in rank order, while the gang of a class lives; for a call to
            a single rank: `await gang.actors[0].save.remote(path)`.
        restarts_left: how often it may still be started anew; -1 for no limit.
    """

    def __init__(
        self, target: Any, size: int, arguments: _Arguments, options: dict[str, Any]
    ) -> None:
        name = TaskOptions.name.checked(options.pop("name", None))
        self.name: str = target.__name__ if name is None else name
        restarts = options.pop("max_restarts", None)
        self.restarts_left: int = TaskOptions.max_restarts.checked(restarts)
        self.actors: list[ActorHandle[Any]] = []
        allowed = "a whole number of ranks, 1 or more"
        self._size: int = whole_number("size", size, 1, allowed, MOST)
        self._rank = _rank(target, options)
        self._arguments = arguments
        self._placement: Placement | None = None
        self._port: socket.socket | None = None
        self._ended: str = ""
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Gang {self.name} of {self._size}>"

    def __len__(self) -> int:
        return self._size

    def _as_called(self) -> str:
        return "aiogpu.gang(...)"

    def __await__(self) -> Generator[Any, None, Any]:
        if isinstance(self._rank, RemoteClass):
            return self._enter().__await__()
        return self._run().__await__()

    async def __aenter__(self) -> Gang:
        if not isinstance(self._rank, RemoteClass):
            raise MisuseError(
                f"{self.name} is a function: write `await aiogpu.gang({self.name}, "
                f"{self._size})`, whose value are the results in rank order."
            )
        return await self._enter()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _reserve(self) -> Placement:
        """Wait until there is room for all ranks."""
        if self._placement is not None:
            raise MisuseError(
                f"this gang was already awaited; call aiogpu.gang({self.name}, ...) "
                f"again for another one."
            )
        await _check_engine(self.name)
        options = self._rank._options
        self._placement = placement(
            [_bundle(options)] * self._size,
            name=self.name,
            priority=options.priority,
        )
        try:
            return await self._placement.ready()
        except BaseException:
            await self._placement.remove()
            raise

    def _remotes(self) -> list[Any]:
        """Return the function or class of each rank, with its variables."""
        if self._port is not None:
            self._port.close()
        self._port = hold_port()
        port = self._port.getsockname()[1]
        variables = self._rank._options.runtime_env
        return [
            self._rank.options(
                placement=self._placement,
                bundle=rank,
                runtime_env={
                    "env_vars": {**variables, **environ(rank, self._size, port)}
                },
            )
            for rank in range(self._size)
        ]

    # A function: its ranks are tasks

    async def _run(self) -> list[Any]:
        """Run the function in all ranks; return the results in rank order."""
        await self._reserve()
        args, kwargs = self._arguments
        try:
            while True:
                try:
                    return await self._all(
                        each.remote(*args, **kwargs) for each in self._remotes()
                    )
                except Exception:
                    if not self._may_restart():
                        raise
        finally:
            await self.close()

    # A class: its ranks are actors

    async def _enter(self) -> Gang:
        await self._reserve()
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        """Make the actors, and wait for their constructors."""
        args, kwargs = self._arguments
        while True:
            remotes = self._remotes()
            self.actors = [each.remote(*args, **kwargs) for each in remotes]
            try:
                await self._all(self.actors)
            except Exception:
                self._kill()
                if not self._may_restart():
                    raise
            except BaseException:
                self._kill()
                raise
            else:
                self._ended = ""
                return

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method in all ranks; return the results in rank order.

        One call runs at a time. If a rank raises or dies, or this call is cancelled,
        all ranks are ended. Then the gang is started anew if it has restarts left, and
        the call is made again; else the rank's error is raised.

        Args:
            method: name of the method.
            *args: its arguments, the same for all ranks.
            **kwargs: its arguments by name.

        Raises:
            ActorDiedError: a rank has died, or the gang had ended before.
            Exception: the error of the first rank that failed, with its type; a note
                names the rank.
        """
        async with self._turn:
            while True:
                if self._ended:
                    raise ActorDiedError(self._ended, self.name)
                methods = [getattr(actor, method) for actor in self.actors]
                handles = [each.remote(*args, **kwargs) for each in methods]
                try:
                    return await self._all(handles)
                except Exception as error:
                    self._end(f"{type(error).__name__}: {error}")
                    if not self._may_restart():
                        raise
                except BaseException:
                    self._end("a call of it was cancelled")
                    raise
                await self._start()

    def _end(self, reason: str) -> None:
        self._ended = f"the gang {self.name} has ended: {reason.removesuffix('.')}."
        self._kill()

    def _kill(self) -> None:
        actors, self.actors = self.actors, []
        for actor in actors:
            kill(actor)

    def _may_restart(self) -> bool:
        if self.restarts_left:
            self.restarts_left -= self.restarts_left > 0
            return True
        return False

    async def _all(self, started: Iterable[Awaitable[Any]]) -> list[Any]:
        """Wait for all ranks; after the first failure cancel the others.

        They are cancelled and awaited also if the caller is cancelled: what they hold
        is free when this returns.
        """
        ranks = [asyncio.ensure_future(each) for each in started]
        try:
            await asyncio.wait(ranks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            failed = [
                (rank, error)
                for rank, each in enumerate(ranks)
                if each.done() and not each.cancelled() and (error := each.exception())
            ]
            if not all(each.done() for each in ranks):
                for each in ranks:
                    each.cancel()
                await asyncio.wait(ranks)
        if failed:
            rank, first = failed[0]
            first.add_note(
                f"Raised by rank {rank} of the {self._size} of {self.name}; the other "
                f"ranks were ended."
            )
            raise first
        return [each.result() for each in ranks]

    async def close(self) -> None:
        """End all ranks in order, and free what they hold; idempotent."""
        self._ended = self._ended or f"the gang {self.name} was closed."
        self.actors.clear()  # an actor ends with its last handle
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._placement is not None:
            await self._placement.remove()


_Arguments = tuple[Sequence[Any], Mapping[str, Any]]


async def _check_engine(name: str) -> None:
    """Refuse a gang on an engine whose tasks do not run at the same time here."""
    session = find_session("aiogpu.gang()")
    await session.opened()
    if not session.engine.runs_together:
        raise MisuseError(
            f"the gang {name} needs processes of this machine that run at the same "
            f"time: use a node of this program (address='local') or a shared one "
            f"(address='auto'). On Ray, use Ray Train."
        )


_OF_AN_ACTOR: Final[Mapping[str, object]] = {
    "name": None,
    "lifetime": None,
    "get_if_exists": False,
    "max_restarts": 0,
    "max_task_retries": 0,
    "evict_after": None,
    "placement": None,
}
"""Options of an actor that its ranks do without, though the class may have them.

A rank that is started anew or leaves by itself would be waited for without end.
"""

_OF_A_TASK: Final[Mapping[str, object]] = {
    "lifetime": None,
    "max_retries": 0,
    "retry_exceptions": False,
    "retry_oom": None,
    "placement": None,
}
"""Options of a task that its ranks do without, for the same reason."""


def _rank(target: Any, options: dict[str, Any]) -> Any:
    """Return the function or class of each rank; raises `OptionError`."""
    is_actor = isinstance(target, RemoteClass)
    TaskOptions.check(options, "actor" if is_actor else "task")
    rank = target.options(**(_OF_AN_ACTOR if is_actor else _OF_A_TASK))
    of_gangs = TaskOptions.taken_by("gang")
    refused = [name for name in options if name not in of_gangs]
    # What a bundle cannot express, and several handles; the target may bring them.
    refused += [
        name for name in ("gpu_where", "any_of") if getattr(rank._options, name)
    ]
    refused += ["num_returns"] if rank._options.num_returns > 1 else []
    if refused:
        raise OptionError(
            f"gang({refused[0]}=...): a gang places its ranks by itself, and starts "
            f"anew as a whole (max_restarts=); leave {refused[0]} out."
        )
    return rank.options(**options)


def _bundle(options: TaskOptions) -> dict[str, float]:
    """Return the bundle of one rank."""
    bundle = options.request().as_numbers()
    if options.accelerator_type is not None:
        bundle[f"{TYPE_PREFIX}{options.accelerator_type}"] = 0.001
    return bundle


def hold_port() -> socket.socket:
    """Bind a free port, so that no other program is given it.

    The first rank can bind it as well: both sockets allow it (`SO_REUSEADDR`), and this
    one never listens (socket(7)).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((ADDRESS, 0))
    return held


def environ(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of a rank, as `torchrun` sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }


@overload
def gang(
    target: type | RemoteClass[..., Any],
    size: int,
    /,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[GangKeywords],
) -> Gang: ...


@overload
def gang(
    target: Callable[..., R] | RemoteFunction[..., R],
    size: int,
    /,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[GangKeywords],
) -> Awaitable[list[R]]: ...


def gang(
    target: Any,
    size: int,
    /,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run a class or a function in several processes together, each with a rank.

    All ranks are placed at once or none. Each has the variables `RANK`, `LOCAL_RANK`,
    `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` before any of its
    code is imported. If a rank raises or dies, the others are ended, and its error is
    raised with a note that names the rank.

    Args:
        target: a class or a function, remote or plain. Its own options hold for each
            rank, except a name, retries, restarts, eviction and a placement.
        size: number of ranks, 1 to 1024.
        args: the arguments of the function or the constructor, the same for all ranks.
        kwargs: its arguments by name.
        **options: options of each rank, as for a task or an actor: `num_gpus`,
            `num_cpus` (default 1), `memory`, `gpu_memory`, `resources`,
            `accelerator_type`, `runtime_env`, `run_timeout` of a function. Of the gang:
            `name`, `priority`, and `max_restarts`, how often it is started anew after a
            failure (default 0, -1 for no limit).

    Returns:
        For a function, an awaitable for the list of results in rank order. For a class,
        an asynchronous context manager for the `Gang`, whose `call` calls a method in
        all ranks.

    Raises:
        OptionError: an option is unknown or invalid.
        MisuseError: the target can be no gang, or the node runs one task at a time.

    Example:
        async with aiogpu.gang(Trainer, 4, num_gpus=1) as ranks:
            losses = await ranks.call("fit", epochs=3)
        results = await aiogpu.gang(train, 4, num_gpus=1)
    """
    if not isinstance(target, RemoteClass | RemoteFunction):
        if not callable(target):
            raise MisuseError(
                f"gang() was given {target!r}; give it a class or a function, and the "
                f"number of ranks."
            )
        target = remote(target)
    function = target.__wrapped__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise MisuseError(
            f"{target.__name__} is a generator; a gang needs a function that returns, "
            f"or a class."
        )
    return Gang(target, size, (args, kwargs or {}), options)
