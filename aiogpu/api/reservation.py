"""Shares of the node that are held: a lease, and a placement group.

`async with aiogpu.lease(num_gpus=1) as gpu:` waits its turn among tasks, and gives the
variables by which a process finds what is its own: for code that is no task.
`async with aiogpu.placement([{"GPU": 1}, {"GPU": 1}]) as group:` has both GPUs, or
waits for both; `f.options(placement=group, bundle=0).remote()` runs on the first.
Workers bring this file for a placement that they are given, so the session is imported
late.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from aiogpu.api.options import (
    TaskOptions,
    check_options,
    merged,
    placement_group_of,
)
from aiogpu.api.results.handle import check_thread
from aiogpu.api.usage_errors import EnteredOnLoop, options_of
from aiogpu.client.current import error_inside_task, host_of_task
from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.core.model.request import Shape, TaskSpec
from aiogpu.errors import (
    MisuseError,
    NodeClosedError,
    OptionError,
    PlacementRemovedError,
    TaskTimeoutError,
)
from aiogpu.serialization.exceptions import error_of
from aiogpu.wire.messages import Bind

if TYPE_CHECKING:
    from aiogpu.api.options import GpuWhere, Strategy
    from aiogpu.api.session import Session
    from aiogpu.client.interface import Outcome
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.base import Engine
    from aiogpu.observe.why import Why


PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


_nothing: Final = Function(new_function_id(), b"")


def lease_func(asked: Mapping[str, Any]) -> tuple[FunctionSpec, float | None]:
    """What the node is asked for a lease with these options, and how long it waits.

    Raises:
        OptionError: names the option, the value and what is allowed; or nothing is
            asked for.
    """
    options = merged(TaskOptions(), asked, "lease")
    options = options._replace(num_cpus=options.num_cpus or 0)
    request = options.request()
    if not request.scalars and not request.devices:
        raise OptionError(
            "a lease of nothing is no lease; say what is to be kept from others, such "
            "as num_gpus=1 or gpu_memory='6GiB'."
        )
    return func_of(options.spec("lease", _nothing.id)), options.timeout


def placement_func(placement_group: PlacementGroupSpec, priority: int) -> FunctionSpec:
    """Return what the node is asked for a placement."""
    shape = Shape(placement_group.request())
    return func_of(
        TaskSpec(placement_group.name, shape, _nothing.id, priority=priority)
    )


def func_of(spec: TaskSpec) -> FunctionSpec:
    """A lease's function: nothing runs, and nobody but its owner gives it back."""
    # How long it may wait is not how long it may be held.
    spec = replace(
        spec,
        timeout=None,
        max_calls=1,
        max_retries=0,
        is_endless=True,
        is_lease=True,
    )
    return FunctionSpec(
        id=new_func_id(),
        function=_nothing,
        spec=spec,
        resources=spec.shape.request.as_numbers(),
        environ={},
        is_coroutine=False,
    )


