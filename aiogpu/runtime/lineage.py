"""The zygotes of one environment: who serves, who follows, who ends.

A generation that has died is followed by another at once, a few times in a short
while at most. After that the next one is started when a worker is wanted, and whoever
wants one is told that it cannot be had now: the core waits longer and longer between
two tries (`core.outage`). Only an environment that has never served, and whose
interpreter fails by itself, is broken: its tasks fail, and say why.

A generation that has learnt is followed by one that has more: while that one imports,
the old one serves, and ends when its last worker has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.runtime.crowd import UnavailableError, is_scarcity
from aiogpu.runtime.launch import Launched
from aiogpu.runtime.learning import Learning
from aiogpu.runtime.zygote import IMPORT_LIMIT, Zygote
from aiogpu.wire.messages import (
    Imported,
    LeftOut,
    Message,
    Ready,
    Stale,
    Unfit,
)

_log: Final = logging.getLogger(__name__)

DEBOUNCE: Final = 0.2
"""Seconds for which what is learnt is gathered before a generation is started."""
INTENSITY: Final = 3
PERIOD: Final = 10.0
"""At most `INTENSITY` restarts at once in `PERIOD` seconds."""
FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM, os.EX_TEMPFAIL)
"""Statuses of a zygote whose end is no fault of its environment: somebody has killed
it, or it says itself that descriptors, processes or memory ran out."""

Environment = tuple[tuple[str, str], ...]


class Lineage:
    """All generations of zygotes of one environment, one after the other.

    Attributes:
        environment: variables that they are exec'd with.
        current: the one that serves, or is the first to do so.
        problem: why it is broken, None unless it is.
        has_served: whether a generation could be forked, now or before.
        learning: what the next one will import.
        used_at: when a worker was wanted of it last, on the loop's clock.
        on_death: told of a zygote that has died unasked; what follows is there.
        on_superseded: told of a zygote in whose place another serves now.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make: Callable[[Environment], Zygote],
        environment: Environment,
        preload: tuple[str, ...],
        learnt: tuple[str, ...] = (),
    ) -> None:
        self.environment = environment
        self.problem: NodeStartError | None = None
        self.learning = Learning(preload, learnt)
        self.used_at = loop.time()
        self.on_death: Callable[[Zygote], None]
        self.on_superseded: Callable[[Zygote], None]
        self._loop = loop
        self._make = make
        self._preload = list(preload)
        self._next: Zygote | None = None
        self._is_wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = False
        self._restarts: deque[float] = deque()
        self._is_started = False
        self._is_failing = False
        self.has_served = False
        self._said = Ready((), ())
        # Ends with None, or with why the first generation has ended before.
        self._ready: asyncio.Future[NodeStartError | None] = loop.create_future()
        self.current = self._make_zygote()

    def __repr__(self) -> str:
        return f"<Lineage {self.current!r}, next {self._next!r}>"

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

    @property
    def said(self) -> Ready:
        """What the zygote that served last has said of itself, empty before one has."""
        return self._said

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
        zygote = self._make(self.environment)
        zygote.preload = tuple(self._preload)
        zygote.learnt = tuple(self.learning.modules)
        zygote.proven = tuple(sorted(self.learning.proven))
        zygote.on_ready = self._on_ready
        zygote.on_end = self._on_end
        zygote.on_message = self._on_message
        return zygote

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

    def _on_ready(self, zygote: Zygote) -> None:
        self.learning.prove(zygote.learnt)
        if self._is_failing:
            _log.warning("workers can be started again: zygote %d", zygote.generation)
        self.has_served, self._is_failing = True, False
        if zygote.ready is not None:
            self._said = zygote.ready
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
        self.on_superseded(old)

    def _on_message(self, zygote: Zygote, message: Message) -> None:
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

    def _on_end(self, zygote: Zygote) -> None:
        if zygote is self._next:
            self._next = None
            if not zygote.is_closing:
                self._on_stillborn(zygote)
        elif not zygote.is_closing:
            if zygote is self.current and not self._is_ended:
                self._succeed(zygote)
            self.on_death(zygote)

    def _on_stillborn(self, zygote: Zygote) -> None:
        """A generation has ended before it could serve; the old one serves on."""
        unfit = zygote.unfit
        if unfit is None:
            self._give_up_learning(zygote)
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

    def _give_up_learning(self, zygote: Zygote) -> None:
        """No module can be blamed: do without all that this one was to add."""
        _log.warning(
            "! a zygote ended with status %d while it imported; the one before "
            "serves on",
            zygote.status,
        )
        self._leave_out_all(set(zygote.learnt) - set(self.current.learnt), zygote)

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
            problem = endless_import(zygote)
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
            return missing_module(unfit)
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


def missing_module(unfit: Unfit) -> PreloadError:
    """The error for a module that the user has named and that is not there."""
    return PreloadError(
        f"init(preload=...) names {unfit.module!r}, which cannot be imported: "
        f"{unfit.reason.rstrip('.')}. Install it, or leave it out."
    )


def endless_import(zygote: Zygote) -> PreloadError:
    """The error for modules that the user has named and whose import never ends."""
    named = ", ".join(map(repr, zygote.preload)) or "nothing"
    return PreloadError(
        f"init(preload=...) names {named}, and the imports did not end within "
        f"{IMPORT_LIMIT:g} s for each. Leave out the one that waits for something."
    )
