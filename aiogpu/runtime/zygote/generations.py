"""All zygotes of a node: one per environment, replaced after a death or new modules.

The plain zygote exists from the start. A zygote for another environment is started when
a task needs it, and ends when it has not been used for a while. While a new generation
imports, the old generation serves; it ends with its last worker.
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
from aiogpu.runtime.zygote.process import IMPORT_LIMIT, Zygote, ZygoteEvents
from aiogpu.wire.messages import Hello, Imported, LeftOut, Message, Ready, Stale, Unfit

DEAR: Final = 50_000
"""A module is learnt at once if its import takes at least this many microseconds."""


NOT_CHEAP: Final = 5_000
"""A module is learnt if its import takes at least this many microseconds twice."""


MOST: Final = 64
"""Most modules learnt for one environment."""


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
    """The modules that a zygote should import, learnt from workers' imports.

    Workers report the modules that they import, with the time each took. The next
    generation preloads a module if its import was slow once, or not fast in two
    workers, unless the module is unfit.

    Attributes:
        modules: modules that a zygote should import, in this order.
        proven: the part of `modules` that a zygote has imported without harm.
        left_out: unfit modules, each with the reason.
    """

    def __init__(self, explicit: Iterable[str], learnt: Sequence[str] = ()) -> None:
        self.modules: list[str] = list(learnt)
        self.proven: set[str] = set(learnt)
        self.left_out: dict[str, str] = {}
        self._explicit = frozenset(explicit)
        self._seen: set[str] = set()

    def note(self, names: Sequence[str], microseconds: Sequence[int]) -> bool:
        """Note the imports of one worker; return True if a module was learnt.

        A worker imports a module once, so each report comes from another worker.
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
        """Note modules after whose import a zygote can fork."""
        self.proven.update(set(modules) & set(self.modules))

    def leave_out(self, module: str, reason: str) -> None:
        """Note that a module is unfit: no zygote imports it from now on."""
        self.left_out[module] = reason
        self.proven.discard(module)
        if module in self.modules:
            self.modules.remove(module)


def sees_devices(module: str) -> bool:
    """Return True if importing the module would look for devices."""
    return any(f"{module}.".startswith(f"{name}.") for name in DEVICE_MODULES)


_log: Final = logging.getLogger(__name__)


DEBOUNCE: Final = 0.2
"""Seconds for which learnt modules are collected before a zygote is started."""


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
        """Handle that a zygote has died unexpectedly; its replacement exists.

        The keepers that it has not forked must be requested again, unless the zygote
        has a `problem`.
        """

    def on_superseded(self, zygote: Zygote) -> None:
        """Handle that another zygote has replaced this zygote."""

    def is_busy(self, zygote: Zygote) -> bool:
        """Return True if the zygote has workers with work."""


