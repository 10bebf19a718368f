"""All zygotes of a node: one for each environment, replaced as it dies or learns.

The plain zygote is there from the start. One for another environment is started when a
task wants it, and ends when it was not wanted for a while.

A generation that has died is followed by another at once, a few times in a short while
at most. After that the next one is started when a worker is wanted, and whoever wants
one is told that it cannot be had now: the core waits longer and longer between two
tries. Only an environment that has never served, and whose interpreter fails by itself,
is broken: its tasks fail, and say why.

Workers say what they have imported and what it cost. The next generation imports a
module before it forks if the import was expensive once, or not cheap in two workers; a
module that was found unfit never is. While the new generation imports, the old one
serves, and ends when its last worker has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final, Protocol

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.workers.death import UnavailableError, is_scarcity
from aiogpu.runtime.zygote.launch import (
    Launched,
    Modules,
    Program,
    ZygoteConfig,
    early_variables,
    program_of,
)
from aiogpu.runtime.zygote.process import IMPORT_LIMIT, Zygote, ZygoteEvents
from aiogpu.wire.messages import Hello, Imported, LeftOut, Message, Ready, Stale, Unfit

DEAR: Final = 50_000
"""Microseconds of an import that is learnt when it is seen once."""


NOT_CHEAP: Final = 5_000
"""Microseconds of an import that is learnt when a second worker pays them too."""


MOST: Final = 64
"""Modules that are learnt for one environment."""


REMEMBERED: Final = 1024
"""Modules that were seen once and are remembered."""


DEVICE_MODULES: Final = frozenset(
    {
        "bitsandbytes",
        "cupy",
        "deepspeed",
        "flash_attn",
        "numba.cuda",
        "pycuda",
        "tensorrt",
        "triton",
        "vllm",
        "xformers",
    }
)
"""What looks for devices when it is imported, and remembers what it has found: in a
zygote, which has none, it would find none."""


class Learning:
    """What is known of the modules that workers of one environment import.

    Attributes:
        modules: those that a zygote is to import, in the order to import them.
        proven: those of them that a zygote has imported and stayed fit.
        left_out: those that are unfit, and why.
    """

    def __init__(self, explicit: Iterable[str], learnt: Sequence[str] = ()) -> None:
        self.modules: list[str] = list(learnt)
        self.proven: set[str] = set(learnt)
        self.left_out: dict[str, str] = {}
        self._explicit = frozenset(explicit)
        self._seen: set[str] = set()

    def hear(self, names: Sequence[str], microseconds: Sequence[int]) -> bool:
        """Note what one worker has imported; True if a module is newly learnt.

        A worker imports a module once, so each report is another worker's.
        """
        count = len(self.modules)
        for name, cost in zip(names, microseconds, strict=False):
            if cost < NOT_CHEAP or not self._may_learn(name):
                continue
            if cost >= DEAR or name in self._seen:
                self._seen.discard(name)
                self.modules.append(name)
            elif len(self._seen) < REMEMBERED:
                self._seen.add(name)
        return len(self.modules) > count

    def _may_learn(self, name: str) -> bool:
        return (
            len(self.modules) < MOST
            and name not in self._explicit
            and name not in self.modules
            and name not in self.left_out
            and not sees_devices(name)
        )

    def prove(self, modules: Iterable[str]) -> None:
        """A zygote has these, but for those left out, and may be forked."""
        self.proven.update(set(modules) & set(self.modules))

    def leave_out(self, module: str, reason: str) -> None:
        """It is unfit: no zygote imports it any more."""
        self.left_out[module] = reason
        self.proven.discard(module)
        if module in self.modules:
            self.modules.remove(module)


def sees_devices(module: str) -> bool:
    """Return whether importing this module would look for devices."""
    return any(f"{module}.".startswith(f"{name}.") for name in DEVICE_MODULES)


_log: Final = logging.getLogger(__name__)


DEBOUNCE: Final = 0.2
"""Seconds for which what is learnt is gathered before a generation is started."""


INTENSITY: Final = 3


PERIOD: Final = 10.0
"""At most `INTENSITY` restarts at once in `PERIOD` seconds."""


FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM, os.EX_TEMPFAIL)
"""Statuses of a zygote whose end is no fault of its environment: somebody has killed
it, or it says itself that descriptors, processes or memory ran out."""


class ZygoteListener(Protocol):
    """Is told what becomes of zygotes, and has workers of them: the pool."""

    def on_lost_slot(self, index: int, unforked: str = "") -> None:
        """A slot's keeper has died, with all below it, or was not forked, and why."""

    def on_zygote_death(self, zygote: Zygote) -> None:
        """One has died unasked; what follows is there.

        Keepers that have not come from it must be asked for again, unless it has a
        problem.
        """

    def on_superseded(self, zygote: Zygote) -> None:
        """Another serves in the place of this one."""

    def is_busy(self, zygote: Zygote) -> bool:
        """Return whether it has workers that have work."""


