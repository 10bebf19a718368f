"""All zygotes of a node: one per environment, replaced after a death or new modules.

The plain zygote exists from the start. A zygote for another environment is started when
a task needs it, and ends when it has not been used for a while. New modules are
imported by a branch of the serving zygote, which serves meanwhile; it ends with its
last worker and branch.

Tasks that need modules which a branch is importing wait for the branch: they would have
to import the same modules, all at once, each in its own process. The first of them does
not wait (see `ZygoteGenerations.choose`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Final, Protocol

from aiogpu.client.function_spec import Function
from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.runtime.output import Console
from aiogpu.runtime.workers.death import UnavailableError, is_scarcity
from aiogpu.runtime.zygote.config import (
    Launched,
    Modules,
    Program,
    ZygoteConfig,
    early_variables,
    is_script,
    program_of,
)
from aiogpu.runtime.zygote.import_cache import ImportCache
from aiogpu.runtime.zygote.process import IMPORT_LIMIT, Zygote, ZygoteEvents
from aiogpu.wire.messages import Hello, Imported, Message, Ready, Stale, Unfit

DEAR: Final = 50_000
"""A module is learnt at once if its import takes at least this many microseconds."""


NOT_CHEAP: Final = 5_000
"""A module is learnt if its import takes at least this many microseconds twice."""


MOST: Final = 64
"""Most modules learnt for one environment."""


LARGEST_PART: Final = 8
"""A zygote that uses more than this part of the machine's memory learns no more. Its
forks share the memory until they write to it."""


REMEMBERED: Final = 1024
"""Most modules remembered after one slow import."""


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
"""Modules that look for devices at import and remember the result. In a zygote, which
sees no devices, they would find none."""


class Learning:
    """The modules that the zygotes of an environment should import.

    A module is learnt if a function names it, or from the imports of workers: if its
    import was slow once, or not fast in two workers.

    Attributes:
        modules: the modules, in the order in which they are imported.
        left_out: unfit modules, each with the reason.
        costs: how long imports have taken, in microseconds.
        is_full: the zygotes use so much memory that nothing more is learnt.
        spent: how long workers have spent on slow imports, in microseconds.
    """

    def __init__(self, explicit: Iterable[str], learnt: Sequence[str] = ()) -> None:
        self.modules: list[str] = list(learnt)
        self.left_out: dict[str, str] = {}
        self.costs: dict[str, int] = {}
        self.spent: dict[str, int] = {}
        self.is_full = False
        self._explicit = frozenset(explicit)
        self._seen: set[str] = set()

    def note(self, names: Sequence[str], microseconds: Sequence[int]) -> bool:
        """Note the imports of one worker; return True if a module was learnt.

        A worker imports a module once, so each report comes from another worker.
        """
        count = len(self.modules)
        for name, cost in zip(names, microseconds, strict=False):
            self.costs[name] = cost
            if cost >= DEAR and not sees_devices(name):
                self.spent[name] = self.spent.get(name, 0) + cost
            if cost < NOT_CHEAP or not self.may_learn(name):
                continue
            if cost >= DEAR or name in self._seen:
                self._seen.discard(name)
                self.modules.append(name)
            elif len(self._seen) < REMEMBERED:
                self._seen.add(name)
        return len(self.modules) > count

    def want(self, names: Iterable[str]) -> list[str]:
        """Learn modules that a function needs; return those that may be learnt."""
        wanted = []
        for name in names:
            if name not in self.modules and self.may_learn(name):
                self.modules.append(name)
            if name in self.modules:
                wanted.append(name)
        return wanted

    def may_learn(self, name: str) -> bool:
        """Return True if a zygote may try to import a module that is not learnt yet."""
        return (
            len(self.modules) < MOST
            and not self.is_full
            and name not in self._explicit
            and name not in self.modules
            and name not in self.left_out
            and not sees_devices(name)
        )

    def leave_out(self, module: str, reason: str) -> None:
        """Note that a module is unfit: no zygote imports it from now on."""
        self.left_out[module] = reason
        if module in self.modules:
            self.modules.remove(module)


def sees_devices(module: str) -> bool:
    """Return True if importing the module would look for devices."""
    return any(f"{module}.".startswith(f"{name}.") for name in DEVICE_MODULES)


_log: Final = logging.getLogger(__name__)


MUCH: Final = 5.0
"""Seconds of imports in tasks from which a program is told how to save them."""


DEBOUNCE: Final = 0.2
"""Seconds for which learnt modules are collected before a zygote is started."""


HELD: Final = 0.2
"""The part of a zygote's imports for which workers wait for it further: its learner may
now import what the others would import as well."""


DEEPEST: Final = 6
"""Most zygotes from which a branch descends: each is a process that stays."""


INTENSITY: Final = 3


PERIOD: Final = 10.0
"""At most `INTENSITY` immediate restarts within `PERIOD` seconds."""


FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM, os.EX_TEMPFAIL)
"""Exit statuses of a zygote that are not the fault of its environment: a signal from
another process, or a lack of descriptors, processes or memory."""


class ZygoteListener(Protocol):
    """The receiver of zygotes' events and owner of their workers: the pool."""

    def on_lost_slot(self, index: int, unforked: str = "") -> None:
        """Handle that a slot's keeper has died or could not be forked, and why."""

    def on_zygote_death(self, zygote: Zygote) -> None:
        """Handle that a zygote has ended unexpectedly, or before it served.

        The keepers that it has not forked must be requested again, unless the zygote
        has a `problem`.
        """

    def on_superseded(self, zygote: Zygote) -> None:
        """Handle that another zygote has replaced this zygote."""

    def on_better_zygote(self, zygote: Zygote) -> None:
        """Handle that a zygote with more modules is coming, after this zygote."""

    def is_busy(self, zygote: Zygote) -> bool:
        """Return True if the zygote has workers with work."""


