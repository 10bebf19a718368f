"""A slot: a keeper, its pipes, and the one worker that it keeps at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.linux.procfs import ExitEvidence, Findings
from aiogpu.runtime.caller import Caller
from aiogpu.runtime.cause import is_kernels
from aiogpu.runtime.death import Death, stillbirth
from aiogpu.runtime.output import Output
from aiogpu.runtime.program import program_of
from aiogpu.runtime.transport import Peer
from aiogpu.wire.messages import Define, Forget, Message

if TYPE_CHECKING:
    from aiogpu.runtime.call import Site
    from aiogpu.runtime.zygote import Zygote

SITES_KEPT: Final = 1024
"""Sites that a worker remembers; a program that makes ever new ones is bounded."""


@dataclass(slots=True, eq=False)
class LiveWorker(Caller):
    """A worker process, as far as the driver can see it.

    Attributes:
        start_timer: rings if it has not connected in time.
        end_timer: rings if it was to be ended and has not ended in time.
        environment: variables of `runtime_env` for which it is wanted.
        sites: ids of the sites that it knows.
        functions: ids of the functions that it knows.
        status: its wait status, once its keeper has said so.
        is_gone: all of it has ended; the core may not have been told yet.
        reason: what else is known of its end.
        cause: why it ended, where that is known from the start.
    """

    slot: Slot
    start_timer: asyncio.Handle
    environment: tuple[tuple[str, str], ...] = ()
    sites: set[int] = field(default_factory=set)
    functions: set[int] = field(default_factory=set)
    end_timer: asyncio.TimerHandle | None = None
    status: int | None = None
    reason: str = ""
    cause: str = ""
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.program = program_of(self.environment)

    def cancel_timers(self) -> None:
        """Neither its start nor its end is waited for any more."""
        self.start_timer.cancel()
        if self.end_timer is not None:
            self.end_timer.cancel()

    def fail(self, error: Exception) -> None:
        """Note why it cannot be started."""
        told = stillbirth(error)
        self.reason, self.cause = told.reason, told.known

    def death(self, begun: int, autopsy: ExitEvidence) -> Death:
        """How it ended, with what the kernel has to say where it may have had a hand.

        Args:
            begun: number of the task that it had begun last.
            autopsy: asks the kernel.
        """
        findings = Findings()
        if is_kernels(self.status, self.cause):
            findings = autopsy.examine(self.pid)
        return Death(
            self.pid,
            self.status,
            tuple(text for _, text in self.slot.output.last),
            self.reason,
            begun,
            self.cause,
            findings,
        )

    def introduce(self, site: Site) -> list[Message]:
        """What the worker must hear before it can run a site; noted as heard."""
        messages: list[Message] = []
        if site.id in self.sites:
            return messages
        if len(self.sites) >= SITES_KEPT:
            messages.append(Forget())
            self.sites.clear()
            self.functions.clear()
        function = site.function
        payload = b"" if function.id in self.functions else function.payload
        resources = dict(site.resources)
        name, retried = site.spec.name, site.retried
        messages.append(Define(site.id, function.id, name, resources, payload, retried))
        self.sites.add(site.id)
        self.functions.add(function.id)
        return messages

    def unlearn(self, site: Site) -> None:
        """The worker may not have heard of a site: introduce it again."""
        self.sites.discard(site.id)
        self.functions.discard(site.function.id)


@dataclass(slots=True, eq=False)
class Slot:
    """One keeper and what belongs to it.

    Attributes:
        index: its place on the control page.
        zygote: the one that forks its keeper.
        keeper: its connection, None before the keeper has greeted and after.
        keeper_pid: its process id, 0 before it has greeted.
        worker: the worker that it keeps now.
    """

    index: int
    zygote: Zygote
    output: Output
    keeper: Peer | None = None
    keeper_pid: int = 0
    worker: LiveWorker | None = None

    @property
    def missing(self) -> int:
        """How many connections of it are still to come: its keeper's, its worker's."""
        has_peer = self.worker is not None and self.worker.peer is not None
        return (self.keeper is None) + (not has_peer)
