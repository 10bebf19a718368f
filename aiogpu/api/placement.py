"""Several shares of the node, held together for tasks and actors: a placement group.

`async with aiogpu.placement([{"GPU": 1}, {"GPU": 1}]) as group:` has both GPUs, or
waits for both; `f.options(placement=group, bundle=0).remote()` runs on the first.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from aiogpu.api.options import CHECKS
from aiogpu.api.placement_options import placement_group_of
from aiogpu.api.usage_errors import EnteredOnLoop, options_of
from aiogpu.errors import MisuseError, PlacementRemovedError

if TYPE_CHECKING:
    from aiogpu.api.session import Session
    from aiogpu.client.function_spec import Site
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.base import Engine
    from aiogpu.observe.why import Why
    from aiogpu.wire.messages import Failed

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
NAME: Final = "placement"


class PlacementClaim:
    """One placement as its node sees it: who is told of it, and may have it removed.

    Attributes:
        name: what errors call it.
        pid: process id of this program.
        task: its number, 0 before it was asked for.
        granted: done once it holds its bundles.
        is_over: whether it was removed.
    """

    def __init__(self, session: Session, name: str) -> None:
        self.pid = os.getpid()
        self.task = 0
        self.is_over = False
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who gives it tasks may never wait for it himself; these are told.
        self.granted.add_done_callback(_note_seen)
        self.lost: Exception | None = None
        self.name = name
        self._session = session

    def ask(self, site: Site) -> None:
        """Ask for it, now or as soon as the node is open."""

        def start(engine: Engine) -> None:
            if not self.is_over:
                self.task = engine.take_lease(site, self)

        self._session.when_open(start, self.fail)

    def receive(self, _: bytes) -> None:
        """It is granted."""
        if not self.granted.done():
            self.granted.set_result(None)

    def reject(self, failed: Failed) -> None:
        """It is refused, by a node that is another process."""
        from aiogpu.serialization.exceptions import unpack_failure

        self.fail(unpack_failure(failed, self.name))

    def fail(self, error: Exception) -> None:
        """It is refused, or gone."""
        self.lost = self.lost or error
        if not self.granted.done():
            self.granted.set_exception(error)

    def remove(self) -> None:
        """Nobody wants it any more; nothing happens the second time."""
        if self.is_over:
            return
        self.is_over = True
        if self.task and self._session.is_open and self.lost is None:
            self._session.cancel(self.task)
        self.fail(PlacementRemovedError(f"{self.name} was removed.", self.name))

    async def why(self) -> Why:
        """Return why it waits, or that it is held."""
        return await self._session.why(self.name, self.task)


class Placement(EnteredOnLoop):
    """What `placement` gives: bundles for tasks and actors to run in.

    `await group` waits until it holds all of them; `async with` removes it at the end
    of the block. It may be given to tasks, whose own tasks may run in it as well; only
    the program that has made it waits for it and removes it.
    """

    def __init__(
        self,
        placement_group: PlacementGroupSpec,
        claim: PlacementClaim | None = None,
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
        return tuple(
            bundle.request().as_numbers() for bundle in self._placement_group.bundles
        )

    @property
    def is_ready(self) -> bool:
        """True if it holds its bundles."""
        granted = self._own("is_ready").granted
        return granted.done() and self._own("is_ready").lost is None

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
        if claim.lost is not None:
            raise claim.lost
        return self

    async def __aenter__(self) -> Placement:
        try:
            return await self.ready()
        except BaseException:
            await self.remove()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.remove()

    async def remove(self) -> None:
        """Give all of it back, and end what runs in it or waits to.

        Their handles raise `PlacementRemovedError`. What they held is free when their
        code has stopped. May be called twice.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        # Late: user modules bring this one into every worker.
        from aiogpu.api.loop_sessions import check_thread

        claim = self._own("remove()")
        check_thread(claim.granted.get_loop(), "remove() of a placement")
        claim.remove()

    async def why(self) -> Why:
        """Return why it waits: what it lacks, who holds that, whose turn it is."""
        return await self._own("why()").why()

    def _own(self, what: str) -> PlacementClaim:
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
    from aiogpu.api.lease import placement_site, session_for

    called = CHECKS["name"]("name", name) or NAME
    placement_group = placement_group_of(
        bundles, strategy, called, secrets.token_hex(8)
    )
    first = CHECKS["priority"]("priority", priority)
    site = placement_site(placement_group, first)
    claim = PlacementClaim(session_for("aiogpu.placement()"), called)
    claim.ask(site)
    return Placement(placement_group, claim)


def _note_seen(granted: asyncio.Future[None]) -> None:
    if not granted.cancelled():
        granted.exception()