Make = Callable[[Environment, Modules, ZygoteEvents], Zygote]
"""Makes a zygote."""


class ZygoteGenerations:
    """All generations of zygotes of one environment, one after the other.

    Attributes:
        environment: variables that they are exec'd with.
        current: the one that serves, or is the first to do so.
        problem: why it is broken, None unless it is.
        said: what the zygote that served last has said of itself, empty before one has.
        has_served: whether a generation could be forked, now or before.
        learning: what the next one will import.
        used_at: when a worker was wanted of it last, on the loop's clock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Make,
        pool: ZygoteListener,
        environment: Environment,
        preload: tuple[str, ...],
        learnt: tuple[str, ...] = (),
    ) -> None:
        self.environment = environment
        self.problem: NodeStartError | None = None
        self.learning = Learning(preload, learnt)
        self.used_at = loop.time()
        self._loop = loop
        self._make = make
        self._pool = pool
        self._preload = list(preload)
        self._next: Zygote | None = None
        self._is_wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = False
        self._restarts: deque[float] = deque()
        self._is_started = False
        self._is_failing = False
        self.has_served = False
        self.said = Ready((), ())
        # Ends with None, or with why the first generation has ended before.
        self._ready: asyncio.Future[NodeStartError | None] = loop.create_future()
        self.current = self._make_zygote()

    def __repr__(self) -> str:
        return f"<ZygoteGenerations {self.current!r}, next {self._next!r}>"

    def start(self, launched: Launched | None = None) -> None:
        """Start the first generation, or listen to it; see `Zygote.start`."""
        self.current.start(launched)
        self._is_started = True

    def serving(self) -> Zygote:
        """The zygote to fork the next worker from; it is started unless it lives.

        Raises:
            PreloadError: a module to preload cannot be imported.
            UnavailableError: there is none now; there may be one later.
            NodeStartError: there is none, and another try would not help.
        """
        if self.problem is not None:
            raise renewed(self.problem)
        if self.current.is_over:
            self.current, self._is_started = self._make_zygote(), False
        if not self._is_started:
            if self._ready.done() and not self.has_served:
                self._ready = self._loop.create_future()
            try:
                self.start()
            except NodeStartError as error:
                if not self.has_served and not is_scarcity(error.__cause__):
                    self.problem = renewed(error)
                    raise
                self._note_failing(str(error))
                raise UnavailableError(str(error)) from error
        return self.current

    async def ready(self) -> None:
        """Wait until the first generation may be asked to fork.

        Raises:
            PreloadError: a module to preload cannot be imported.
            NodeStartError: the process ended before.
        """
        problem = await asyncio.shield(self._ready)
        if problem is not None:
            raise renewed(problem)

    def hear(self, imported: Imported) -> None:
        """Learn from what a worker has imported."""
        if self.learning.hear(imported.names, imported.microseconds):
            self._renew_soon()

    def end(self) -> None:
        """Start nothing more; let the zygotes end as their workers do."""
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next is not None:
            self._next.end()
        self.current.retire()

    def _make_zygote(self) -> Zygote:
        learnt, proven = self.learning.modules, sorted(self.learning.proven)
        modules = Modules(tuple(self._preload), tuple(learnt), tuple(proven))
        return self._make(self.environment, modules, self)

    def _renew_soon(self) -> None:
        if self._timer is None and not self._is_ended:
            self._timer = self._loop.call_later(DEBOUNCE, self._renew)

    def _renew(self) -> None:
        """Start a generation to follow the one that serves."""
        self._timer = None
        if self._next is not None or self.current.ready is None:
            self._is_wanted = True
            return
        self._is_wanted = False
        follower = self._make_zygote()
        try:
            follower.start()
        except NodeStartError as error:
            _log.warning("! what was learnt is not preloaded: %s", error)
        else:
            self._next = follower

    def on_ready(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        self.learning.prove(zygote.learnt)
        if self._is_failing:
            _log.warning("workers can be started again: zygote %d", zygote.generation)
        self.has_served, self._is_failing = True, False
        if zygote.ready is not None:
            self.said = zygote.ready
        if zygote is self._next:
            self._next = None
            self._follow(zygote)
        elif not self._ready.done():
            self._ready.set_result(None)
        if self._is_wanted:
            self._renew_soon()

    def _follow(self, zygote: Zygote) -> None:
        """Let it serve in the place of the old one, if there is anything in it."""
        old = self.current
        gained = set(zygote.learnt) - set(old.learnt) - set(self.learning.left_out)
        is_sound = old.ready is not None and not old.is_stale and not old.is_over
        if is_sound and not gained:
            zygote.end()
            return
        self.current = zygote
        _log.debug("zygote %d follows %d", zygote.generation, old.generation)
        old.retire()
        self._pool.on_superseded(old)

    def on_message(self, zygote: Zygote, message: Message) -> None:
        """See `ZygoteEvents`."""
        if isinstance(message, LeftOut):
            self._leave_out(message.module, message.reason)
        elif isinstance(message, Stale) and zygote is self.current:
            _log.info("%s was edited; another zygote imports it anew", message.module)
            zygote.is_stale = True
            self._renew_soon()

    def _leave_out(self, module: str, reason: str) -> None:
        if module in self.learning.left_out:
            return
        self.learning.leave_out(module, reason)
        _log.warning(
            "! %s is not preloaded: %s; workers import it themselves", module, reason
        )

    def on_end(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        if zygote is self._next:
            self._next = None
            if not zygote.is_closing:
                self._on_stillborn(zygote)
        elif not zygote.is_closing:
            if zygote is self.current and not self._is_ended:
                self._succeed(zygote)
            self._pool.on_zygote_death(zygote)

    def _on_stillborn(self, zygote: Zygote) -> None:
        """A generation has ended before it could serve; the old one serves on."""
        unfit = zygote.unfit
        if unfit is None:  # no module can be blamed: do without all that it adds
            _log.warning(
                "! a zygote ended with status %d while it imported; the one before "
                "serves on",
                zygote.status,
            )
            learnt = set(zygote.learnt) - set(self.current.learnt)
            self._leave_out_all(learnt, zygote)
        elif unfit.module in self.learning.modules:
            self._leave_out(unfit.module, unfit.reason)
            self._is_wanted = True
        else:
            _log.warning(
                "! %s cannot be imported anew: %s; workers go on with what was "
                "imported before",
                unfit.module,
                unfit.reason,
            )
        if self._is_wanted:
            self._renew_soon()

    def _leave_out_all(self, modules: Iterable[str], zygote: Zygote) -> None:
        reason = f"the zygote that imported it ended with status {zygote.status}"
        for module in sorted(modules):
            self._leave_out(module, reason)

    def _succeed(self, zygote: Zygote) -> None:
        """Put another in the place of the one that has died, if that may help."""
        problem: NodeStartError | None = None
        is_from_outside = False
        if zygote.unfit is not None:
            problem = self._do_without(zygote.unfit)
        elif zygote.ready is None and zygote.learnt:
            self._leave_out_all(zygote.learnt, zygote)
        elif zygote.is_late:
            named = ", ".join(map(repr, zygote.preload)) or "nothing"
            problem = PreloadError(
                f"init(preload=...) names {named}, and the imports did not end within "
                f"{IMPORT_LIMIT:g} s for each. Leave out the one that waits for "
                f"something."
            )
        elif self.has_served and not self._is_failing and self._may_restart():
            status = zygote.status
            _log.warning("! the zygote ended with status %d; starting another", status)
        else:
            said = "".join(f"\n  {line}" for line in zygote.last)
            text = f"the zygote ended with status {zygote.status}:{said}"
            problem = NodeStartError(text)
            is_from_outside = zygote.status in FROM_OUTSIDE
        if problem is None:
            self._start_again(zygote)
        elif self.has_served or is_from_outside:
            # In one line, which is shown wherever a task waits.
            first, *words = str(problem).splitlines()
            last = f" {words[-1].strip()}" if words else ""
            self._fail(zygote, UnavailableError(f"{first}{last}".rstrip(":")))
        else:
            self._fail(zygote, problem)

    def _do_without(self, unfit: Unfit) -> NodeStartError | None:
        """Have the next one not import a module; gives the problem if it must."""
        if unfit.module in self.learning.modules:
            self._leave_out(unfit.module, unfit.reason)
        elif unfit.module not in self._preload:
            return NodeStartError(
                f"a bare interpreter cannot be forked here: {unfit.reason}. Look what "
                f"it runs when it starts (sitecustomize, a debugger, a profiler)."
            )
        elif unfit.is_missing:
            return PreloadError(
                f"init(preload=...) names {unfit.module!r}, which cannot be imported: "
                f"{unfit.reason.rstrip('.')}. Install it, or leave it out."
            )
        else:
            _log.warning(
                "! %s is not preloaded: %s, and a process that does so cannot be "
                "forked safely; workers import it themselves",
                unfit.module,
                unfit.reason,
            )
            self._preload.remove(unfit.module)
        return None

    def _start_again(self, zygote: Zygote) -> None:
        try:
            self.serving()
        except NodeStartError as error:
            self._fail(zygote, error)

    def _may_restart(self) -> bool:
        now = self._loop.time()
        while self._restarts and self._restarts[0] < now - PERIOD:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= INTENSITY

    def _fail(self, zygote: Zygote, problem: NodeStartError) -> None:
        """None follows a zygote now or, unless that may help, ever."""
        zygote.problem = problem
        if not isinstance(problem, UnavailableError):
            self.problem = problem
        else:
            self._note_failing(str(problem))
        if not self._ready.done():
            self._ready.set_result(problem)

    def _note_failing(self, reason: str) -> None:
        """Say once that no worker can be started; the next that starts is told, too."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "! no worker can be started: %s. Tasks wait in the queue, and it is "
                "tried again for them",
                reason,
            )