class Claim:
    """One reservation as its node sees it: who is told of it, and may give it back.

    It is apart from what the user has, so that one which is forgotten can be collected.

    Attributes:
        pid: process id of this program.
        task: its number, 0 before it was asked for.
        granted: what it gives, pickled, once it is there.
        lost: why it is gone although it was not given back, once it is.
        is_over: whether it was given back, or up.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.pid = os.getpid()
        self.task = 0
        self.is_over = False
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[bytes] = loop.create_future()
        # Who gives tasks a placement may never wait for it himself; these are told.
        self.granted.add_done_callback(_note_seen)
        self.lost: asyncio.Future[Exception] = loop.create_future()
        self._session = session
        self._name = name

    @property
    def is_held(self) -> bool:
        """True if it is granted, not given back, and the node has not ended."""
        if self.is_over or self.lost.done() or not self.granted.done():
            return False
        return self.granted.exception() is None

    def ask(self, func: FunctionSpec) -> None:
        """Ask for it, now or as soon as the node is open."""

        def start(engine: Engine) -> None:
            if not self.is_over:
                self.task = engine.take_lease(func, self)

        self._session.when_open(start, self.settle)

    def settle(self, outcome: Outcome) -> None:
        """It is granted or refused, or was granted and has gone."""
        if self.is_over:
            return
        if isinstance(outcome, bytes):
            if not self.granted.done():
                self.granted.set_result(outcome)
            return
        error = error_of(outcome, self._name)
        if not self.granted.done():
            self.granted.set_exception(error)
        elif not self.lost.done():
            self.lost.set_result(error)

    def give_back(self, why: Exception | None = None) -> None:
        """Nobody wants it any more; nothing happens the second time.

        `why` is told to those who wait for it.
        """
        if self.is_over:
            return
        is_lost = self.lost.done()
        if why is not None:
            self.settle(why)
        self.is_over = True
        if self.task and self._session.is_open and not is_lost:
            self._session.cancel(self.task)

    def forget(self) -> None:
        """Its `Lease` was collected, by whichever thread."""
        if not self.is_over and self.granted.done() and not self.lost.done():
            warnings.warn(
                f"the lease {self._name} was never released; write `async with "
                f"aiogpu.lease(...)`, or await its release().",
                ResourceWarning,
                stacklevel=2,
            )
        self._session.call_soon(self.give_back)

    async def why(self) -> Why:
        """Return why it waits, or that it is held."""
        return await self._session.why(self._name, self.task)


def _note_seen(granted: asyncio.Future[bytes]) -> None:
    if not granted.cancelled():
        granted.exception()


class Lease(EnteredOnLoop):
    """What `lease` gives: await it, or use it in `async with`.

    All but `why()` is there once it is granted.
    """

    def __init__(self, func: FunctionSpec, timeout: float | None) -> None:
        self._func = func
        self._timeout = timeout
        self._claim: Claim | None = None
        self._finalizer: weakref.finalize[Any, Lease] | None = None

    def __repr__(self) -> str:
        claim = self._claim
        if claim is None:
            state = "not asked for"
        elif claim.is_over or claim.lost.done():
            state = "over"
        else:
            state = "held" if claim.granted.done() else "waiting"
        return f"<Lease {self._func.spec.name} {state}>"

    def _as_called(self) -> str:
        return "aiogpu.lease(...)"

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._take().__await__()

    async def __aenter__(self) -> Lease:
        return await self._take()

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _take(self) -> Lease:
        if self._claim is not None:
            raise MisuseError(
                "this lease was awaited before; each aiogpu.lease(...) is one lease, "
                "so call it once for each."
            )
        session = session_for("aiogpu.lease()")
        claim = self._claim = Claim(session, self._func.spec.name)
        self._finalizer = weakref.finalize(self, claim.forget)
        self._finalizer.atexit = False
        try:
            claim.ask(self._func)
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(claim.granted)
        except TimeoutError:
            self._end()
            raise TaskTimeoutError(
                f"{self._func.spec.name}: the lease was not granted within its timeout "
                f"of {self._timeout:g} s; it is not asked for any more."
            ) from None
        except BaseException:
            self._end()
            raise
        return self

    def _end(self) -> None:
        if self._finalizer is not None and self._claim is not None:
            self._finalizer.detach()
            self._claim.give_back()

    async def release(self) -> None:
        """Give it back. It is free when the last process has ended that has `environ`.

        Whatever else of this program is on its devices has to leave them as well;
        where there is a driver that sees such things, they are given to nobody before.
        May be called twice.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        if self._claim is not None:
            check_thread(self._claim.granted.get_loop(), "release() of a lease")
        self._end()

    @cached_property
    def _grant(self) -> Bind:
        claim = self._claim
        if claim is None or not claim.granted.done():
            raise MisuseError(
                "this lease is not granted yet; write `async with aiogpu.lease(...) as "
                "gpu:`, or `gpu = await aiogpu.lease(...)`."
            )
        # msgpack comes with it, which a program without leases may not need.
        from aiogpu.wire.codec import unpack_as

        return unpack_as(Bind, claim.granted.result())

    @property
    def ids(self) -> list[int | str]:
        """The GPUs, as `CUDA_VISIBLE_DEVICES` names them: indices, or UUIDs."""
        return list(self._grant.accelerators.get("GPU", ()))

    @property
    def accelerators(self) -> dict[str, list[int | str]]:
        """The devices of each kind, `{"GPU": [0]}`."""
        held = self._grant.accelerators.items()
        return {kind: list(ids) for kind, ids in held}

    @property
    def environ(self) -> dict[str, str]:
        """The variables for a process that the lease is for, beside those of its own.

        `{**os.environ, **gpu.environ}` is what to start one with. One of them marks
        it, and whatever it starts: by that the node sees whether the lease is in use.
        """
        return dict(self._grant.environ)

    @property
    def gpu_memory(self) -> int:
        """Bytes that may be used of each GPU, the least of them; 0 without a limit."""
        return min(filter(None, self._grant.gpu_memory), default=0)

    @property
    def is_held(self) -> bool:
        """True if it is granted, not given back, and the node has not ended."""
        return self._claim is not None and self._claim.is_held

    async def lost(self) -> Exception:
        """Wait until it is gone although it was not released, and say why.

        Its node has been shut down, or has died. What the lease was for goes on, and
        nobody keeps others from its devices any more.
        """
        assert self._grant is not None
        assert self._claim is not None
        return await asyncio.shield(self._claim.lost)

    async def why(self) -> Why:
        """Return why it waits: what it lacks, who holds that, whose turn it is."""
        if self._claim is None:
            raise MisuseError("this lease was not asked for yet; it is by awaiting it.")
        return await self._claim.why()


