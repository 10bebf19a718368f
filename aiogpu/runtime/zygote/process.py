"""The driver's side of one zygote process: its start, its forks of keepers, its end.

A zygote is a fresh interpreter that the driver starts, or a branch: a fork of another
zygote, which imports more. A pidfd reports the end of either, without a thread and
without SIGCHLD; only the parent learns the wait status, so the parent of a branch
reports it. `runtime.zygote.generations` decides about replacements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.linux.procfs import read_stat
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
from aiogpu.wire.messages import (
    Branch,
    BranchEnded,
    Check,
    Close,
    Hello,
    Importing,
    Keep,
    Lost,
    Message,
    Ready,
    Unfit,
)

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
        parent: the zygote that it is a branch of; None for a fresh interpreter.
        added: the modules that the branch imports in addition to its parent's.
        modules: those that it imports as a zygote, its parents' included; once it is
            ready, also those that others have brought, by their top level.
        depth: how many zygotes it descends from.
        slots: the slots whose keepers it has to fork or has forked.
        ready: its report once it can fork, None before.
        ready_at: loop time at which it became ready.
        started_at: loop time of its start.
        importing: the module that it imports or has imported last, "" for none.
        learner_since: loop time at which a worker began to import what this zygote
            imports; None for no such worker.
        unfit: its report of an unfit module, None for none.
        is_closing: it was told to end, or killed on purpose.
        status: the exit code or negated signal, once it has ended; 0 if unknown.
        unforked: why the parent could not fork it; "" for no such reason.
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
        generation: int,
        environment: Environment,
        modules: Modules,
        events: ZygoteEvents,
        on_lost_slot: Callable[[int, str], None],
        parent: Zygote | None = None,
    ) -> None:
        """Prepare; `start` starts the process.

        Args:
            loop: runs the timers.
            console: shows the zygote's output.
            config: the configuration that all zygotes of the node share.
            generation: the number.
            environment: variables that it starts with.
            modules: the modules that it imports.
            events: receives the zygote's events.
            on_lost_slot: called with the index of a slot whose keeper has died with
                all descendants, or could not be forked, and why not.
            parent: forks this zygote; None: the driver starts an interpreter.
        """
        self.generation = generation
        self.environment = environment
        self.preload, self.added = modules
        inherited = frozenset() if parent is None else parent.modules
        named = _with_packages((*self.preload, *self.added))
        self.modules: frozenset[str] = inherited.union(named)
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.slots: set[int] = set()
        self.ready: Ready | None = None
        self.ready_at: float | None = None
        self.started_at = 0.0
        self.importing = ""
        self.unfit: Unfit | None = None
        self.status = 0
        self.unforked = ""
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
        self._child: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._pidfd = -1
        self._branches: set[Zygote] = set()
        self._is_started = False
        self._hold: asyncio.TimerHandle | None = None
        self._unasked: set[int] = set()
        self.learner_since: float | None = None
        self._output: LinePipe | None = None
        self._peer: Peer | None = None
        self._checked = loop.time()
        self._has_exited = False
        self._is_disconnected = False
        self._is_retired = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = loop.create_future()

    def __repr__(self) -> str:
        origin = self._child if self.parent is None else self.parent
        return f"<Zygote {self.generation} of {origin!r}>"

    @property
    def is_started(self) -> bool:
        """True after the process was started successfully."""
        return self._is_started

    @property
    def left_to_import(self) -> Sequence[str]:
        """The added modules that it has not imported yet, the current one included."""
        if self.ready is not None:
            return ()
        begun = self.importing
        return self.added[self.added.index(begun) :] if begun else self.added

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
        stat = None if self.is_over or not self._pid else read_stat(self._pid)
        return stat is not None and stat.state not in ("T", "t", "Z", "X")

    def start(self, launched: Launched | None = None) -> None:
        """Start the process, or take over a process that was `launched` before.

        After an error, a process that was `launched` before is still the caller's.

        Raises:
            NodeStartError: there is no interpreter, or it cannot be started. Another
                attempt may succeed.
        """
        self.started_at = self._loop.time()
        if self.parent is not None:
            self.parent.fork(self)
            self._is_started = True
            self._set_timer((1 + len(self.added)) * IMPORT_LIMIT, self._on_late)
            return
        child, output = launched or launch(
            self._config, self.generation, self.environment, self.preload
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
        self._pid = child.pid
        self._pidfd = pidfd
        self._is_started = True
        self._loop.add_reader(pidfd, self._on_exit)
        # The zygote's own output: from preloaded modules, and tracebacks.
        label = f"zygote pid={child.pid}"
        self._output = LinePipe(self._loop, output, partial(self._show, label))
        self._set_timer((1 + len(self.preload)) * IMPORT_LIMIT, self._on_late)

    def _show(self, label: str, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        self.last.append(text)
        assert self._output is not None, text
        self._console.write(2, f"({label}) {text}", self._output)

    def fork(self, branch: Zygote) -> None:
        """Fork a branch, now or as soon as this zygote can fork.

        Raises:
            NodeStartError: this zygote has ended.
        """
        if self.is_over or self.is_closing:
            raise NodeStartError(f"zygote {self.generation} has ended")
        self._branches.add(branch)
        if self._peer is not None and self.ready is not None:
            self._peer.send(Branch(branch.generation, tuple(branch.added)))

    def on_hello(self, peer: Peer, hello: Hello) -> Recipient:
        """Accept the zygote's connection."""
        self._pid = hello.pid
        if self.parent is not None and not self._has_exited:
            # Without a descriptor, the parent's report or its own end is the only sign.
            with suppress(OSError):
                self._pidfd = os.pidfd_open(hello.pid)
                self._loop.add_reader(self._pidfd, self._on_exit)
        if self.is_closing:  # since before there was a descriptor to end it by
            self._kill()
        self._peer = peer
        return Recipient(self._on_messages, self._on_disconnected)

    def request_keeper(self, slot: int) -> None:
        """Request a keeper, now or as soon as the zygote can fork."""
        self.slots.add(slot)
        if self._peer is None or self.ready is None or self._hold is not None:
            self._unasked.add(slot)
        else:
            self._peer.send(Keep(slot))

    def has_asked(self, slot: int) -> bool:
        """Return True if the process was asked to fork the keeper of a slot."""
        return slot not in self._unasked

    def hold(self, until: float) -> None:
        """Ask for no keepers before a loop time: a zygote with more may come."""
        self._hold = self._loop.call_at(until, self._end_hold)

    def end_learning(self) -> None:
        """Note that the worker which imports the same has ended its task."""
        self.learner_since = None
        if self._hold is not None:
            self._hold.cancel()
            self._end_hold()

    def _end_hold(self) -> None:
        self._hold = None
        slots, self._unasked = self._unasked, set()
        if not self.is_over:
            for slot in slots:
                self.request_keeper(slot)

    def release(self, slot: int) -> None:
        """Forget a slot; a retired zygote ends with its last slot and branch."""
        self.slots.discard(slot)
        self._unasked.discard(slot)
        self._end_if_unused()

    def check(self) -> None:
        """Check for modules edited since their import, at most once a second."""
        if self._peer is None or self.ready is None:
            return
        now = self._loop.time()
        if now - self._checked >= CHECKS:
            self._checked = now
            self._peer.send(Check())

    def retire(self) -> None:
        """End as soon as it has no slots and no branches: it is not needed."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and not (self.slots or self._branches or self.is_over):
            self.end()

    def end(self) -> None:
        """End the process: in an orderly way if it reads messages, else by SIGKILL."""
        self.is_closing = True
        if not self._is_started or self.is_over:
            return
        if self._has_exited:
            self._finish()
        elif self._peer is not None and self.ready is not None:
            self._peer.send(Close())
            # The process may have been stopped by SIGSTOP.
            self._send_signal(signal.SIGCONT)
            self._set_timer(PATIENCE, self._kill)
        else:
            # The zygote is importing, and reads no messages until it is done.
            self._stop_timer()
            self._kill()

    def _kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        """Send a signal; a branch that has not connected yet gets none."""
        if self._pidfd >= 0 and not self._has_exited:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def close(self) -> None:
        """End the process and wait; its keepers must have been told to end first."""
        if not self.is_closing:
            self.end()
        if self._is_started:
            await self._ended

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Ready):
                self._on_ready(message)
            elif isinstance(message, Importing):
                self.importing = message.module
            elif isinstance(message, Unfit):
                self.unfit = message
            elif isinstance(message, BranchEnded):
                self._on_branch_end(message)
            elif isinstance(message, Lost):
                self._on_lost_slot(message.slot, message.unforked)
            else:
                self._events.on_message(self, message)

    def _on_ready(self, report: Ready) -> None:
        inherited = None if self.parent is None else self.parent.ready
        if inherited is not None:
            report = report._replace(
                modules=tuple({*inherited.modules, *report.modules}),
                variables=tuple({*inherited.variables, *report.variables}),
            )
        self.ready, self.ready_at = report, self._loop.time()
        self.modules = self.modules.union(report.modules)
        if not self._has_exited:
            self._stop_timer()
        for branch in list(self._branches):
            self.fork(branch)
        self._events.on_ready(self)
        if self._hold is None:
            self._end_hold()

    # The end: the process has exited, and its connection was read to the end

    def _on_late(self) -> None:
        self.is_late = True
        if self.parent is not None and self._peer is None:
            self._finish()  # it has never connected
        self._kill()

    def _on_branch_end(self, message: BranchEnded) -> None:
        for branch in list(self._branches):
            if branch.generation == message.generation:
                branch.on_exit_status(message)

    def on_exit_status(self, message: BranchEnded) -> None:
        """Handle the parent's report of this branch's end."""
        self.status = os.waitstatus_to_exitcode(message.status)
        self.unforked = message.unforked
        self._note_exit()

    def _on_exit(self) -> None:
        self._forget_pidfd()
        if self._child is not None:
            self.status = self._child.wait()
            self._note_exit()
        elif self.parent is None or self.parent.is_over:
            self._note_exit()  # no process reports the status

    def _forget_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _note_exit(self) -> None:
        if self._has_exited:
            return
        self._has_exited = True
        if self.is_closing or self._is_disconnected or self.unforked:
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
        if self.is_over:
            return
        self._stop_timer()
        self._forget_pidfd()
        if self._peer is not None:
            self._peer.cut_off()
            self._peer = None
        if self._output is not None:
            self._output.drain()
            self._output.close()
        self._child = None
        self.is_over = True
        for branch in list(self._branches):
            branch.on_parents_end()
        if self.parent is not None:
            self.parent.forget_branch(self)
        self._ended.set_result(None)
        self._events.on_end(self)

    def on_parents_end(self) -> None:
        """Handle that no process will report this branch's status."""
        if self._pidfd < 0:  # it has exited, or never connected
            self._note_exit()

    def forget_branch(self, branch: Zygote) -> None:
        """Forget a branch that has ended."""
        self._branches.discard(branch)
        self._end_if_unused()


def _with_packages(names: Iterable[str]) -> Iterator[str]:
    """Yield modules, and the packages that are imported before them."""
    for name in names:
        yield from accumulate(name.split("."), "{}.{}".format)
