"""The zygotes of one environment, replaced after a death, or for new modules.

New modules are imported by a branch of the serving zygote, which serves meanwhile; it
ends with its last worker and branch.

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
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.runtime.workers.death import UnavailableError, is_scarcity
from aiogpu.runtime.zygote.config import Modules, is_script
from aiogpu.runtime.zygote.learning import DEAR, Learning
from aiogpu.runtime.zygote.process import IMPORT_LIMIT, Zygote, ZygoteEvents
from aiogpu.wire.messages import Imported, Message, Ready, Stale, Unfit

LARGEST_PART: Final = 8
"""A zygote that uses more than this part of the machine's memory learns no more. Its
forks share the memory until they write to it."""


_log: Final = logging.getLogger(__name__)


DEBOUNCE: Final = 0.2
"""Seconds for which learnt modules are collected before a zygote is started."""


HELD: Final = 0.2
"""The part of a zygote's imports for which workers wait longer than the learner should
take: it may now import what the others would import as well."""


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

        A worker waits for a zygote that is importing dear ones among these modules
        already, since its own import would end later. The first worker does not wait if
        the modules were never imported here: a zygote may turn out to be unfit, and
        what the function imports later is found by running it.

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
        self.learning.needed.update(wanted)
        if self._next is None or self._are_dear(missing):
            self._put_first(missing)
        following = self._next
        if following is None:
            return current
        # The others are imported by the worker itself in either case.
        coming = [name for name in missing if name in following.modules]
        if not coming:
            return current
        costs = self.learning.costs
        if costs.keys() >= {*coming, *following.added}:
            return following if self._is_sooner(following, coming) else current
        if following.learner_since is None:
            following.learner_since = self._loop.time()
            return current
        # Nothing else is imported there, so the worker's own import would end later.
        return following if set(following.added) <= set(missing) else current

    def _is_sooner(self, zygote: Zygote, modules: Sequence[str]) -> bool:
        """Return True if a zygote is ready before a worker has imported modules."""
        costs = self.learning.costs
        own = sum(costs.get(name, 0) for name in modules)
        rest = sum(costs.get(name, 0) for name in zygote.left_to_import)
        return rest <= own * (1 + HELD)

    def _are_dear(self, modules: Sequence[str]) -> bool:
        costs = self.learning.costs
        if any(name not in costs for name in modules):
            return False
        return sum(costs[name] for name in modules) >= DEAR

    def _put_first(self, modules: Sequence[str]) -> None:
        """Import modules that are needed now before what may never be.

        The next zygote is given up if nothing has needed what it imports, such as what
        an earlier run of the program with other arguments has needed. Else each worker
        would import the modules itself, all at once, beside that zygote.
        """
        following = self._next
        if following is not None and following.parent is not None:
            coming = [name for name in modules if name in following.modules]
            needed = self.learning.needed.intersection(following.added)
            is_sooner = coming and self._is_sooner(following, coming)
            if needed.issubset(modules) and not is_sooner:
                following.end()
                self._next = None
        self.renew()

    def offers(self, module: str) -> bool:
        """Return True if new workers have a dear module, or will have it soon."""
        learning = self.learning
        if learning.costs.get(module, DEAR) < DEAR:
            return False
        return module in learning.modules or learning.may_learn(module)

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
            self.learning.needed.add(module)
            self._put_first([module])
            self._announce_next()

    def _announce_next(self) -> None:
        """Let workers that were not forked yet wait for the next zygote if they may."""
        if self._next is not None:
            # The worker that has reported the import.
            self._next.learner_since = self._loop.time()
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
        needed = [name for name in added if name in self.learning.needed]
        if added:
            self._start_next(self._make_zygote(parent, needed or added))

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
        self.learning.note_zygote(names, report.microseconds)
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
                if zygote.learner_since is not None:
                    took = self._loop.time() - zygote.started_at
                    zygote.hold(until=zygote.learner_since + took * (1 + HELD))
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
            module = zygote.importing
            during = f" while it imported {module} (preload=)" if module else ""
            text = f"the zygote ended with status {zygote.status}{during}:{lines}"
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
