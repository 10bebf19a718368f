"""All zygotes of a node: one environment after the other, learnt modules, programs.

The plain zygote exists from the start. A zygote for another environment is started when
a task needs it, and ends when it has not been used for a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count
from typing import Final

from aiogpu.client.function_spec import Function
from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.runtime.output import Console
from aiogpu.runtime.workers.death import UnavailableError
from aiogpu.runtime.zygote.config import (
    Launched,
    Modules,
    ProgramEnvironment,
    ZygoteConfig,
    early_variables,
    program_of,
)
from aiogpu.runtime.zygote.generations import ZygoteGenerations, ZygoteListener
from aiogpu.runtime.zygote.learning import (
    NOT_CHEAP,
    REMEMBERED,
    Learning,
    cache_file,
)
from aiogpu.runtime.zygote.process import Zygote, ZygoteEvents
from aiogpu.wire.messages import Hello, Imported, Ready

_log: Final = logging.getLogger(__name__)


MUCH: Final = 5.0
"""Seconds of imports in tasks from which a program is told how to save them."""


MOST_OTHERS: Final = 4
"""Most other environments with a zygote, not counting joined programs."""


MOST_LEARNT: Final = 64
"""Most environments without a zygote of which is kept what they have learnt."""


UNUSED: Final = 60.0
"""Seconds after which the zygote of an environment without workers is ended."""


class Zygotes:
    """The zygotes of one node, by the environment that they are started with.

    Attributes:
        config: the configuration that all zygotes share.
        page: the control page.
        cgroup: the node's cgroup.
        plain: the zygotes for tasks without early variables.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        config: ZygoteConfig,
        launched: Launched,
        preload: Sequence[str],
        wants: Callable[[str], bool],
        pool: ZygoteListener,
    ) -> None:
        """Take over the first zygote, which was launched before.

        Args:
            loop: runs the timers.
            console: shows the output of zygotes.
            config: the configuration that all zygotes share.
            launched: the first plain zygote.
            preload: modules that each zygote imports before it forks.
            wants: returns True if an actor of a departed program lives on.
            pool: receives the events of zygotes.

        Raises:
            NodeStartError: the first zygote cannot be watched.
        """
        self._pool = pool
        self._wants = wants
        self._loop = loop
        self._console = console
        self._preload = tuple(preload)
        self.config = config
        self.page = ControlPage.open(config.page)
        self.cgroup = config.cgroup
        self._numbers = count()
        self._zygotes: dict[int, Zygote] = {}
        self._environments: dict[Environment, ZygoteGenerations] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._joined: dict[str, int] = {}
        self._late: dict[str, set[str]] = {}
        self._needed: set[str] = set()
        learning = Learning(self._preload)
        if config.learns:
            self._recall(learning)
        self._learnt: dict[Environment, Learning] = {}
        self.plain = self._add((), learning)
        try:
            self.plain.current.start(launched)
        except NodeStartError:
            self.page.close()
            raise
        self.plain.renew()

    def __repr__(self) -> str:
        count = len(self._environments)
        return f"<Zygotes {len(self._zygotes)} for {count} environments>"

    def choose(
        self, environment: Environment, function: Function | None = None
    ) -> Zygote:
        """Return the zygote for a new worker; it may not be ready yet.

        Args:
            environment: the variables of its tasks.
            function: the function that it will run first; None for a spare.

        Raises:
            UnavailableError: there is no zygote now; there may be one later.
            NodeError: there is no zygote, and there will be none.
        """
        report = self.plain.last_report or Ready((), (), ())
        early = early_variables(environment, report.modules, report.variables)
        generations = self._environments.get(early) or self._add_environment(early)
        needs: set[str] = set()
        if function is not None:
            needs = self._needs_of(function)
            self._needed |= needs
        zygote = generations.choose(needs)
        generations.used_at = self._loop.time()
        zygote.check()
        return zygote

    def _needs_of(self, function: Function) -> set[str]:
        """Return the modules that calls of a function import, as far as known."""
        if not self.config.learns:
            return set()
        needs = {*function.modules}
        if function.name in self._late:
            needs |= self._late[function.name]
        return needs

    def have_more(
        self, zygote: Zygote, imported: Container[str], function: Function
    ) -> bool:
        """Return True if new workers have modules that a worker has yet to import.

        Args:
            zygote: forked the worker.
            imported: what the worker has imported itself.
            function: the function that it would run.
        """
        missing = self._needs_of(function) - zygote.modules
        if not missing:
            return False
        missing = {name for name in missing if name not in imported}
        generations = self._environments.get(zygote.environment)
        return generations is not None and any(map(generations.offers, missing))

    def on_hello(self, peer: Peer, hello: Hello) -> Recipient | None:
        """Accept the connection of a zygote that has sent `Hello`."""
        zygote = self._zygotes.get(hello.id)
        if zygote is None:
            peer.abort()
            return None
        return zygote.on_hello(peer, hello)

    def note_imports(self, zygote: Zygote, imported: Imported) -> None:
        """Learn from the imports of a worker of this zygote."""
        if generations := self._environments.get(zygote.environment):
            generations.note_imports(imported)

    def note_slow_import(self, zygote: Zygote, module: str, function: str) -> None:
        """Learn from an import that a worker of this zygote has not ended yet.

        Args:
            zygote: forked the worker.
            module: the module.
            function: name of the function that imports it; "" if unknown.
        """
        generations = self._environments.get(zygote.environment)
        if generations is None:
            return
        if function:
            late = self._late
            if len(late) >= REMEMBERED:
                late.clear()
            late.setdefault(function, set()).add(module)
        generations.note_slow_import(module)

    def describe_imports(self, zygote: Zygote) -> str:
        """Describe what a zygote imports: "torch (1.2 of about 3 s)"; "" if nothing."""
        names = zygote.added or zygote.preload
        if not names:
            return ""
        took = self._loop.time() - zygote.started_at
        generations = self._environments.get(zygote.environment)
        costs = {} if generations is None else generations.learning.costs
        about = ""
        if costs.keys() >= set(names):
            about = f" of about {sum(costs[name] for name in names) / 1e6:.1f}"
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{rest} ({took:.1f}{about} s)"

    def expect(self, modules: Iterable[str], program: str = "") -> None:
        """Import modules that the functions of a program will probably need.

        Args:
            modules: the modules.
            program: the key of a joined program; "" for the node's own.
        """
        environment = ((PROGRAM, program),) if program else ()
        if self.config.learns and (found := self._environments.get(environment)):
            found.learning.want(modules)
            found.renew()

    async def close(self) -> None:
        """End all processes and wait; keepers must have been told to end first."""
        if self._timer is not None:
            self._timer.cancel()
        for generations in self._environments.values():
            generations.end()
        await asyncio.gather(*(zygote.close() for zygote in self._zygotes.values()))
        if self.config.learns:
            self._advise()
            await self._remember(self.plain.learning)
        self.page.close()
        self.config.close()

    def _recall(self, learning: Learning) -> None:
        """Begin with what an earlier run of the program has learnt."""
        file = cache_file()
        if file and os.path.exists(file):
            from aiogpu.runtime.zygote.import_cache import ImportCache

            cache = ImportCache(file)
            learning.want(cache.costs)
            learning.costs.update(cache.costs)
            self._late = cache.late

    async def _remember(self, learning: Learning) -> None:
        """Keep what this run has learnt for the next."""
        file = cache_file()
        costs = {
            name: learning.costs[name]
            for name in learning.modules
            if learning.costs.get(name, 0) >= NOT_CHEAP
        }
        if not file or not costs:
            return
        # Late: programs that import nothing slow need it never.
        from aiogpu.runtime.zygote.import_cache import ImportCache

        cache = ImportCache(file)
        await asyncio.to_thread(cache.save, costs, self._late, self._needed)

    def _advise(self) -> None:
        """Say which `preload` would have saved imports that have cost much."""
        total = sum(self.plain.learning.spent.values()) / 1e6
        if total >= MUCH:
            names = ", ".join(map(repr, self.plain.learning.dearest()))
            _log.warning(
                "tasks have spent %.0f s on importing modules; "
                'init(preload=(%s, "auto")) imports them once, at the start',
                total,
                names,
            )

    def _add(
        self, environment: Environment, learning: Learning, own: Sequence[str] = ()
    ) -> ZygoteGenerations:
        generations = self._environments[environment] = ZygoteGenerations(
            loop=self._loop,
            make=self._make,
            pool=self._pool,
            environment=environment,
            preload=(*self._preload, *own),
            learning=learning,
        )
        return generations

    def _make(
        self,
        environment: Environment,
        modules: Modules,
        events: ZygoteEvents,
        parent: Zygote | None,
    ) -> Zygote:
        number = next(self._numbers)
        zygote = Zygote(
            self._loop,
            self._console,
            self.config,
            number,
            environment,
            modules,
            events,
            self._pool.on_lost_slot,
            parent,
        )
        zygotes = self._zygotes.items()
        self._zygotes = {key: old for key, old in zygotes if not old.is_over}
        self._zygotes[number] = zygote
        return zygote

    # Other environments

    def _add_environment(self, environment: Environment) -> ZygoteGenerations:
        """Add an environment.

        Raises:
            NodeStartError: the environment belongs to a program that has left.
        """
        others = [each for each in self._others() if not self._is_joined(each)]
        if len(others) >= MOST_OTHERS:
            self._give_up(min(others, key=lambda each: each.used_at))
        key = program_of(environment)
        program = self.config.programs.get(key)
        if key and program is None:
            raise NodeStartError("the program of this worker has left the node")
        own = () if program is None else program.preload
        learning = self._learnt.pop(environment, None)
        if learning is None:
            learning = Learning((*self._preload, *own))
            learning.want(self.plain.learning.modules)
            learning.costs.update(self.plain.learning.costs)
        generations = self._add(environment, learning, own)
        if self._timer is None:
            self._timer = self._loop.call_later(UNUSED, self._give_up_unused)
        return generations

    def _others(self) -> list[ZygoteGenerations]:
        return [each for each in self._environments.values() if each is not self.plain]

    def _give_up_unused(self) -> None:
        """End environments that are unused for `UNUSED` seconds; check again later."""
        self._timer = None
        now = self._loop.time()
        for each in self._others():
            if self._pool.is_busy(each.current) or self._is_joined(each):
                each.used_at = now
            elif now - each.used_at >= UNUSED:
                self._give_up(each)
        earliest = min((each.used_at for each in self._others()), default=None)
        if earliest is not None:
            self._timer = self._loop.call_at(earliest + UNUSED, self._give_up_unused)

    def _give_up(self, generations: ZygoteGenerations) -> None:
        del self._environments[generations.environment]
        # The program may come again.
        self._learnt[generations.environment] = generations.learning
        if len(self._learnt) > MOST_LEARNT:
            del self._learnt[next(iter(self._learnt))]
        self._forget_programs()
        generations.end()
        # Not at once: the core may be handling an event.
        self._loop.call_soon(self._pool.on_superseded, generations.current)

    # Programs that have joined

    def join(self, key: str, program: ProgramEnvironment) -> None:
        """Count one more client with this program."""
        self.config.programs.setdefault(key, program)
        self._joined[key] = self._joined.get(key, 0) + 1

    async def joined(self, key: str) -> None:
        """Wait until the first zygote of a joined program can fork.

        If this zygote has died since, the program may join; its tasks wait for the
        next zygote.

        Raises:
            PreloadError: a module to preload cannot be imported.
            NodeError: there is no zygote for the program.
        """
        environment = ((PROGRAM, key),)
        generations = self._environments.get(environment)
        if generations is not None and generations.last_report is not None:
            return
        try:
            self.choose(environment)
        except UnavailableError as error:
            raise NodeStartError(*error.args) from error
        await self._environments[environment].ready()

    def leave(self, key: str) -> None:
        """Count one client less with this program."""
        self._joined[key] -= 1
        if self._joined[key]:
            return
        del self._joined[key]
        generations = self._environments.get(((PROGRAM, key),))
        if generations is not None and generations.problem is not None:
            # The user may fix the problem before the program joins again.
            self._give_up(generations)
        self._forget_programs()

    def _is_joined(self, generations: ZygoteGenerations) -> bool:
        return program_of(generations.environment) in self._joined

    def _forget_programs(self) -> None:
        """Forget programs that need no workers any more."""
        served = {program_of(environment) for environment in self._environments}
        for key in self.config.programs.keys() - served - self._joined.keys():
            if not self._wants(key):
                del self.config.programs[key]
