"""Reservations of resources: leases and placement groups.

`async with aiogpu.lease(num_gpus=1) as gpu:` waits in the queue like a task and
provides environment variables for a process of the user's own.
`async with aiogpu.placement([{"GPU": 1}, {"GPU": 1}]) as group:` waits until both GPUs
are free at once; `f.options(placement=group, bundle=0).remote()` runs on the first.
Workers import this file when they unpickle a placement, so the session is imported
late.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from aiogpu.api.options import (
    OPTION_OF_RESOURCE,
    Check,
    TaskOptions,
    check_resources,
    check_size,
    with_options,
)
from aiogpu.api.results.handle import check_loop, check_thread
from aiogpu.api.usage_errors import (
    EnteredOnLoop,
    NotPassedOn,
    options_from,
    options_of,
)
from aiogpu.client.current import error_inside_task, is_in_task
from aiogpu.client.function_spec import (
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.core.model.request import (
    MOST_BUNDLES,
    STRATEGIES,
    PlacementGroupSpec,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.units import TYPE_PREFIX, device_quantity, quantity
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
    from aiogpu.api.keywords import LeaseKeywords
    from aiogpu.api.session import Session
    from aiogpu.client.interface import Outcome
    from aiogpu.engines.base import Engine
    from aiogpu.observe.why import Why


PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


_nothing: Final = Function(new_function_id(), b"")


def lease_func(given: Mapping[str, Any]) -> tuple[FunctionSpec, float | None]:
    """Return the specification of a lease with these options, and its timeout.

    Raises:
        OptionError: an option is invalid, or the lease would hold nothing.
    """
    options = with_options(TaskOptions(), given, "lease")
    options = options.replace(num_cpus=options.num_cpus or 0)
    request = options.request()
    if not request.scalars and not request.devices:
        raise OptionError(
            "a lease must hold something; give at least one amount, such as num_gpus=1 "
            "or gpu_memory='6GiB'."
        )
    return func_of(options.spec("lease", _nothing.id)), options.timeout


def placement_func(placement_group: PlacementGroupSpec, priority: int) -> FunctionSpec:
    """Return the specification of a placement group as a lease."""
    shape = Shape(placement_group.request())
    return func_of(
        TaskSpec(placement_group.name, shape, _nothing.id, priority=priority)
    )


def func_of(spec: TaskSpec) -> FunctionSpec:
    """Return the function of a lease: it runs no code, and only its owner ends it."""
    # The timeout limits the wait for the lease, not the time it is held.
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


EXAMPLE: Final = 'aiogpu.placement([{"GPU": 1, "CPU": 2}, {"GPU": 0.5}])'


def placement_group_of(
    bundles: object, strategy: object, name: str, key: str
) -> PlacementGroupSpec:
    """Return the specification of a placement group.

    Raises:
        OptionError: a value is invalid.
    """
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        allowed = ", ".join(map(repr, STRATEGIES))
        raise OptionError(f"strategy={strategy!r} must be one of {allowed}.")
    if isinstance(bundles, str | bytes | Mapping) or not isinstance(bundles, Iterable):
        raise OptionError(
            f"bundles={bundles!r} must be a list of dicts, such as {EXAMPLE}."
        )
    requests = tuple(_bundle(f"bundles[{i}]", one) for i, one in enumerate(bundles))
    if not 0 < len(requests) <= MOST_BUNDLES:
        raise OptionError(
            f"bundles has {len(requests)} entries; give 1 to {MOST_BUNDLES}, such as "
            f"{EXAMPLE}."
        )
    return PlacementGroupSpec(key, name, strategy, requests)


_OF_BUNDLE: Final[dict[str, Check[int]]] = {
    "num_cpus": quantity,
    "num_gpus": device_quantity,
    "memory": TaskOptions.memory.check,
    "gpu_memory": check_size,
}
"""The options that a bundle may have, besides names of resources."""


def _bundle(option: str, value: object) -> Request:
    """Return the request of a bundle: that of a task with these amounts."""
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={value!r} must be a dict of names to quantities, such as "
            f'{{"GPU": 1, "CPU": 2}}.'
        )
    amounts: dict[str, int] = {"num_cpus": 0}
    types: list[str] = []
    resources: dict[object, object] = {}
    for name, amount in value.items():
        own = OPTION_OF_RESOURCE.get(name, name)
        if own in _OF_BUNDLE:
            if own != name and own in value:
                raise OptionError(f"{option}={value!r} has both {own} and {name}.")
            amounts[own] = _OF_BUNDLE[own](f"{option}[{name!r}]", amount)
        elif isinstance(name, str) and name.startswith(TYPE_PREFIX):
            types.append(name.removeprefix(TYPE_PREFIX))
        else:
            resources[name] = amount
    if len(types) > 1:
        raise OptionError(f"{option} names more than one accelerator_type.")
    request = TaskOptions(
        **amounts,
        resources=check_resources(option, resources),
        accelerator_type=types[0] if types else None,
    ).request()
    if not request.scalars and not request.devices:
        raise OptionError(
            f"{option}={value!r} asks for nothing; give at least one amount above 0, "
            f'such as {{"GPU": 1, "CPU": 2}}.'
        )
    return request


class LeaseOwner:
    """The program's record of a lease or placement; receives its outcome, releases it.

    Separate from the user's object, so that a dropped object can be collected.

    Attributes:
        pid: process id of this program.
        task: number of the lease's task; 0 before the request.
        granted: settled with the packed grant.
        lost: settled with the reason if the lease ended without a release.
        is_over: True if the lease was released or the request withdrawn.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.pid = os.getpid()
        self.task = 0
        self.is_over = False
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[bytes] = loop.create_future()
        # A program may use a placement in tasks without awaiting it itself; the
        # error reaches those tasks.
        self.granted.add_done_callback(_note_seen)
        self.lost: asyncio.Future[Exception] = loop.create_future()
        self._session = session
        self._name = name

    @property
    def is_held(self) -> bool:
        """True if the lease is granted and was neither released nor lost."""
        if self.is_over or self.lost.done() or not self.granted.done():
            return False
        return self.granted.exception() is None

    def request(self, func: FunctionSpec) -> None:
        """Send the request, now or as soon as the node is open."""

        def start(engine: Engine) -> None:
            if not self.is_over:
                self.task = engine.take_lease(func, self)

        self._session.when_open(start, self.settle)

    def settle(self, outcome: Outcome) -> None:
        """Note that the request was granted or refused, or the grant was lost."""
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
        """Release the lease; idempotent.

        Args:
            why: the error for callers that still wait for the lease.
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
        """Release a lease whose `Lease` was collected, in any thread."""
        if self.granted.done() and not self.lost.done():
            warnings.warn(
                f"the lease {self._name} was never released; write `async with "
                f"aiogpu.lease(...)`, or `await lease.release()`.",
                ResourceWarning,
                stacklevel=2,
            )
        self._session.call_soon(self.give_back)

    async def why(self) -> Why:
        """Return why the lease waits, or that it is held."""
        return await self._session.why(self._name, self.task)


def _note_seen(granted: asyncio.Future[bytes]) -> None:
    if not granted.cancelled():
        granted.exception()


class Lease(EnteredOnLoop, NotPassedOn):
    """A lease, made by `aiogpu.lease`: await it, or use it in `async with`.

    Before it is granted, only `why()` can be used.
    """

    _PASS_INSTEAD = "pass its ids or its environ"

    def __init__(self, func: FunctionSpec, timeout: float | None) -> None:
        self._func = func
        self._timeout = timeout
        self._owner: LeaseOwner | None = None

    def __repr__(self) -> str:
        owner = self._owner
        if owner is None:
            state = "not requested"
        elif owner.is_over or owner.lost.done():
            state = "over"
        else:
            state = "held" if owner.granted.done() else "waiting"
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
        if self._owner is not None:
            raise MisuseError(
                "this lease was already awaited; call aiogpu.lease(...) again for "
                "another lease."
            )
        session = session_for("aiogpu.lease()")
        owner = self._owner = LeaseOwner(session, self._func.spec.name)
        try:
            owner.request(self._func)
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(owner.granted)
        except TimeoutError:
            owner.give_back()
            raise TaskTimeoutError(
                f"{self._func.spec.name}: the lease was not granted within its timeout "
                f"of {self._timeout:g} s; the request was withdrawn."
            ) from None
        except BaseException:
            owner.give_back()
            raise
        return self

    def __del__(self) -> None:
        if self._owner is not None and not self._owner.is_over:
            self._owner.forget()

    async def release(self) -> None:
        """Release the lease; idempotent.

        Its resources are free when the last process with its `environ` has ended. If
        the vendor's driver reports processes, devices are free only when this program
        does not use them any more either.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        if self._owner is not None:
            check_thread(self._owner.granted.get_loop(), "release() of a lease")
            self._owner.give_back()

    @cached_property
    def _grant(self) -> Bind:
        owner = self._owner
        if owner is None or not owner.granted.done():
            raise MisuseError(
                "this lease is not granted yet; write `async with aiogpu.lease(...) as "
                "gpu:`, or `gpu = await aiogpu.lease(...)`; without an event loop, "
                "`with aiogpu.sync.lease(...) as gpu:`."
            )
        # Imported late: it imports msgpack, which few programs need here.
        from aiogpu.wire.codec import unpack_as

        return unpack_as(Bind, owner.granted.result())

    @property
    def ids(self) -> list[int | str]:
        """The ids of the GPUs, as in `CUDA_VISIBLE_DEVICES`: indices or UUIDs."""
        return list(self._grant.accelerators.get("GPU", ()))

    @property
    def accelerators(self) -> dict[str, list[int | str]]:
        """The ids of the devices of each kind, `{"GPU": [0]}`."""
        granted = self._grant.accelerators.items()
        return {kind: list(ids) for kind, ids in granted}

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables for a process that uses the lease.

        Start the process with `{**os.environ, **gpu.environ}`. One variable marks the
        process and its children, so that the node sees whether the lease is in use.
        """
        return dict(self._grant.environ)

    @property
    def gpu_memory(self) -> int:
        """Bytes that the lease may use on each GPU, the minimum; 0 for no limit."""
        return min(filter(None, self._grant.gpu_memory), default=0)

    @property
    def is_held(self) -> bool:
        """True if the lease is granted and was neither released nor lost."""
        return self._owner is not None and self._owner.is_held

    async def lost(self) -> Exception:
        """Wait until the lease is lost without a release; return the reason.

        A lease is lost when the node is shut down or dies. Processes that use the lease
        go on, but other programs may get its devices.
        """
        assert self._grant is not None
        assert self._owner is not None
        check_loop(self._owner.lost.get_loop(), "lost() of a lease")
        return await asyncio.shield(self._owner.lost)

    async def why(self) -> Why:
        """Return why the lease waits: what is missing, who holds it, who is next."""
        if self._owner is None:
            raise MisuseError("this lease was not requested yet; await it first.")
        return await self._owner.why()


def session_for(what: str) -> Session:
    """Return this loop's session; raise inside a task, or if the node is closing."""
    from aiogpu.api.session import find_session

    if is_in_task():
        raise error_inside_task(what)
    session = find_session(what, is_for_programs=True)
    if session.is_closing:
        raise NodeClosedError("this node is being shut down.")
    return session


