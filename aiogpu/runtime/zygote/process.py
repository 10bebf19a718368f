"""The driver's side of one zygote process: its start, its forks of keepers, its end.

A pidfd reports the end of the process, without a thread and without SIGCHLD.
`runtime.zygote.generations` decides about replacements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.linux.procfs import read_stat
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.runtime.descriptors import descriptor_limit
from aiogpu.runtime.output import Console, LinePipe
from aiogpu.runtime.zygote.config import (
    Launched,
    Modules,
    ZygoteConfig,
    launch,
    program_of,
)
from aiogpu.wire.messages import Check, Close, Keep, Lost, Message, Ready, Unfit

CHECKS: Final = 1.0
"""Least seconds between two checks if imported modules were edited."""


IMPORT_LIMIT: Final = 60.0
"""Seconds that a zygote has for each module that it imports."""


LAST_WORD: Final = 0.5
"""Seconds after a zygote's end in which its last messages are still read."""


PATIENCE: Final = 5.0
"""Seconds that a zygote has to end in an orderly way."""


class ZygoteEvents(Protocol):
    """The receiver of a zygote's events."""

    def on_ready(self, zygote: Zygote) -> None:
        """Handle that the zygote can fork."""

    def on_end(self, zygote: Zygote) -> None:
        """Handle that the zygote has ended and all its messages were read."""

    def on_message(self, zygote: Zygote, message: Message) -> None:
        """Handle any other message of the zygote."""