def renewed(problem: NodeStartError) -> NodeStartError:
    """The same error without a traceback: one that is raised again keeps all frames."""
    kind = NodeStartError if isinstance(problem, UnavailableError) else type(problem)
    return kind(*problem.args)


MOST_OTHERS: Final = 4
"""Environments of their own that have a zygote, beside the plain one and those of the
programs that have joined."""


UNUSED: Final = 60.0
"""Seconds after which an environment of its own that no worker has is given up."""


class Zygotes:
    """The zygotes of one node, by the environment that they are started with.

    Attributes:
        config: what they all share.
        page: the control page.
        cgroup: the node's.
        plain: those of most tasks, from `start` on.
        wants: says whether something of a program lives that has gone; None where no
            program can join.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        config: ZygoteConfig,
        preload: Sequence[str],
    ) -> None:
        self._pool: ZygoteListener
        self.wants: Callable[[str], bool] | None = None
        self._loop = loop
        self._console = console
        self._preload = tuple(preload)
        self.config = config
        self.page = ControlPage.open(config.page)
        self.cgroup = config.cgroup
        self._generations = count()
        self._zygotes: dict[int, Zygote] = {}
        self._lineages: dict[Environment, ZygoteGenerations] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._joined: dict[str, int] = {}
        self.plain: ZygoteGenerations

    def __repr__(self) -> str:
        return f"<Zygotes {len(self._zygotes)} for {len(self._lineages)} environments>"

    def start(self, launched: Launched, pool: ZygoteListener) -> None:
        """Listen to the plain one, which is on its way; the pool is told."""
        self._pool = pool
        self.plain = self._add(())
        self.plain.start(launched)

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
        if lineage := self._lineages.get(zygote.environment):
            lineage.hear(imported)

    async def close(self) -> None:
        """End all processes and wait; keepers must have been told before."""
        if self._timer is not None:
            self._timer.cancel()
        for lineage in self._lineages.values():
            lineage.end()
        closing = [zygote.close() for zygote in self._zygotes.values()]
        await asyncio.gather(*closing)
        self.page.close()
        self.config.close()

    def _add(
        self,
        environment: Environment,
        learnt: tuple[str, ...] = (),
        own: Sequence[str] = (),
    ) -> ZygoteGenerations:
        preload = (*self._preload, *own)
        lineage = self._lineages[environment] = ZygoteGenerations(
            self._loop, self._make, self._pool, environment, preload, learnt
        )
        return lineage

    def _begin(self, environment: Environment) -> ZygoteGenerations:
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
        program = self.config.programs.get(key)
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
            if self._pool.is_busy(lineage.current) or self._is_joined(lineage):
                lineage.used_at = now
            elif now - lineage.used_at >= UNUSED:
                self._give_up(lineage)
        earliest = min((each.used_at for each in self._others()), default=None)
        if earliest is not None:
            self._timer = self._loop.call_at(earliest + UNUSED, self._give_up_unused)

    def join(self, key: str, program: Program) -> None:
        """A client of that program has come."""
        self.config.programs.setdefault(key, program)
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

    def _is_joined(self, lineage: ZygoteGenerations) -> bool:
        return program_of(lineage.environment) in self._joined

    def _others(self) -> list[ZygoteGenerations]:
        return [each for each in self._lineages.values() if each is not self.plain]

    def _forget_programs(self) -> None:
        """Forget those of which nobody will start a worker again."""
        programs = self.config.programs
        served = {program_of(environment) for environment in self._lineages}
        for key in [key for key in programs if key not in served | self._joined.keys()]:
            if self.wants is None or not self.wants(key):
                del programs[key]

    def _give_up(self, lineage: ZygoteGenerations) -> None:
        del self._lineages[lineage.environment]
        self._forget_programs()
        lineage.end()
        # Later, not now: the core may be speaking, and will be asked again.
        self._loop.call_soon(self._pool.on_superseded, lineage.current)

    def _make(
        self, environment: Environment, modules: Modules, events: ZygoteEvents
    ) -> Zygote:
        zygote = Zygote(
            self._loop,
            self._console,
            self.config,
            next(self._generations),
            environment,
            modules,
            events,
            self._pool.on_lost_slot,
        )
        self._zygotes = {
            number: each for number, each in self._zygotes.items() if not each.is_over
        }
        self._zygotes[zygote.generation] = zygote
        return zygote