Make = Callable[[Environment, Modules, ZygoteEvents, Zygote | None], Zygote]
"""Makes a zygote."""


class ZygoteGenerations:
    """The successive zygotes of one environment.

    A zygote that dies is replaced at once, but only a few times in a short period;
    after that, when a worker is needed. If that fails too, the caller gets
    `UnavailableError`, and the core tries again at growing intervals. An environment is
    broken, and its tasks fail with the reason, only if none of its zygotes ever served
    and the interpreter fails by itself.

    Attributes:
        environment: variables that the zygotes start with.
        current: the zygote that serves, or will be the first to serve.
        problem: why the environment is broken, None if it is not.
        last_report: the `Ready` of the latest zygote; None before the first.
        learning: the modules for the next generation.
        used_at: loop time of the last request for a worker.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Make,
        pool: ZygoteListener,
        environment: Environment,
        preload: tuple[str, ...],
        learning: Learning | None = None,
    ) -> None:
        self.environment = environment
        self.problem: NodeStartError | None = None
        self.last_report: Ready | None = None
        self.learning = learning or Learning(preload)
        self.used_at = loop.time()
        self._loop = loop
        self._make = make
        self._pool = pool
        self._preload = list(preload)
        self._next: Zygote | None = None
        self._is_wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = False
        self._is_failing = False
        self._restarts: deque[float] = deque()
        # The result is None, or the reason why the first generation has failed.
        self._ready: asyncio.Future[NodeStartError | None] = loop.create_future()
        self.current = self._make_zygote()

    def __repr__(self) -> str:
        return f"<ZygoteGenerations {self.current!r}, next {self._next!r}>"

    def serving(self) -> Zygote:
        """Return the zygote that serves; start it if necessary.

        Raises:
            PreloadError: a module to preload cannot be imported.
            UnavailableError: there is no zygote now; there may be one later.
            NodeStartError: there is no zygote, and another attempt would not help.
        """
        if self.problem is not None:
            raise renewed(self.problem)
        if self.current.is_over:
            self.current = self._make_zygote()
        if not self.current.is_started:
            if self._ready.done() and self.last_report is None:
                self._ready = self._loop.create_future()
            try:
                self.current.start()
            except NodeStartError as error:
                if self.last_report is None and not is_scarcity(error.__cause__):
                    self.problem = renewed(error)
                    raise
                self._note_failing(str(error))
                raise UnavailableError(str(error)) from error
        return self.current

    def choose(self, needs: Collection[str]) -> Zygote:
        """Return the zygote for a worker whose first function needs some modules.

        A worker waits for a zygote that is importing these modules already, since its
        own import would end later. The first worker does not wait if the modules were
        never imported here: a zygote may turn out to be unfit, and what the function
        imports later is found by running it.

        Raises:
            NodeStartError: see `serving`.
        """
        current = self.serving()
        if not needs or current.modules.issuperset(needs):
            return current
        wanted = self.learning.want(needs)
        missing = [name for name in wanted if name not in current.modules]
        if not missing:
            return current
        if self._next is None:
            self.renew()
        following = self._next
        if following is None or not following.modules.issuperset(missing):
            return current
        costs = self.learning.costs
        if costs.keys() >= {*missing, *following.added}:
            own = sum(costs[name] for name in missing)
            rest = sum(costs[name] for name in following.left_to_import)
            return following if rest <= own * (1 + HELD) else current
        if not following.has_learner:
            following.has_learner = True
            return current
        # Nothing else is imported there, so the worker's own import would end later.
        return following if set(following.added) <= set(missing) else current

    async def ready(self) -> None:
        """Wait until the first generation can fork.

        Raises:
            PreloadError: a module to preload cannot be imported.
            NodeStartError: the process ended too early.
        """
        problem = await asyncio.shield(self._ready)
        if problem is not None:
            raise renewed(problem)

    def note_imports(self, imported: Imported) -> None:
        """Learn from the imports of a worker that has ended its first task."""
        for zygote in (self.current, self._next):
            if zygote is not None:
                zygote.end_learning()
        if self.learning.note(imported.names, imported.microseconds):
            self._renew_soon()

    def note_slow_import(self, module: str) -> None:
        """Learn a module that a worker has begun to import and that takes long."""
        if self.learning.want([module]):
            self.renew()
            self._announce_next()

    def _announce_next(self) -> None:
        """Let workers that were not forked yet wait for the next zygote if they may."""
        if self._next is not None:
            self._next.has_learner = True  # the worker that has reported the import
            self._pool.on_better_zygote(self.current)

    def end(self) -> None:
        """Start no more zygotes; the present zygotes end after their workers."""
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next is not None:
            self._next.end()
        self.current.retire()

    def _make_zygote(
        self, parent: Zygote | None = None, added: Sequence[str] = ()
    ) -> Zygote:
        preload = () if parent else tuple(self._preload)
        modules = Modules(preload, tuple(added))
        return self._make(self.environment, modules, self, parent)

    # The next generation, which imports more or edited modules

    def _renew_soon(self) -> None:
        if self._timer is None and not self._is_ended:
            self._timer = self._loop.call_later(DEBOUNCE, self.renew)

    def renew(self) -> None:
        """Start the next generation now, if there is something new to import."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next is not None or self._is_ended:
            self._is_wanted = True
            return
        self._is_wanted = False
        if self.current.is_stale:
            self._start_next(self._make_zygote())
        elif not self.current.is_over and self.current.is_started:
            self._branch(self.current)

    def _branch(self, zygote: Zygote) -> None:
        """Start a zygote that imports what was learnt and `zygote` lacks."""
        parent = zygote
        if parent.depth >= DEEPEST:
            while parent.parent is not None:
                parent = parent.parent
        added = [name for name in self.learning.modules if name not in parent.modules]
        if added:
            self._start_next(self._make_zygote(parent, added))

    def _start_next(self, successor: Zygote) -> None:
        try:
            successor.start()
        except NodeStartError as error:
            _log.warning("! the learnt modules are not preloaded: %s", error)
        else:
            self._next = successor

    def on_ready(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        report = zygote.ready
        assert report is not None, zygote
        names = zygote.added or zygote.preload
        self.learning.costs.update(zip(names, report.microseconds, strict=False))
        if self._is_failing:
            _log.warning("workers can be started again: zygote %d", zygote.generation)
        self.last_report, self._is_failing = report, False
        if report.memory > _machine_memory() // LARGEST_PART:
            self.learning.is_full = True
        if zygote is self._next:
            self._next = None
            if zygote.parent is None:
                # It replaces an interpreter with old files; learnt modules come first.
                self._branch(zygote)
            if self._is_importing:
                zygote.retire()
            else:
                self._switch_to(zygote)
                if self._is_wanted:
                    self.renew()
                    self._announce_next()
                if zygote.has_learner:
                    took = self._loop.time() - zygote.started_at
                    zygote.hold(took * HELD)
        elif not self._ready.done():
            self._ready.set_result(None)
        if self._lacks_modules(zygote):
            self._renew_soon()

    @property
    def _is_importing(self) -> bool:
        return self._next is not None

    def _lacks_modules(self, zygote: Zygote) -> bool:
        return not zygote.modules.issuperset(self.learning.modules)

    def _switch_to(self, zygote: Zygote) -> None:
        """Let a new generation serve."""
        old = self.current
        self.current = zygote
        _log.debug("zygote %d follows %d", zygote.generation, old.generation)
        old.retire()
        self._pool.on_superseded(old)

    def on_message(self, zygote: Zygote, message: Message) -> None:
        """See `ZygoteEvents`."""
        if isinstance(message, Stale) and zygote is self.current:
            _log.info("%s was edited; a new zygote imports it again", message.module)
            zygote.is_stale = True
            self._renew_soon()

    def _leave_out(self, module: str, reason: str) -> None:
        if module in self.learning.left_out:
            return
        self.learning.leave_out(module, reason)
        _log.warning(
            "! %s is not preloaded: %s; workers import it themselves", module, reason
        )

    # The end of a generation

    def on_end(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        if zygote is self._next:
            self._next = None
            if not zygote.is_closing:
                self._on_early_end(zygote)
                self._pool.on_zygote_death(zygote)
        elif not zygote.is_closing:
            if zygote is self.current and not self._is_ended:
                self._replace(zygote)
            self._pool.on_zygote_death(zygote)

    def _on_early_end(self, zygote: Zygote) -> None:
        """Handle a new generation that ended before it served; the old one serves."""
        unfit = zygote.unfit
        if zygote.unforked:
            _log.warning("! the learnt modules are not preloaded: %s", zygote.unforked)
            return
        if unfit is None:
            unfit = Unfit(zygote.importing, _why_ended(zygote), False)
        if unfit.module in self.learning.modules:
            self._leave_out(unfit.module, unfit.reason)
            self._is_wanted = True
        else:
            _log.warning(
                "! %s cannot be imported again: %s; workers go on with the previous "
                "version",
                unfit.module,
                unfit.reason,
            )
        if self._is_wanted:
            self.renew()

    def _replace(self, zygote: Zygote) -> None:
        """Start another zygote in place of a dead zygote, if that may help."""
        problem: NodeStartError | None = None
        is_from_outside = False
        if zygote.unfit is not None:
            problem = self._do_without(zygote.unfit)
        elif zygote.is_late:
            problem = PreloadError(
                f"init(preload=...) names {zygote.importing!r}, whose import did not "
                f"end within {IMPORT_LIMIT:g} s. Leave it out if it waits for "
                f"something."
            )
        elif (
            self.last_report is not None
            and not self._is_failing
            and self._may_restart()
        ):
            status = zygote.status
            _log.warning("! the zygote ended with status %d; starting another", status)
        else:
            lines = "".join(f"\n  {line}" for line in zygote.last)
            named = f" while it imported {zygote.importing}" if zygote.importing else ""
            text = f"the zygote ended with status {zygote.status}{named}:{lines}"
            if is_script(zygote.executable):
                text += (
                    f"\nsys.executable is {zygote.executable!r}, a script, perhaps of "
                    f"a profiler; set it to Python's own file before the node starts."
                )
            problem = NodeStartError(text)
            is_from_outside = zygote.status in FROM_OUTSIDE
        if problem is None:
            try:
                self.serving()
            except NodeStartError as error:
                self._fail(zygote, error)
        elif self.last_report is not None or is_from_outside:
            # One line, because `why()` shows it for waiting tasks.
            first, *words = str(problem).splitlines()
            last = f" {words[-1].strip()}" if words else ""
            self._fail(zygote, UnavailableError(f"{first}{last}".rstrip(":")))
        else:
            self._fail(zygote, problem)

    def _do_without(self, unfit: Unfit) -> NodeStartError | None:
        """Leave a module out of the next generation; return an error if impossible."""
        if unfit.module not in self._preload:
            return NodeStartError(
                f"a bare interpreter cannot be forked here: {unfit.reason}."
            )
        if unfit.is_missing:
            return PreloadError(
                f"init(preload=...) names {unfit.module!r}, which cannot be imported: "
                f"{unfit.reason.rstrip('.')}. Install it, or leave it out."
            )
        _log.warning(
            "! %s is not preloaded: %s, so the process could not be forked "
            "safely; workers import it themselves",
            unfit.module,
            unfit.reason,
        )
        self._preload.remove(unfit.module)
        return None

    def _may_restart(self) -> bool:
        now = self._loop.time()
        while self._restarts and self._restarts[0] < now - PERIOD:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= INTENSITY

    def _fail(self, zygote: Zygote, problem: NodeStartError) -> None:
        """Note that no zygote replaces a dead zygote, for now or forever."""
        zygote.problem = problem
        if isinstance(problem, UnavailableError):
            self._note_failing(str(problem))
        else:
            self.problem = problem
        if not self._ready.done():
            self._ready.set_result(problem)

    def _note_failing(self, reason: str) -> None:
        """Log once that no worker can be started; `on_ready` logs the recovery."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "! no worker can be started: %s. Tasks wait in the queue until another "
                "attempt succeeds",
                reason,
            )


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _why_ended(zygote: Zygote) -> str:
    """Return why a zygote ended while it imported a module."""
    if zygote.is_late:
        return f"its import did not end within {IMPORT_LIMIT:g} s"
    if zygote.status < 0:
        return f"its import was ended by {signal.Signals(-zygote.status).name}"
    return f"its import ended the process with code {zygote.status}"


def renewed(problem: NodeStartError) -> NodeStartError:
    """Return a copy without traceback, since raising again extends the traceback."""
    kind = NodeStartError if isinstance(problem, UnavailableError) else type(problem)
    return kind(*problem.args)


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
        self._cache = ImportCache()
        self._needed: set[str] = set()
        learning = Learning(self._preload)
        if config.learns:
            learning.want(self._cache.costs)
            learning.costs.update(self._cache.costs)
        self._learnt: dict[Environment, Learning] = {}
        self.plain = self._add((), learning)
        self.plain.current.start(launched)
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
        if function is not None and self.config.learns:
            needs.update(function.modules, self._cache.late.get(function.name, ()))
            self._needed |= needs
        zygote = generations.choose(needs)
        generations.used_at = self._loop.time()
        zygote.check()
        return zygote

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
            late = self._cache.late
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

    async def close(self) -> None:
        """End all processes and wait; keepers must have been told to end first."""
        if self._timer is not None:
            self._timer.cancel()
        for generations in self._environments.values():
            generations.end()
        await asyncio.gather(*(zygote.close() for zygote in self._zygotes.values()))
        if self.config.learns:
            self._advise()
            learning = self.plain.learning
            costs = {
                name: learning.costs[name]
                for name in learning.modules
                if learning.costs.get(name, 0) >= NOT_CHEAP
            }
            if costs:
                await asyncio.to_thread(
                    self._cache.save, costs, self._cache.late, self._needed
                )
        self.page.close()
        self.config.close()

    def _advise(self) -> None:
        """Say which `preload` would have saved imports that have cost much."""
        spent = self.plain.learning.spent
        total = sum(spent.values()) / 1e6
        if total >= MUCH:
            names = ", ".join(map(repr, sorted(spent, key=spent.__getitem__)[:-9:-1]))
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

    def join(self, key: str, program: Program) -> None:
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
