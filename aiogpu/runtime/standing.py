"""Placements that outlive the program that has asked for them, known by their names.

Several programs may know one: each is told that it is granted, or that it is no more.
To the rest of the node it is a placement like any other, whose owner is nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from aiogpu.core.model.request import PlacementGroupSpec
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.errors import PlacementNameError, PlacementRemovedError

if TYPE_CHECKING:
    from aiogpu.runtime.call import Site
    from aiogpu.runtime.leases import LeaseReceiver
    from aiogpu.wire.messages import Failed

REMEMBERED: Final = 4096
"""Keys of those that are no more, so that none is asked for a second time."""


class Standing:
    """One of them, as its node tells of it; see `LeaseReceiver`.

    Attributes:
        task: its number on the node.
        pid: 0, as it is no program's.
    """

    pid = 0

    def __init__(
        self, placements: StandingPlacements, gang: PlacementGroupSpec
    ) -> None:
        self.task = 0
        self.gang = gang
        self._placements = placements
        self._watchers: list[LeaseReceiver] = []
        self._is_granted = False

    def __repr__(self) -> str:
        return f"<Standing {self.gang.name}>"

    def watch(self, receiver: LeaseReceiver) -> None:
        """Have one more told of it."""
        self._watchers.append(receiver)
        if self._is_granted:
            receiver.receive(b"")

    def unwatch(self, receiver: LeaseReceiver) -> None:
        """Tell him no more."""
        if receiver in self._watchers:
            self._watchers.remove(receiver)

    def receive(self, _: bytes) -> None:
        """It is granted."""
        self._is_granted = True
        for watcher in self._watchers:
            watcher.receive(b"")

    def reject(self, failed: Failed) -> None:
        """It is refused."""
        for watcher in self._end():
            watcher.reject(failed)

    def fail(self, error: Exception) -> None:
        """It is refused, or no more."""
        for watcher in self._end():
            watcher.fail(error)

    def _end(self) -> list[LeaseReceiver]:
        """Forget it; gives those who are to be told."""
        self._placements.forget(self)
        watchers, self._watchers = self._watchers, []
        return watchers


class StandingPlacements:
    """Those of one node."""

    def __init__(self) -> None:
        self._by_name: dict[str, Standing] = {}
        self._by_task: dict[int, Standing] = {}
        self._gone: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<StandingPlacements {sorted(self._by_name)}>"

    def take(
        self,
        site: Site,
        receiver: LeaseReceiver,
        submit: Callable[[Site, LeaseReceiver], int],
    ) -> int:
        """Ask for one, or have one more told of it that there is; gives its number.

        Raises:
            PlacementNameError: another one has its name.
            PlacementRemovedError: it was removed meanwhile.
            InfeasibleError: there will never be enough for it.
        """
        gang = cast("PlacementGroupSpec", site.spec.shape.request.gang)
        known = self._by_name.get(gang.name)
        if known is not None and known.gang.key == gang.key:
            known.watch(receiver)
            return known.task
        if gang.key in self._gone:
            raise PlacementRemovedError(f"{gang.name} {UNKNOWN}.", gang.name)
        if known is not None:
            raise name_taken(gang.name)
        standing = self._by_name[gang.name] = Standing(self, gang)
        standing.watch(receiver)
        try:
            standing.task = submit(site, standing)
        except BaseException:
            self.forget(standing)
            raise
        if self._by_name.get(gang.name) is standing:
            self._by_task[standing.task] = standing
        return standing.task

    def find(self, name: str) -> PlacementGroupSpec:
        """The one of that name.

        Raises:
            PlacementNameError: there is none.
        """
        found = self._by_name.get(name)
        if found is None:
            raise no_such_name(name)
        return found.gang

    def remove(
        self,
        task: int,
        cancel: Callable[[int], object],
        receiver: LeaseReceiver | None = None,
    ) -> bool:
        """End one, and tell all who know it but the one who has asked for that.

        Args:
            task: its number.
            cancel: ends it on the node.
            receiver: of who has asked, None for nobody's.

        Returns:
            False if there is none of that number.
        """
        standing = self._by_task.get(task)
        if standing is None:
            return False
        if receiver is not None:
            standing.unwatch(receiver)
        cancel(task)
        name = standing.gang.name
        standing.fail(PlacementRemovedError(f"{name} {REMOVED}.", name))
        return True

    def leave(self, task: int, receiver: LeaseReceiver) -> None:
        """A program that knows one has gone."""
        standing = self._by_task.get(task)
        if standing is not None:
            standing.unwatch(receiver)

    def forget(self, standing: Standing) -> None:
        """One is no more; its name is free."""
        if self._by_name.get(standing.gang.name) is standing:
            del self._by_name[standing.gang.name]
        self._by_task.pop(standing.task, None)
        self._gone[standing.gang.key] = None
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]


def name_taken(name: str) -> PlacementNameError:
    """The error of who wants a name that another placement has."""
    return PlacementNameError(
        f"a placement named {name!r} is there already. Give another name, or have that "
        f"one by aiogpu.get_placement({name!r})."
    )


def no_such_name(name: str) -> PlacementNameError:
    """The error of who asks for a placement that is not there."""
    return PlacementNameError(
        f"no placement named {name!r} outlives its program on this node. Ask for one "
        f'by aiogpu.placement(..., name={name!r}, lifetime="detached").'
    )