class Zygote:
    """One zygote process, from its start to its end.

    Attributes:
        generation: the number, unique within the node.
        environment: variables that it starts with, in addition to the program's.
        preload: modules that the user has named.
        learnt: modules that were learnt from workers.
        proven: learnt modules that an earlier zygote imported without harm.
        slots: the slots whose keepers it has to fork or has forked.
        ready: its report once it can fork, None before.
        ready_at: loop time at which it became ready.
        unfit: its report of an unfit module, None for none.
        is_closing: it was told to end, or killed on purpose.
        status: the wait status, once it has ended.
        last: the last lines of output.
        is_over: it has ended, and all its messages were read.
        is_late: it was killed because its imports did not end.
        importing: the module whose import it had not ended, "" for none.
        is_stale: a module that it has imported was edited since.
        problem: why no zygote has replaced it; None if it lives or was replaced.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        config: ZygoteConfig,
        page: ControlPage,
        generation: int,
        environment: Environment,
        modules: Modules,
        events: ZygoteEvents,
        on_lost_slot: Callable[[int, str], None],
    ) -> None:
        """Prepare; `start` starts the process.

        Args:
            loop: runs the timers.
            console: shows the zygote's output.
            config: the configuration that all zygotes of the node share.
            page: the control page.
            generation: the number.
            environment: variables that it starts with.
            modules: the modules that it imports.
            events: receives the zygote's events.
            on_lost_slot: called with the index of a slot whose keeper has died with
                all descendants, or could not be forked, and why not.
        """
        self.generation = generation
        self.environment = environment
        self.preload, self.learnt, self.proven = self._modules = modules
        self.slots: set[int] = set()
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        self.unfit: Unfit | None = None
        self.status = 0
        self.last: deque[str] = deque(maxlen=20)
        self.is_closing = False
        self.is_over = False
        self.is_late = False
        self.importing = ""
        self.is_stale = False
        self.problem: Exception | None = None
        self._events = events
        self._on_lost_slot = on_lost_slot
        self._loop = loop
        self._console = console
        self._config = config
        self._page = page
        self._child: subprocess.Popen[bytes] | None = None
        self._output: LinePipe | None = None
        self._peer: Peer | None = None
        self._checked = loop.time()
        self._has_exited = False
        self._is_disconnected = False
        self._is_retired = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = loop.create_future()

    def __repr__(self) -> str:
        return f"<Zygote {self.generation} {self._child!r}>"

    @property
    def is_started(self) -> bool:
        """True after the process was started successfully."""
        return self._output is not None

    @property
    def executable(self) -> str:
        """The interpreter that it is started with."""
        program = self._config.programs.get(program_of(self.environment))
        return sys.executable if program is None else program.executable

    @property
    def takes_work(self) -> bool:
        """True if it may fork another worker."""
        return not (self.is_over or self._is_retired or self.is_closing)

    @property
    def can_report(self) -> bool:
        """True if it can report ended keepers: it lives, and was not stopped."""
        stat = None if self._child is None else read_stat(self._child.pid)
        return stat is not None and stat.state not in ("T", "t", "Z", "X")

    def start(self, launched: Launched | None = None) -> None:
        """Start the process, or take over a process that was `launched` before.

        After an error, a process that was `launched` before is still the caller's.

        Raises:
            NodeStartError: there is no interpreter, or it cannot be started. Another
                attempt may succeed.
        """
        child, output = launched or launch(
            self._config, self.generation, self.environment, self._modules
        )
        # Before the first fork, since workers inherit the limit.
        descriptor_limit.hand_down(child.pid)
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            if launched is None:  # else its owner ends it
                child.kill()
                child.wait()
                os.close(output)
            from aiogpu.linux.denied import why_refused

            why = why_refused("pidfd_open", "5.3", error)
            raise NodeStartError(f"a zygote cannot be watched: {why}") from error
        self._child = child
        self._loop.add_reader(pidfd, self._reap, child, pidfd)
        # The zygote's own output: from preloaded modules, and tracebacks.
        label = f"zygote pid={child.pid}"
        self._output = LinePipe(self._loop, output, partial(self._show, label))
        # A learnt module may be imported twice, first by a probe process.
        count = 1 + len(self.preload) + 2 * len(self.learnt)
        self._set_timer(count * IMPORT_LIMIT, self._on_late)

    def _show(self, label: str, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        self.last.append(text)
        assert self._output is not None, text
        self._console.write(2, f"({label}) {text}", self._output)

    def on_hello(self, peer: Peer) -> Recipient:
        """Accept the zygote's connection."""
        self._peer = peer
        return Recipient(self._on_messages, self._on_disconnected)

    def request_keeper(self, slot: int) -> None:
        """Request a keeper, now or as soon as the zygote can fork."""
        self.slots.add(slot)
        if self._peer is not None and self.ready is not None:
            self._peer.send(Keep(slot))

    def release(self, slot: int) -> None:
        """Forget a slot; a retired zygote ends with its last slot."""
        self.slots.discard(slot)
        if self._is_retired and not self.slots:
            self.end()

    def check(self) -> None:
        """Check for modules edited since their import, at most once a second."""
        if self._peer is None or self.ready is None:
            return
        now = self._loop.time()
        if now - self._checked >= CHECKS:
            self._checked = now
            self._peer.send(Check())

    def retire(self) -> None:
        """End as soon as it has no slots: another zygote has replaced it."""
        self._is_retired = True
        if not self.slots:
            self.end()

    def end(self) -> None:
        """End the process: in an orderly way if it reads messages, else by SIGKILL."""
        self.is_closing = True
        if self._child is None:
            return
        if self._has_exited:
            self._finish()
        elif self._peer is not None and self.ready is not None:
            self._peer.send(Close())
            # The process may have been stopped by SIGSTOP.
            self._child.send_signal(signal.SIGCONT)
            self._set_timer(PATIENCE, self._child.kill)
        else:
            # The zygote is importing, and reads no messages until it is done.
            self._stop_timer()
            self._child.kill()

    async def close(self) -> None:
        """End the process and wait; its keepers must have been told to end first."""
        if not self.is_closing:
            self.end()
        if self._child is not None:
            await self._ended

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                self.ready, self.ready_at = message, self._loop.time()
                if not self._has_exited:
                    self._stop_timer()
                for slot in list(self.slots):
                    self.request_keeper(slot)
                self._events.on_ready(self)
            elif isinstance(message, Unfit):
                self.unfit = message
            elif isinstance(message, Lost):
                self._on_lost_slot(message.slot, message.unforked)
            else:
                self._events.on_message(self, message)

    # The end: the process has exited, and its connection was read to the end

    def _on_late(self) -> None:
        self.is_late = True
        if self._child is not None:
            self._child.kill()

    def _reap(self, child: subprocess.Popen[bytes], pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self.status = child.wait()
        self._has_exited = True
        if self.is_closing or self._is_disconnected:
            self._finish()
        else:
            self._set_timer(LAST_WORD, self._finish)

    def _on_disconnected(self) -> None:
        self._is_disconnected = True
        if self._has_exited:
            self._finish()

    def _set_timer(self, seconds: float, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _finish(self) -> None:
        self._stop_timer()
        if self._peer is not None:
            self._peer.cut_off()
            self._peer = None
        if self._output is not None:
            self._output.drain()
            self._output.close()
        self._child = None
        self.is_over = True
        self.importing = self._page.importing(
            self._page.place_of_zygote(self.generation)
        )
        self._ended.set_result(None)
        self._events.on_end(self)
