"""The leases of one node: who has asked is told what he has, and watched to the end.

A lease is asked for as a task is submitted, and given up by cancelling that. It ends
when all processes have ended that were started with its variables: a killed holder
leaves orphans, and a careless one leaves them too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

from aiogpu.core import effects
from aiogpu.core.events import Event, LeaseReturned
from aiogpu.core.model.ids import WorkerId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.resources.ledger import Lease
from aiogpu.runtime.call import Call, Receiver
from aiogpu.runtime.placements import Placements
from aiogpu.runtime.remains import Remains
from aiogpu.runtime.standing import StandingPlacements
from aiogpu.wire.codec import pack
from aiogpu.wire.messages import LEASE_MARK

if TYPE_CHECKING:
    from aiogpu.core.effects import Effect
    from aiogpu.runtime.assignment import Assignment
    from aiogpu.runtime.clearance import Clearance
    from aiogpu.runtime.device_eyes import Key
    from aiogpu.runtime.unasked import Unasked

_log: Final = logging.getLogger(__name__)


class LeaseReceiver(Receiver, Protocol):
    """Who waits for a lease.

    He is told a `Bind`, packed; afterwards he may be told, by `fail`, that it is gone,
    since its node is.
    """

    @property
    def pid(self) -> int:
        """Process id of the program that asks."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """One lease that somebody has.

    Attributes:
        pid: process id of the program that has asked for it.
        name: of the lease.
        mark: what the processes have inherited that it is for.
        remains: what is left of these, once it is to be given back.
    """

    pid: int
    name: str
    mark: str
    lease: Lease
    remains: Remains | None = None


class Leases:
    """All leases that others hold.

    Attributes:
        ways: how each effect of the core that concerns leases is carried out.
        standing: placements that outlive the programs that have asked for them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: ShardedDict[Call],
        assignment: Assignment,
        clearance: Clearance | Unasked,
        feed: Callable[[Event], None],
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._assignment = assignment
        self._clearance = clearance
        self._feed = feed
        self._held: dict[WorkerId, Held] = {}
        self._placements = Placements(calls)
        self.standing = StandingPlacements()
        self._token = os.urandom(8).hex()
        self.ways: Final[dict[type[Effect], Callable[..., None]]] = {
            effects.Granted: self._grant,
            effects.Reclaim: self._reclaim,
            **self._placements.ways,
        }

    def __repr__(self) -> str:
        return f"<Leases {len(self._held)} held>"

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the programs that have asked for leases, by holder.

        Those of placements as well.
        """
        held = {int(holder): held.pid for holder, held in self._held.items()}
        return held | self._placements.pids

    def roots_of(self, key: Key) -> Mapping[int, int]:
        """The programs that have a lease of a device, each with the holder's id."""
        kind, index = key
        return {
            held.pid: int(holder)
            for holder, held in self._held.items()
            for (its, _), shares in zip(
                held.lease.request.devices, held.lease.shares, strict=True
            )
            if its == kind and any(index == share[0] for share in shares)
        }

    def _grant(self, effect: effects.Granted) -> None:
        call = self._calls[effect.task]
        site, receiver = call.site, cast("LeaseReceiver", call.receiver)
        mark = f"{self._token}.{effect.task}"
        bind = self._assignment.bind(effect.lease, {})
        self._held[effect.holder] = Held(
            receiver.pid, site.spec.name, f"{LEASE_MARK}={mark}", effect.lease
        )
        self._clearance.begin(effect.holder, effect.lease)
        environ = {**bind.environ, LEASE_MARK: mark}
        receiver.receive(pack(bind._replace(environ=environ)))

    def _reclaim(self, effect: effects.Reclaim) -> None:
        held, holder = self._held.get(effect.holder), effect.holder
        if held is None:
            self._feed(LeaseReturned(holder))  # it was never told that it has it
            return
        held.remains = Remains(
            self._loop, held.mark, lambda pids: self._give_back(holder, pids)
        )

    def _give_back(self, holder: WorkerId, pids: Collection[int]) -> None:
        held = self._held.pop(holder)
        settles = self._clearance.end(holder, held.lease, (held.pid, *pids))
        self._feed(LeaseReturned(holder, settles))

    def close(self) -> None:
        """The node ends; what its leases were for goes on, and nobody waits for it."""
        for held in self._held.values():
            if held.remains is not None:
                held.remains.close()
        self._held.clear()