def session_for(what: str) -> Session:
    """This loop's session, for what only a program asks, such as `lease()`."""
    from aiogpu.api.session import session_of_program

    if host_of_task.get() is not None:
        raise error_inside_task(what)
    session = session_of_program(what)
    if session.is_closing:
        raise NodeClosedError("this node is being shut down.")
    return session


@options_of("a lease")
def lease(  # noqa: D417 - all by keyword, each an option of its own
    *,
    num_cpus: float = 0,
    num_gpus: float = 0,
    memory: int | str | None = None,
    resources: Mapping[str, float] | None = None,
    accelerator_type: str | None = None,
    gpu_where: GpuWhere | None = None,
    gpu_memory: int | str | None = None,
    strategy: Strategy = "pack",
    name: str | None = None,
    priority: int = 0,
    timeout: float | None = None,
) -> Lease:
    """Ask for a share of the node for code that is no task: `async with` it.

    It waits its turn as a task does, and is held until it is released. The node starts
    no process for it, and sees to nothing that is done with it: it keeps others away.

    Args:
        num_cpus, num_gpus, memory, resources: how much of each, as for tasks; nothing
            unless given.
        accelerator_type, gpu_where, gpu_memory, strategy: on which GPUs, as for tasks.
        name: for `status()`; "lease" unless given.
        priority: higher goes first.
        timeout: seconds that it waits for its turn at most.

    Raises:
        OptionError: an option is ill-valued, or nothing is asked for.
        InfeasibleError: at the await; there will never be enough for it.
        TaskTimeoutError: at the await; its turn has not come in time.
        NodeError: at the await; it is asked for inside a task.
    """
    return Lease(*lease_func(dict(locals())))


