"""Calls that wait on a cluster whose last node that could run them has left.

Ray lets them wait without a word. Such a node often comes back, after a restart say;
so a warning is logged at once, and after a time without such a node the calls fail.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aiogpu.errors import InfeasibleError

if TYPE_CHECKING:
    from aiogpu.core.model.request import Request
    from aiogpu.engines.cluster.engine import RayEngine

GIVE_UP_AFTER: Final = 300.0
"""Seconds without a node that fits, after which waiting calls fail."""

_log: Final = logging.getLogger(__name__)


class InfeasibleCalls:
    """The calls of one engine that no node fits any more, and since when."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._since: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<InfeasibleCalls {len(self._since)}>"

    def check(self, *, has_lost: bool) -> None:
        """Warn of calls that no node fits any more; fail those that waited too long.

        Args:
            has_lost: whether a node has left since the last check.
        """
        if not has_lost and not self._since:
            return
        engine = self._engine
        now, overview = engine.loop.time(), engine.overview
        fitting: dict[Request, bool] = {}
        since: dict[int, float] = {}
        warned: set[tuple[str, Request]] = set()
        for number, live in list(engine.calls.live.items()):
            request = live.request
            if request is None:
                continue
            if request not in fitting:
                fitting[request] = overview.fits(request)
            if fitting[request]:
                continue
            since[number] = self._since.get(number, now)
            if number not in self._since and (live.name, request) not in warned:
                warned.add((live.name, request))
                self._warn(live.name, request)
        self._since = since
        if not overview.grows:
            for number in [one for one in since if now - since[one] >= GIVE_UP_AFTER]:
                self._fail(number)

    def _warn(self, name: str, request: Request) -> None:
        overview = self._engine.overview
        then = f"It fails after {GIVE_UP_AFTER:g} s unless such a node joins."
        if overview.grows:
            then = "It waits for the cluster's autoscaler to start one."
        _log.warning(
            "%s asks for %s, and the last node of the Ray cluster that could give it "
            "has left: %s. %s",
            *(name, request, overview.lacking(request), then),
        )

    def _fail(self, number: int) -> None:
        engine = self._engine
        del self._since[number]
        live = engine.calls.live.get(number)
        if live is None or live.request is None:
            return
        error = InfeasibleError(
            f"{live.name} asks for {live.request}, and no node of this Ray cluster "
            f"could give it for {GIVE_UP_AFTER:g} s, since the last one that could has "
            f"left: {engine.overview.lacking(live.request)}. Ask for less, or add a "
            f"node."
        )
        if live.actor:
            engine.actors.give_up(live.actor, error)
            return
        receiver = live.receiver
        engine.cancel(number)
        if receiver is not None:
            receiver.fail(error)
        engine.far.forsake(live, error)
