"""All zygotes of a node: which one serves a task's environment.

The plain one is there from the start. One for an environment of its own is started
when a task wants it, and ends when it was not wanted for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.console import Console
from aiogpu.runtime.crowd import UnavailableError
from aiogpu.runtime.early import early_variables
from aiogpu.runtime.launch import Launched
from aiogpu.runtime.lineage import Lineage
from aiogpu.runtime.program import Program, program_of
from aiogpu.runtime.surroundings import Surroundings
from aiogpu.runtime.transport import Peer
from aiogpu.runtime.zygote import Zygote
from aiogpu.wire.messages import Hello, Imported

MOST_OTHERS: Final = 4
"""Environments of their own that have a zygote, beside the plain one and those of the
programs that have joined."""
UNUSED: Final = 60.0
"""Seconds after which an environment of its own that no worker has is given up."""


class Zygotes:
    """The zygotes of one node, by the environment that they are started with.

    Attributes:
        page: the control page, which they all share.
        cgroup: the node's.
        on_lost_slot: told of a slot whose keeper has died, with all below it, or
            was not forked, and then why.
        on_death: told of a zygote that has died; keepers that have not come from it
            must be asked for again, unless it has a problem.
        on_superseded: told of a zygote in whose place another serves.
        is_busy: says whether a zygote has workers that have work.
        wants: says whether something of a program lives that has gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        surroundings: Surroundings,
        preload: Sequence[str],
    ) -> None:
        self.on_lost_slot: Callable[[int, str], None]
        self.on_death: Callable[[Zygote], None]
        self.on_superseded: Callable[[Zygote], None]
        self.is_busy: Callable[[Zygote], bool]
        self.wants: Callable[[str], bool] = _nobody
        self._loop = loop
        self._console = console
        self._preload = tuple(preload)
        self._surroundings = surroundings
        self.page = ControlPage.open(surroundings.page)
        self.cgroup = surroundings.cgroup
        self._generations = count()
        self._zygotes: dict[int, Zygote] = {}
        self._lineages: dict[Environment, Lineage] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._joined: dict[str, int] = {}
        self.plain = self._add(())

    def __repr__(self) -> str:
        return f"<Zygotes {len(self._zygotes)} for {len(self._lineages)} environments>"

    def start(self, launched: Launched) -> None:
        """Listen to the plain one, which is on its way."""
        self.plain.start(launched)

    @property
    def are_ready(self) -> bool:
        """Whether the plain one may be asked to fork, as far as was read."""
        return self.plain.current.ready is not None

    async def ready(self) -> None:
        """Wait until the plain one may be asked to fork; see `Lineage.ready`."""
        await self.plain.ready()

    def serving(self, environment: Environment) -> Zygote:
        """The zygote for tasks with these variables; it may not be ready yet.

        Raises:
            UnavailableError: there is none now; there may be one later.
            NodeError: there is none, and will be none.
        """
        said = self.plain.said
        early = early_variables(environment, said.modules, said.variables)
        lineage = self._lineages.get(early) or self._begin(early)
        zygote = lineage.serving()
        lineage.used_at = self._loop.time()
        zygote.check()
        return zygote

    def greeted(self, peer: Peer, hello: Hello) -> None:
        """Take over the connection of a zygote that has greeted."""
        zygote = self._zygotes.get(hello.id)
        if zygote is None:
            peer.abort()
        else:
            zygote.greeted(peer)

    def hear(self, zygote: Zygote, imported: Imported) -> None:
        """Learn from what a worker of this zygote has imported."""
        lineage = self._lineages.get(zygote.environment)
        if lineage is not None:
            lineage.hear(imported)

    @property
    def page_descriptor(self) -> int:
        """Descriptor of the control page."""
        return self._surroundings.page

    async def close(self) -> None:
        """End all processes and wait; keepers must have been told before."""
        if self._timer is not None:
            self._timer.cancel()
        for lineage in self._lineages.values():
            lineage.end()
        closing = [zygote.close() for zygote in self._zygotes.values()]
        await asyncio.gather(*closing)
        self.page.close()
        self._surroundings.close()

    def _add(
        self,
        environment: Environment,
        learnt: tuple[str, ...] = (),
        own: Sequence[str] = (),
    ) -> Lineage:
        preload = (*self._preload, *own)
        lineage = Lineage(self._loop, self._make, environment, preload, learnt)
        lineage.on_death = self._on_death
        lineage.on_superseded = self._on_superseded
        self._lineages[environment] = lineage
        return lineage

    def _begin(self, environment: Environment) -> Lineage:
        """Note one more environment that needs a zygote.

        Raises:
            NodeStartError: it is that of a program that has left, and is forgotten.
        """
        others = [each for each in self._others() if not self._is_joined(each)]
        if len(others) >= MOST_OTHERS:
            self._give_up(min(others, key=lambda lineage: lineage.used_at))
        learning = self.plain.learning
        learnt = (name for name in learning.modules if name in learning.proven)
        key = program_of(environment)
        program = self._surroundings.programs.get(key)
        if key and program is None:
            raise NodeStartError("the program for which it was to be has left the node")
        own = () if program is None else program.preload
        lineage = self._add(environment, tuple(learnt), own)
        if self._timer is None:
            self._timer = self._loop.call_later(UNUSED, self._give_up_unused)
        return lineage

    def _give_up_unused(self) -> None:
        """Give up what nobody wanted for long; ring again while there is any."""
        self._timer = None
        now = self._loop.time()
        for lineage in self._others():
            if self.is_busy(lineage.current) or self._is_joined(lineage):
                lineage.used_at = now
            elif now - lineage.used_at >= UNUSED:
                self._give_up(lineage)
        earliest = min((each.used_at for each in self._others()), default=None)
        if earliest is not None:
            self._timer = self._loop.call_at(earliest + UNUSED, self._give_up_unused)

    def join(self, key: str, program: Program) -> None:
        """A client of that program has come."""
        self._surroundings.programs.setdefault(key, program)
        self._joined[key] = self._joined.get(key, 0) + 1

    async def joined(self, key: str) -> None:
        """Wait until the first zygote of a program that has joined can be forked.

        If that has died since, the program may join; its tasks wait for another one.

        Raises:
            PreloadError: a module that it preloads cannot be imported.
            NodeError: there is no zygote for it.
        """
        environment = ((PROGRAM, key),)
        lineage = self._lineages.get(environment)
        if lineage is not None and lineage.has_served:
            return
        try:
            self.serving(environment)
        except UnavailableError as error:
            raise NodeStartError(*error.args) from error
        await self._lineages[environment].ready()

    def leave(self, key: str) -> None:
        """A client of that program has gone."""
        self._joined[key] -= 1
        if self._joined[key]:
            return
        del self._joined[key]
        lineage = self._lineages.get(((PROGRAM, key),))
        if lineage is not None and lineage.problem is not None:
            # Whoever comes next may have mended what was wrong.
            self._give_up(lineage)
        self._forget_programs()

    def _is_joined(self, lineage: Lineage) -> bool:
        return program_of(lineage.environment) in self._joined

    def _others(self) -> list[Lineage]:
        return [each for each in self._lineages.values() if each is not self.plain]

    def _forget_programs(self) -> None:
        """Forget those of which nobody will start a worker again."""
        programs = self._surroundings.programs
        served = {program_of(environment) for environment in self._lineages}
        for key in [key for key in programs if key not in served | self._joined.keys()]:
            if not self.wants(key):
                del programs[key]

    def _give_up(self, lineage: Lineage) -> None:
        del self._lineages[lineage.environment]
        self._forget_programs()
        lineage.end()
        # Later, not now: the core may be speaking, and will be asked again.
        self._loop.call_soon(self._on_superseded, lineage.current)

    def _make(self, environment: Environment) -> Zygote:
        zygote = Zygote(
            self._loop,
            self._console,
            self._surroundings,
            next(self._generations),
            environment,
        )
        zygote.on_lost_slot = self._on_lost_slot
        self._zygotes = {
            number: each for number, each in self._zygotes.items() if not each.is_over
        }
        self._zygotes[zygote.generation] = zygote
        return zygote

    # Whoever listens comes later than the plain one is made.

    def _on_lost_slot(self, slot: int, unforked: str) -> None:
        self.on_lost_slot(slot, unforked)

    def _on_death(self, zygote: Zygote) -> None:
        self.on_death(zygote)

    def _on_superseded(self, zygote: Zygote) -> None:
        self.on_superseded(zygote)


def _nobody(_program: str) -> bool:
    """No program can join, and none has left anything."""
    return False
