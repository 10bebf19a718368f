"""The driver's half of the zygote: start it, hear that it is ready, start it again.

Its death ends no running worker. It is started again a few times in a short while
at most; after that whatever still needs a new worker fails, and says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.memory.page import ControlPage
from aiogpu.runtime.console import Console
from aiogpu.runtime.lines import LinePipe
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.process import Process, start_interpreter
from aiogpu.runtime.transport import Peer
from aiogpu.wire.messages import Close, Hello, Keep, Lost, Message, Ready, Unfit
from aiogpu.wire.setup import Setup

_log: Final = logging.getLogger(__name__)

INTENSITY: Final = 3
LAST_WORD: Final = 0.5
"""Seconds after a zygote's end in which what it sent before is still read."""
PATIENCE: Final = 5.0
"""Seconds that a zygote gets to end by itself."""
PERIOD: Final = 10.0
"""At most `INTENSITY` restarts in `PERIOD` seconds."""


class Zygote:
    """The node's zygote, through all its lives.

    Attributes:
        problem: why there is none any more, None while there is or will be.
        generation: counts its lives; keepers of an earlier one are orphans.
        on_lost_slot: told of a slot whose keeper has died, with all below it.
        on_death: told when a life has ended and another begun, unless there is a
            problem; keepers that have not come must be asked for again.
        cgroup: the node's, chosen before the first start.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        node: str,
        directory: str,
        preload: Sequence[str],
    ) -> None:
        self.problem: Exception | None = None
        self.generation = 0
        self.on_lost_slot: Callable[[int], None] = _unheard
        self.on_death: Callable[[], None] = _unasked
        self._loop = loop
        self._console = console
        self._node = node
        self._directory = directory
        self._preload = list(preload)
        self.cgroup = NodeCgroup(loop)
        self._page = ControlPage.create()
        self.page = ControlPage.open(self._page)
        self._process: Process | None = None
        self._output: ZygoteOutput | None = None
        self._peer: Peer | None = None
        self._unfit: Unfit | None = None
        self._status = 0
        self._is_silent = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._waiting_slots: list[int] = []
        self._restarts: deque[float] = deque()
        self._ready = loop.create_future()
        self._ended = loop.create_future()

    def __repr__(self) -> str:
        return f"<Zygote {self._process!r}>"

    def start(self) -> None:
        """Start the process; raises `NodeStartError` if that is impossible."""
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise NodeStartError(f"no pipe for the zygote's output: {error}") from error
        setup = Setup(
            # Python ignores what else there may be, such as a Path.
            sys_path=[str(path) for path in sys.path if isinstance(path, str)],
            node=self._node,
            directory=self._directory,
            driver=os.getpid(),
            page=self._page,
            preload=self._preload,
            cgroup=self.cgroup.path,
        )
        try:
            child = start_interpreter(setup._asdict(), self._page, writing)
        except NodeStartError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._output = ZygoteOutput(self._loop, self._console, reading, child.pid)
        self._process = Process(self._loop, child, self._on_end)
        self._is_silent = False

    async def ready(self) -> None:
        """Wait until it may be asked to fork.

        Raises:
            PreloadError: a module to preload cannot be imported.
            NodeStartError: the process ended before.
        """
        await asyncio.shield(self._ready)

    def greeted(self, peer: Peer, _hello: Hello) -> None:
        """Take over the connection of a zygote that has greeted."""
        self._peer = peer
        peer.on_messages = self._on_messages
        peer.on_lost = self._on_last_word

    def keep(self, slot: int) -> None:
        """Ask for a keeper, now or as soon as there is a zygote."""
        if self._peer is None or not self._ready.done():
            self._waiting_slots.append(slot)
        else:
            self._peer.send(Keep(slot))

    def _on_messages(self, messages: list[Message]) -> None:
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        match message:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
                slots, self._waiting_slots = self._waiting_slots, []
                for slot in slots:
                    self.keep(slot)
            case Unfit():
                self._unfit = message
            case Lost(slot):
                self.on_lost_slot(slot)

    def _on_end(self, status: int) -> None:
        """The process has ended; what it said last may not have been read yet."""
        self._status = status
        if self._is_closing or self._is_silent:
            self._conclude()
        else:
            self._timer = self._loop.call_later(LAST_WORD, self._conclude)

    def _on_last_word(self) -> None:
        self._is_silent = True
        if self._timer is not None:
            self._conclude()

    def _conclude(self) -> None:
        """Decide what follows from an end of which all is known."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        status = self._status
        if self._peer is not None:
            self._peer.cut_off()
            self._peer = None
        self.generation += 1
        self._waiting_slots.clear()
        last = self._output.close() if self._output else ()
        self._process = None
        unfit, self._unfit = self._unfit, None
        if self._is_closing:
            self._ended.set_result(None)
        elif unfit is not None and unfit.is_missing:
            self._break(
                PreloadError(
                    f"init(preload=...) names {unfit.module!r}, which cannot be "
                    f"imported: {unfit.reason}. Install it, or leave it out."
                )
            )
        elif unfit is not None:
            _log.warning(
                "! %s is not preloaded: %s, and a process that does so cannot be "
                "forked safely; workers import it themselves",
                unfit.module,
                unfit.reason,
            )
            self._preload.remove(unfit.module)
            self._start_again()
        elif self._may_restart():
            _log.warning("! the zygote ended with status %d; starting another", status)
            self._start_again()
        else:
            words = "".join(f"\n  {line}" for line in last)
            self._break(
                NodeStartError(f"the zygote ended with status {status}:{words}")
            )

    def _start_again(self) -> None:
        try:
            self.start()
        except NodeStartError as error:
            self._break(error)
        else:
            self.on_death()

    def _may_restart(self) -> bool:
        if not self._ready.done():
            return False
        now = self._loop.time()
        while self._restarts and self._restarts[0] < now - PERIOD:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= INTENSITY

    def _break(self, problem: Exception) -> None:
        self.problem = problem
        if not self._ready.done():
            self._ready.set_exception(problem)
            self._ready.exception()
        if not self._ended.done():
            self._ended.set_result(None)
        self.on_death()

    async def close(self) -> None:
        """End the process and wait for it; keepers must have been told before."""
        self._is_closing = True
        if self._timer is not None:
            self._conclude()
        if self._process is not None:
            if self._peer is not None and self._ready.done():
                self._peer.send(Close())
            else:
                # It is still importing, and reads nothing until it has done so.
                self._process.kill()
            await asyncio.wait([self._ended], timeout=PATIENCE)
        if self._process is not None:
            self._process.kill()
            await self._ended
        self.page.close()
        os.close(self._page)


class ZygoteOutput:
    """What the zygote itself writes: the prints of preloaded modules, tracebacks."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, console: Console, pipe: int, pid: int
    ) -> None:
        self._console = console
        self._label = f"zygote pid={pid}"
        self._last: deque[str] = deque(maxlen=20)
        self._pipe = LinePipe(loop, pipe, self._show)

    def _show(self, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        self._last.append(text)
        self._console.write(2, f"({self._label}) {text}", self)

    def pause(self) -> None:
        """Read no more for now."""
        self._pipe.pause()

    def resume(self) -> None:
        """Read again."""
        self._pipe.resume()

    def close(self) -> tuple[str, ...]:
        """Read the rest and close; gives the last lines."""
        self._pipe.drain()
        self._pipe.close()
        return tuple(self._last)


def _unheard(_slot: int) -> None:
    """Nobody keeps slots yet."""


def _unasked() -> None:
    """Nobody depends on the zygote yet."""