@options_of("a lease")
@options_from(TaskOptions, "lease")
def lease(**options: Unpack[LeaseKeywords]) -> Lease:
    """Reserve resources for code that is not a task; use the lease in `async with`.

    A lease waits in the queue like a task, and is held until it is released. The node
    starts no process for a lease and does not enforce it; it only keeps tasks off the
    reserved resources.

    Raises:
        OptionError: an option is invalid, or the lease would hold nothing.
        InfeasibleError: at the await: the lease asks for more than the node has.
        TaskTimeoutError: at the await: the lease was not granted in time.
        NodeError: at the await: called inside a task.
    """
    return Lease(*lease_func(options))


class Placement(EnteredOnLoop):
    """A placement group, made by `aiogpu.placement`: bundles for tasks and actors.

    `await group` waits until all bundles are reserved; `async with` removes the group
    at the end of the block. A group can be an argument of tasks, which can start tasks
    in it. Only the program that made the group can await or remove it.
    """

    def __init__(
        self,
        placement_group: PlacementGroupSpec,
        owner: LeaseOwner | None = None,
    ) -> None:
        self._placement_group = placement_group
        self._owner = owner

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return the specification, for `options(placement=...)`."""
        return self._placement_group

    @property
    def id(self) -> str:
        """The unique id of the group."""
        return self._placement_group.key

    @property
    def name(self) -> str:
        """The name for error messages and `status()`."""
        return self._placement_group.name

    @property
    def strategy(self) -> str:
        """The strategy that places the bundles."""
        return self._placement_group.strategy

    @property
    def bundles(self) -> tuple[Mapping[str, float], ...]:
        """The resources of each bundle, `{"CPU": 2.0, "GPU": 1.0}`."""
        return tuple(bundle.as_numbers() for bundle in self._placement_group.bundles)

    @property
    def is_ready(self) -> bool:
        """True if the group holds its bundles."""
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
        """Wait until the group holds all its bundles.

        Cancelling the wait does not withdraw the request; `remove` does.

        Raises:
            InfeasibleError: the group asks for more than the node has.
            PlacementRemovedError: the group was removed.
            NodeError: the node has ended.
        """
        owner = self._own("ready()")
        check_loop(owner.granted.get_loop(), "ready() of a placement")
        await asyncio.shield(owner.granted)
        if owner.lost.done():
            raise owner.lost.result()
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
        """Release the bundles, and end the group's tasks and actors; idempotent.

        Handles of these tasks raise `PlacementRemovedError`. The resources are free
        when the tasks' code has stopped.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        owner = self._own("remove()")
        check_thread(owner.granted.get_loop(), "remove() of a placement")
        owner.give_back(PlacementRemovedError(f"{self.name} was removed.", self.name))

    async def why(self) -> Why:
        """Return why the group waits: what is missing, who holds it, who is next."""
        return await self._own("why()").why()

    def _own(self, what: str) -> LeaseOwner:
        if self._owner is None:
            raise MisuseError(
                f"{what} of {self.name} is available only in the program that made the "
                f"placement. Tasks in the placement wait for it by themselves."
            )
        return self._owner

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
    """Reserve several bundles of resources, all at once or none.

    A placement group waits in the queue like a task, and is held until it is removed or
    this program ends. Tasks and actors run in it by
    `.options(placement=group, bundle=0)`, and wait until it is ready.

    Args:
        bundles: the resources of each bundle, `{"GPU": 1, "CPU": 2}`, or
            `{"num_gpus": 1, "num_cpus": 2}`. "memory" may be a text such as "6GiB";
            `{"accelerator_type:A100": 0.001}` in a bundle with GPUs restricts the GPUs
            to that type.
        strategy: "PACK" and "STRICT_PACK" use few devices; "SPREAD" uses different
            devices if it can; "STRICT_SPREAD" needs a machine for each bundle, and a
            node is one machine.
        name: name in error messages and `status()`; default "placement".
        priority: requests with a higher number are served first; default 0.

    Raises:
        OptionError: an argument is invalid.
        InfeasibleError: the group asks for more than the node has; raised by `ready()`
            if the node is not open yet.
        NodeError: called inside a task.
    """
    checked = TaskOptions.check({"name": name, "priority": priority}, "task")
    name = checked["name"] or "placement"
    placement_group = placement_group_of(bundles, strategy, name, secrets.token_hex(8))
    func = placement_func(placement_group, checked["priority"])
    owner = LeaseOwner(session_for("aiogpu.placement()"), name)
    owner.request(func)
    return Placement(placement_group, owner)
