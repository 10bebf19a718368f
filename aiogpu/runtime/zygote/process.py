"""The driver's half of one zygote: start it, ask it for keepers, see it end.

Its end is seen on a pidfd, without a thread and without touching SIGCHLD. What follows
from it is decided in `runtime.zygote.generations`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.descriptors import descriptor_limit
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.output.pipes import LinePipe
from aiogpu.runtime.zygote.launch import (
    Launched,
    Modules,
    ZygoteConfig,
    launch,
)
from aiogpu.wire.messages import Check, Close, Keep, Lost, Message, Ready, Unfit

CHECKS: Final = 1.0
"""Seconds after which it is asked again whether modules were edited."""


IMPORT_LIMIT: Final = 60.0
"""Seconds that a zygote gets for each module that it is to import."""


LAST_WORD: Final = 0.5
"""Seconds after a zygote's end in which what it sent before is still read."""


PATIENCE: Final = 5.0
"""Seconds that a zygote gets to end by itself."""


class ZygoteEvents(Protocol):
    """Is told what becomes of a zygote: the generations that it is one of."""

    def on_ready(self, zygote: Zygote) -> None:
        """It can be forked."""

    def on_end(self, zygote: Zygote) -> None:
        """It has ended, and all is known of that."""

    def on_message(self, zygote: Zygote, message: Message) -> None:
        """It says something else."""