Make = Callable[[Environment, Modules, ZygoteEvents], Zygote]
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
        learnt: tuple[str, ...] = (),
    ) -> None:
        self.environment = environment
        self.problem: NodeStartError | None = None
        self.last_report: Ready | None = None
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
        self._is_failing = False
        self._restarts: deque[float] = deque()
        # The result is None, or the reason why the first generation has failed.
        self._ready: asyncio.Future[NodeStartError | None] = loop.create_future()
        self.current = self._make_zygote()

    def __repr__(self) -> str:
        return f"<ZygoteGenerations {self.current!r}, next {self._next!r}>"

    def serving(self) -> Zygote:
        """Return the zygote for the next worker; start it if necessary.

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
        """Learn from a worker's imports."""
        if self.learning.note(imported.names, imported.microseconds):
            self._renew_soon()

    def end(self) -> None:
        """Start no more zygotes; the present zygotes end after their workers."""
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

    # The next generation, which imports more or edited modules

    def _renew_soon(self) -> None:
        if self._timer is None and not self._is_ended:
            self._timer = self._loop.call_later(DEBOUNCE, self._renew)

    def _renew(self) -> None:
        self._timer = None
        if self._next is not None or self.current.ready is None:
            self._is_wanted = True
            return
        self._is_wanted = False
        successor = self._make_zygote()
        try:
            successor.start()
        except NodeStartError as error:
            _log.warning("! the learnt modules are not preloaded: %s", error)
        else:
            self._next = successor

    def on_ready(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        self.learning.prove(zygote.learnt)
        if self._is_failing:
            _log.warning("workers can be started again: zygote %d", zygote.generation)
        self.last_report, self._is_failing = zygote.ready, False
        if zygote is self._next:
            self._next = None
            self._switch_to(zygote)
        elif not self._ready.done():
            self._ready.set_result(None)
        if self._is_wanted:
            self._renew_soon()

    def _switch_to(self, zygote: Zygote) -> None:
        """Let a new generation serve, if it has imported further modules."""
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

    def _leave_out_all(self, modules: Iterable[str], zygote: Zygote) -> None:
        reason = f"the zygote that imported it ended with status {zygote.status}"
        for module in sorted(modules):
            self._leave_out(module, reason)

    # The end of a generation

    def on_end(self, zygote: Zygote) -> None:
        """See `ZygoteEvents`."""
        if zygote is self._next:
            self._next = None
            if not zygote.is_closing:
                self._on_early_end(zygote)
        elif not zygote.is_closing:
            if zygote is self.current and not self._is_ended:
                self._replace(zygote)
            self._pool.on_zygote_death(zygote)

    def _on_early_end(self, zygote: Zygote) -> None:
        """Handle a new generation that ended before it served; the old one serves."""
        unfit = zygote.unfit
        if unfit is None:  # the culprit is unknown: leave out all added modules
            _log.warning(
                "! a zygote ended with status %d while it imported; the previous "
                "zygote goes on",
                zygote.status,
            )
            self._leave_out_all(set(zygote.learnt) - set(self.current.learnt), zygote)
        elif unfit.module in self.learning.modules:
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
            self._renew_soon()

    def _replace(self, zygote: Zygote) -> None:
        """Start another zygote in place of a dead zygote, if that may help."""
        problem: NodeStartError | None = None
        is_from_outside = False
        if zygote.unfit is not None:
            problem = self._do_without(zygote.unfit)
        elif zygote.ready is None and zygote.learnt:
            self._leave_out_all(zygote.learnt, zygote)
        elif zygote.is_late:
            named = zygote.importing or ", ".join(zygote.preload) or "nothing"
            problem = PreloadError(
                f"init(preload=...) names {named}, and the imports did not end within "
                f"{IMPORT_LIMIT:g} s for each. Leave out the module that waits for "
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
        if unfit.module in self.learning.modules:
            self._leave_out(unfit.module, unfit.reason)
        elif unfit.module not in self._preload:
            return NodeStartError(
                f"a bare interpreter cannot be forked here: {unfit.reason}."
            )
        elif unfit.is_missing:
            return PreloadError(
                f"init(preload=...) names {unfit.module!r}, which cannot be imported: "
                f"{unfit.reason.rstrip('.')}. Install it, or leave it out."
            )
        else:
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


def renewed(problem: NodeStartError) -> NodeStartError:
    """Return a copy without traceback, since raising again extends the traceback."""
    kind = NodeStartError if isinstance(problem, UnavailableError) else type(problem)
    return kind(*problem.args)


MOST_OTHERS: Final = 4
"""Most other environments with a zygote, not counting joined programs."""


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
        self.plain = self._add(())
        try:
            self.plain.current.start(launched)
        except NodeStartError:
            self.page.close()
            raise

    def __repr__(self) -> str:
        count = len(self._environments)
        return f"<Zygotes {len(self._zygotes)} for {count} environments>"

    def serving(self, environment: Environment) -> Zygote:
        """Return the zygote for tasks with these variables; it may not be ready yet.

        Raises:
            UnavailableError: there is no zygote now; there may be one later.
            NodeError: there is no zygote, and there will be none.
        """
        report = self.plain.last_report or Ready((), ())
        early = early_variables(environment, report.modules, report.variables)
        generations = self._environments.get(early) or self._add_environment(early)
        zygote = generations.serving()
        generations.used_at = self._loop.time()
        zygote.check()
        return zygote

    def on_hello(self, peer: Peer, hello: Hello) -> Recipient | None:
        """Accept the connection of a zygote that has sent `Hello`."""
        zygote = self._zygotes.get(hello.id)
        if zygote is None:
            peer.abort()
            return None
        return zygote.on_hello(peer)

    def note_imports(self, zygote: Zygote, imported: Imported) -> None:
        """Learn from the imports of a worker of this zygote."""
        if generations := self._environments.get(zygote.environment):
            generations.note_imports(imported)

    async def close(self) -> None:
        """End all processes and wait; keepers must have been told to end first."""
        if self._timer is not None:
            self._timer.cancel()
        for generations in self._environments.values():
            generations.end()
        await asyncio.gather(*(zygote.close() for zygote in self._zygotes.values()))
        self.page.close()
        self.config.close()

    def _add(
        self,
        environment: Environment,
        learnt: tuple[str, ...] = (),
        own: Sequence[str] = (),
    ) -> ZygoteGenerations:
        preload = (*self._preload, *own)
        generations = self._environments[environment] = ZygoteGenerations(
            self._loop, self._make, self._pool, environment, preload, learnt
        )
        return generations

    def _make(
        self, environment: Environment, modules: Modules, events: ZygoteEvents
    ) -> Zygote:
        number = next(self._numbers)
        zygote = Zygote(
            self._loop,
            self._console,
            self.config,
            self.page,
            number,
            environment,
            modules,
            events,
            self._pool.on_lost_slot,
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
        learning = self.plain.learning
        learnt = (name for name in learning.modules if name in learning.proven)
        key = program_of(environment)
        program = self.config.programs.get(key)
        if key and program is None:
            raise NodeStartError("the program of this worker has left the node")
        own = () if program is None else program.preload
        generations = self._add(environment, tuple(learnt), own)
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
            self.serving(environment)
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