class Placement(EnteredOnLoop):
    """What `placement` gives: bundles for tasks and actors to run in.

    `await group` waits until it holds all of them; `async with` removes it at the end
    of the block. It may be given to tasks, whose own tasks may run in it as well; only
    the program that has made it waits for it and removes it.
    """

    def __init__(
        self,
        placement_group: PlacementGroupSpec,
        claim: Claim | None = None,
    ) -> None:
        self._placement_group = placement_group
        self._claim = claim

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return what the node is asked for; for `options(placement=...)`."""
        return self._placement_group

    @property
    def id(self) -> str:
        """Tells it from all others."""
        return self._placement_group.key

    @property
    def name(self) -> str:
        """For errors and `status()`."""
        return self._placement_group.name

    @property
    def strategy(self) -> str:
        """How its bundles are laid out."""
        return self._placement_group.strategy

    @property
    def bundles(self) -> tuple[Mapping[str, float], ...]:
        """What each bundle holds, `{"CPU": 2.0, "GPU": 1.0}`."""
        return tuple(bundle.as_numbers() for bundle in self._placement_group.bundles)

    @property
    def is_ready(self) -> bool:
        """True if it holds its bundles."""
        return self._own("is_ready").is_held

    def __repr__(self) -> str:
        placement_group = self._placement_group
        name, strategy = placement_group.name, placement_group.strategy
        return f"<Placement {name} {strategy} {placement_group}>"

    def __len__(self) -> int:
        return len(self._placement_group.bundles)

    def _as_called(self) -> str:
        return "aiogpu.placement(...)"

    def __await__(self) -> Generator[Any, None, Placement]:
        return self.ready().__await__()

    async def ready(self) -> Placement:
        """Wait until it holds all its bundles.

        Who is cancelled meanwhile, or runs out of time, waits no longer; the placement
        is asked for until it is removed.

        Raises:
            InfeasibleError: there will never be enough for it.
            PlacementRemovedError: it was removed.
            NodeError: its node has ended.
        """
        claim = self._own("ready()")
        await asyncio.shield(claim.granted)
        if claim.lost.done():
            raise claim.lost.result()
        return self

    async def __aenter__(self) -> Placement:
        try:
            return await self.ready()
        except BaseException:
            await self.remove()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.remove()

    async def remove(self) -> None:
        """Give all of it back, and end what runs in it or waits to.

        Their handles raise `PlacementRemovedError`. What they held is free when their
        code has stopped. May be called twice.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        claim = self._own("remove()")
        check_thread(claim.granted.get_loop(), "remove() of a placement")
        claim.give_back(PlacementRemovedError(f"{self.name} was removed.", self.name))

    async def why(self) -> Why:
        """Return why it waits: what it lacks, who holds that, whose turn it is."""
        return await self._own("why()").why()

    def _own(self, what: str) -> Claim:
        if self._claim is None:
            raise MisuseError(
                f"{what} of {self.name} was called where it was passed to; only the "
                f"program that has made it can ask that. Tasks that are given it wait "
                f"for it by themselves."
            )
        return self._claim

    def __reduce__(self) -> tuple[Callable[..., Placement], tuple[PlacementGroupSpec]]:
        return Placement, (self._placement_group,)


@options_of("a placement")
def placement(
    bundles: Iterable[Mapping[str, Any]],
    strategy: PlacementStrategy = "PACK",
    *,
    name: str | None = None,
    priority: int = 0,
) -> Placement:
    """Ask for several bundles of resources, all of them at once or none yet.

    It waits its turn as a task does, and is held until it is removed or this program
    ends. Tasks and actors run in it by `.options(placement=group, bundle=0)`; those
    that are given it before it is ready wait for it.

    Args:
        bundles: what each bundle holds, `{"GPU": 1, "CPU": 2}`: by resource a quantity,
            of "memory" also a text as "6GiB"; `{"accelerator_type:A100": 0.001}` beside
            GPUs has them of that type.
        strategy: "PACK" and "STRICT_PACK" keep bundles on few devices; "SPREAD" has
            them on different ones where it can; "STRICT_SPREAD" has each on a machine
            of its own, of which a node is one.
        name: for errors and `status()`; "placement" unless given.
        priority: higher goes first.

    Raises:
        OptionError: names what is ill-valued, and what is allowed.
        InfeasibleError: there will never be enough for it; at `ready()` where the node
            is not open yet.
        NodeError: it is asked for inside a task.
    """
    checked = check_options({"name": name, "priority": priority})
    called, first = checked["name"] or "placement", checked["priority"]
    placement_group = placement_group_of(
        bundles, strategy, called, secrets.token_hex(8)
    )
    func = placement_func(placement_group, first)
    claim = Claim(session_for("aiogpu.placement()"), called)
    claim.ask(func)
    return Placement(placement_group, claim)