class Zygote:
    """One zygote process, from its start to its end.

    Attributes:
        generation: its number; no two of a node share one.
        environment: variables that it is exec'd with, beside the program's own.
        preload: modules that the user has named.
        learnt: modules that were learnt.
        proven: those of them that need no probe.
        slots: those whose keepers it was asked for, until they are forgotten.
        ready: what it said when it could be forked, None before.
        ready_at: when that was, on the loop's clock.
        unfit: what it said before it gave up, None if it did not.
        is_closing: it was told to end, or killed by us.
        status: its wait status, once it has ended.
        last: its last lines of output, once it has ended.
        is_over: it has ended, and all that it said was read.
        is_late: it was killed since its imports did not end.
        is_stale: something that it has imported was edited since.
        problem: why none has followed it, None while it lives or one does.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        config: ZygoteConfig,
        generation: int,
        environment: Environment,
        modules: Modules,
        events: ZygoteEvents,
        on_lost_slot: Callable[[int, str], None],
    ) -> None:
        """Prepare; `start` starts the process.

        Args:
            loop: runs the timers.
            console: shows what it prints.
            config: what all zygotes of the node share.
            generation: its number.
            environment: variables that it is exec'd with.
            modules: what it imports.
            events: told what becomes of it.
            on_lost_slot: told of a slot whose keeper has died, with all below it, or
                was not forked, and then why.
        """
        self.generation = generation
        self.environment = environment
        self.preload, self.learnt, self.proven = self._modules = modules
        self.slots: set[int] = set()
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        self.unfit: Unfit | None = None
        self.status = 0
        self.last: tuple[str, ...] = ()
        self.is_over = False
        self.is_late = False
        self.is_stale = False
        self.problem: Exception | None = None
        self._events = events
        self._on_lost_slot = on_lost_slot
        self._loop = loop
        self._console = console
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None
        self._output: LinePipe | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self._peer: Peer | None = None
        self._checked = loop.time()
        self._is_silent = False
        self._is_retired = False
        self.is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._killer: asyncio.TimerHandle | None = None
        self._waiting: list[int] = []
        self._ended = loop.create_future()

    def __repr__(self) -> str:
        return f"<Zygote {self.generation} {self._child!r}>"

    @property
    def takes_work(self) -> bool:
        """True if another worker may be forked from it."""
        return not (self.is_over or self._is_retired or self.is_closing)

    def start(self, launched: Launched | None = None) -> None:
        """Listen to the process, which is started unless it is on its way already.

        Raises:
            NodeStartError: there is no interpreter, or it cannot be started. It may be
                tried again.
        """
        child, output = launched or launch(
            self._config,
            self.generation,
            self.environment,
            self._modules,
        )
        # Before it is asked for the first fork: workers inherit what it has then.
        descriptor_limit.hand_down(child.pid)
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            child.kill()
            child.wait()
            os.close(output)
            raise NodeStartError(f"a zygote cannot be watched: {error}") from error
        self._child = child
        self._loop.add_reader(pidfd, self._reap, child, pidfd)
        # What it writes itself: the prints of preloaded modules, tracebacks.
        label = f"zygote pid={child.pid}"
        self._output = LinePipe(self._loop, output, partial(self._show, label))
        # What is learnt may be imported twice, once by a probe.
        count = 1 + len(self.preload) + 2 * len(self.learnt)
        self._killer = self._loop.call_later(count * IMPORT_LIMIT, self._on_late)

    def _show(self, label: str, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        self._lines.append(text)
        assert self._output is not None, text
        self._console.write(2, f"({label}) {text}", self._output)

    def _on_late(self) -> None:
        self.is_late = True
        self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def greeted(self, peer: Peer) -> None:
        """Take over its connection."""
        self._peer = peer
        peer.on_messages = self._on_messages
        peer.on_lost = self._on_last_word

    def keep(self, slot: int) -> None:
        """Ask for a keeper, now or as soon as it can be forked."""
        self.slots.add(slot)
        if self._peer is None or self.ready is None:
            self._waiting.append(slot)
        else:
            self._peer.send(Keep(slot))

    def release(self, slot: int) -> None:
        """One of its slots is forgotten; with the last one, a retired zygote ends."""
        self.slots.discard(slot)
        if self._is_retired and not self.slots:
            self.end()

    def check(self) -> None:
        """Ask whether what it has imported was edited; not more than once a second."""
        if self._peer is None or self.ready is None:
            return
        now = self._loop.time()
        if now - self._checked >= CHECKS:
            self._checked = now
            self._peer.send(Check())

    def retire(self) -> None:
        """Another serves in its place: end as soon as no slot of it is left."""
        self._is_retired = True
        if not self.slots:
            self.end()

    def end(self) -> None:
        """Have the process end, in an orderly way if it listens; by force in time."""
        self.is_closing = True
        if self._timer is not None:
            self._conclude()
        if self._child is None:
            return
        self._stop_killer()
        if self._peer is not None and self.ready is not None:
            self._peer.send(Close())
            # Somebody may have stopped it (SIGSTOP).
            self._child.send_signal(signal.SIGCONT)
            self._killer = self._loop.call_later(PATIENCE, self._kill)
        else:
            # It is still importing, and reads nothing until it has done so.
            self._child.kill()

    async def close(self) -> None:
        """End the process and wait for it; keepers must have been told before."""
        if not self.is_closing:
            self.end()
        if self._child is not None:
            await self._ended

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                self.ready, self.ready_at = message, self._loop.time()
                self._stop_killer()
                slots, self._waiting = self._waiting, []
                for slot in slots:
                    self.keep(slot)
                self._events.on_ready(self)
            elif isinstance(message, Unfit):
                self.unfit = message
            elif isinstance(message, Lost):
                self._on_lost_slot(message.slot, message.unforked)
            else:
                self._events.on_message(self, message)

    def _reap(self, child: subprocess.Popen[bytes], pidfd: int) -> None:
        """The process has ended; what it said last may not have been read yet."""
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self.status = child.wait()
        if self.is_closing or self._is_silent:
            self._conclude()
        else:
            self._timer = self._loop.call_later(LAST_WORD, self._conclude)

    def _on_last_word(self) -> None:
        self._is_silent = True
        if self._timer is not None:
            self._conclude()

    def _stop_killer(self) -> None:
        if self._killer is not None:
            self._killer.cancel()
            self._killer = None

    def _conclude(self) -> None:
        """All is known of its end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stop_killer()
        if self._peer is not None:
            self._peer.cut_off()
            self._peer = None
        self._waiting.clear()
        if self._output is not None:
            self._output.drain()
            self._output.close()
        self.last = tuple(self._lines)
        self._child = None
        self.is_over = True
        self._ended.set_result(None)
        self._events.on_end(self)
