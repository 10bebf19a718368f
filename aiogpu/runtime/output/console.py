"""Writes what tasks print to the driver's terminal, from a thread of its own.

A terminal may block for as long as it likes; the loop never waits for it. Every line
has a number, so that an answer can be held until the lines before it are out, and a
source that prints faster than the terminal takes is paused. On a node that other
programs have joined, a task's lines go to the program whose task it is (`Routes`), on
the connection by which its answer goes, and so ahead of the answer. Lines of no task
stay with the node.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord
from aiogpu.core.scheduler.state import SchedulerState
from aiogpu.runtime.output.task_log import TaskLog, batches
from aiogpu.wire.messages import PROGRESS, Printed, Warned

if TYPE_CHECKING:
    from aiogpu.runtime.connection import Peer


class Reader(Protocol):
    """A program that has joined.

    Attributes:
        peer: its connection, None once it has gone.
        shows: whether it wants to see what its tasks print.
        is_slow: it has not read what it was sent before.
    """

    peer: Peer | None
    shows: bool
    is_slow: bool


class Routes:
    """See above.

    Attributes:
        log: keeps every line of every task; None for nobody.
    """

    def __init__(
        self,
        node: SchedulerState,
        readers: Mapping[int, Reader],
        log: TaskLog | None = None,
    ) -> None:
        self.log = log
        self._node = node
        self._readers = readers
        self._paused: dict[int, set[Source]] = {}

    def __repr__(self) -> str:
        return f"<Routes {len(self._readers)}>"

    def take(
        self,
        stream: int,
        label: str,
        text: str,
        source: Source,
        worker: int,
        task: int,
        replaces: int = 0,
    ) -> bool:
        """Send a line to its owner; False if that is the node itself.

        Args:
            stream: 1 or 2, for stdout and stderr.
            label: who has printed it.
            text: the line.
            source: where it comes from; made to wait while its owner is slow.
            worker: the process.
            task: the task that has printed it; 0 for whichever runs there.
            replaces: the worker whose progress it replaces; 0 for none.
        """
        record = self._record(worker, task)
        if record is None or not record.client:
            return False
        client = record.client
        if self.log is not None and not text.endswith(PROGRESS):
            self.log.write(client, record.id, stream, label, text)
        reader = self._readers.get(client)
        if reader is None or reader.peer is None or not reader.shows:
            return True
        shown = text if text == PROGRESS else f"({label}) {text}"
        reader.peer.send_one(Printed(stream, shown, replaces))
        if reader.is_slow:
            self._paused.setdefault(client, set()).add(source)
            source.pause()
        return True

    def warn(self, client: int, text: str) -> bool:
        """Have a program log a warning; False if it is the node itself, or has gone."""
        reader = self._readers.get(client)
        if reader is None or reader.peer is None:
            return False
        reader.peer.send_one(Warned(text))
        return True

    def _record(self, worker: int, task: int) -> TaskRecord | None:
        if task:
            return self._node.tasks.get(TaskId(task))
        known = self._node.workers.get(WorkerId(worker))
        return None if known is None else known.task

    def resume(self, client: int) -> None:
        """A program has read what it was sent, or has gone."""
        for source in self._paused.pop(client, ()):
            source.resume()

    async def close(self) -> None:
        """Have what is left written; nothing more comes."""
        for client in list(self._paused):
            self.resume(client)
        if self.log is not None:
            await asyncio.to_thread(self.log.close)


_log: Final = logging.getLogger(__name__)


FULL: Final = 1 << 20
"""Bytes of lines that may wait for the terminal before their sources are paused."""


WIDE: Final = 200
"""Characters of progress that are shown where the width is not known."""


IDLE: Final = 0.5
"""Seconds after which it is asked whether a loop that has not turned runs at all."""


MOMENT: Final = 3e-3
"""Seconds that the loop waits for a terminal to take the rest of a line."""


class Source(Protocol):
    """Something that lines come from and that can be made to wait."""

    def pause(self) -> None:
        """Send no more lines for now."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Console:
    """The driver's terminal. Its thread starts with the first line.

    Attributes:
        written: number of the last line that is out.
        routes: has lines taken to other programs; None where there are none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_shown: bool) -> None:
        self.written = 0
        self.routes: Routes | None = None
        self._loop = loop
        self._is_shown = is_shown
        self._is_holding = True
        self._last = 0
        self._waiting = 0
        self._paused: set[Source] = set()
        self._order = count()
        self._after: list[tuple[int, int, Callable[[], None]]] = []
        self._lines: SimpleQueue[tuple[int, int, int, str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._drained: asyncio.Future[None] | None = None
        self._progress_line = ProgressLine()

    def write(self, stream: int, line: str, source: Source, worker: int = 0) -> int:
        """Write a line to stdout (1) or stderr (2) soon; gives its number.

        `worker`: whose progress on that stream the line replaces; 0 for nobody's.
        """
        if not self._is_shown:
            return self._last
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="aiogpu-console", daemon=True
            )
            self._thread.start()
        self._last += 1
        self._waiting += len(line)
        self._lines.put((self._last, stream, worker, line))
        if self._waiting > FULL and source not in self._paused:
            self._paused.add(source)
            source.pause()
        return self._last

    def after(self, number: int, action: Callable[[], None]) -> None:
        """Act once line `number` is out: at once if it is. Order is kept."""
        if number <= self.written or not self._is_holding:
            action()
        else:
            heappush(self._after, (number, next(self._order), action))

    def hold_nothing(self) -> None:
        """Let answers go ahead of their lines from now on; the node is closing."""
        self._is_holding = False
        self._release()

    async def drain(self, timeout: float) -> None:
        """Wait until all lines are out, or the time is up."""
        self._drained = self._loop.create_future()
        timer = self._loop.call_later(timeout, _finish, self._drained)
        if self.written == self._last:
            _finish(self._drained)
        await self._drained
        timer.cancel()

    def close(self) -> None:
        """Let the thread end after what it has been given."""
        self._lines.put(None)

    def _progress(self, number: int, size: int) -> None:
        self.written = number
        self._waiting -= size
        if self._drained is not None and number == self._last:
            _finish(self._drained)
        if self._paused and self._waiting < FULL // 2:
            for source in self._paused:
                source.resume()
            self._paused.clear()
        self._release()

    def _release(self) -> None:
        while self._after and (
            self._after[0][0] <= self.written or not self._is_holding
        ):
            heappop(self._after)[2]()

    def _write_all(self) -> None:
        """The thread: write whatever has come, then report it in one go."""
        for lines in batches(self._lines):
            for stream in (1, 2):
                if texts := [(by, line) for _, of, by, line in lines if of == stream]:
                    self._write(stream, texts)
            if lines:
                self._report(lines[-1][0], sum(len(line) for *_, line in lines))

    def _write(self, stream: int, lines: list[tuple[int, str]]) -> None:
        """Write to what `sys.stdout` or `sys.stderr` is now; a notebook changes it."""
        file = sys.stdout if stream == 1 else sys.stderr
        try:
            text = self._progress_line.over(stream, file, lines)
            raw = getattr(file, "buffer", None)
            if not text:
                pass
            elif isinstance(raw, io.FileIO):
                # Unbuffered: `print` writes its text and the end of its line one after
                # the other, and what another thread writes may come between the two.
                data = text.encode(file.encoding, "backslashreplace")
                UnbufferedWriter(self._loop, raw).write(data)
            else:
                _print(file, text)
        except Exception as error:  # noqa: BLE001 - a stream may raise anything
            # Closed, a broken pipe, or none at all; the tasks are not to suffer.
            _log.debug("! %d lines of output are lost: %s", len(lines), error)

    def _report(self, number: int, size: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._progress, number, size)
        except RuntimeError:
            _log.debug("x the loop closed before line %d was out", number)


class ProgressLine:
    """The last line of a screen, where tasks show progress; nowhere else is it shown.

    The cursor stands at its beginning, so whatever is printed goes over it. Each worker
    has one state for each of its streams, until it says otherwise. What is shown is the
    state that changed last, again below each line that takes its place.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], str] = {}
        self._file: TextIO | None = None
        self._length = 0

    def over(self, stream: int, file: TextIO, lines: list[tuple[int, str]]) -> str:
        """The text that shows lines, each of a worker, with the progress below them.

        A line of worker 0 belongs to nobody and leaves all states as they are.
        """
        is_screen = _is_screen(file)
        ended: list[str] = []
        for worker, line in lines:
            self._states.pop((worker, stream), None)
            if not line.endswith(PROGRESS):
                ended += (line, "\n")
            elif is_screen and line != PROGRESS:
                self._states[worker, stream] = line
        if not is_screen:
            # What is not on a disk may end up on the screen all the same, by `tee`, and
            # then after what is written here: the next state is shown, not this one.
            blank = self._blank(file) if ended and not _is_on_disk(file) else ""
            return "".join((blank, *ended))
        return "".join((self._blank(file), *ended, self._newest(file)))

    def _newest(self, file: TextIO) -> str:
        """The state that changed last, as much of it as has room in the line."""
        if not self._states:
            return ""
        line = next(reversed(self._states.values()))
        state = line[: min(len(line), _columns(file)) - 1]
        self._file, self._length = file, len(state)
        return f"{state}\r"

    def _blank(self, file: TextIO) -> str:
        """What takes away the state that is shown; done already on another screen."""
        shown_on, self._file = self._file, None
        if shown_on is None:
            return ""
        blank = f"{' ' * self._length}\r"
        with suppress(OSError, ValueError):  # it may be closed by now
            if _is_same(shown_on, file):
                return blank
            _print(shown_on, blank)
        return ""


def _is_screen(file: TextIO) -> bool:
    """Whether a carriage return goes back there: on a terminal, and in a notebook."""
    isatty = getattr(file, "isatty", None)  # a program's own stream may have none
    if isatty is not None and isatty():
        return True
    return type(file).__module__.startswith("ipykernel.")


def _is_same(one: TextIO, other: TextIO) -> bool:
    """Whether both are the same screen: stdout and stderr of one terminal are."""
    return one is other or (
        one.isatty()
        and other.isatty()
        and os.path.sameopenfile(one.fileno(), other.fileno())
    )


def _is_on_disk(file: TextIO) -> bool:
    """Return whether what is written there is on no screen."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        return False


def _columns(file: TextIO) -> int:
    if not file.isatty():
        return WIDE
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):  # not one of the kernel's, as in IDLE
        return WIDE


def _print(file: TextIO, text: str) -> None:
    try:
        file.write(text)
    except UnicodeEncodeError as error:
        raw = text.encode(error.encoding, "backslashreplace")
        file.write(raw.decode(error.encoding))
    file.flush()


class UnbufferedWriter:
    """Writes to an unbuffered stream between two steps of the program's event loop.

    The thread waits until the stream takes bytes; the loop, whose `print` must not be
    torn, then writes what is taken at once. A loop that does not run prints nothing, so
    the thread writes by itself; so it does where a write may block (a socket).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, file: io.FileIO) -> None:
        self._loop = loop
        self._file = file
        self._data = b""
        self._written = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._has_turned = threading.Event()
        self._poll = select.poll()
        self._descriptor = -1

    def write(self, data: bytes) -> None:
        """Write all of it; called by the thread.

        Raises:
            OSError: the stream takes no more.
        """
        self._data, self._written = data, 0
        self._descriptor = _that_never_blocks(self._file.fileno())
        try:
            if self._descriptor >= 0:
                self._poll.register(self._descriptor, select.POLLOUT)
                self._write_by_turns()
            with self._lock:  # a turn that comes late finds nothing to do
                if self._error is not None:
                    raise self._error
                while self._written < len(data):
                    self._written += self._file.write(data[self._written :]) or 0
        finally:
            with self._lock:
                self._data = b""
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _write_by_turns(self) -> None:
        """Have the loop write all, unless it has ended or does not run."""
        while self._written < len(self._data) and self._error is None:
            self._poll.poll()
            self._has_turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:
                return  # it is closed
            while not self._has_turned.wait(IDLE):
                if not self._loop.is_running():
                    return

    def _turn(self) -> None:
        """On the loop: write while that does not block."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            until = time.monotonic() + MOMENT
            while self._written < len(self._data) and self._write_some(until):
                pass
        except Exception as error:  # noqa: BLE001 - it is the thread's
            self._error = error
        finally:
            self._lock.release()
        self._has_turned.set()

    def _write_some(self, until: float) -> bool:
        """Write whole lines, as many bytes as a pipe takes all of or none.

        Returns:
            False if the thread is to wait until more is taken. Within a line, of which
            a terminal may take a part, this waits here until then at most.
        """
        start, most = self._written, self._written + select.PIPE_BUF
        end = self._data.rfind(b"\n", start, most) + 1 or most
        try:
            self._written += os.write(self._descriptor, self._data[start:end])
        except BlockingIOError:
            left = until - time.monotonic()
            if left <= 0 or start == 0 or self._data.endswith(b"\n", 0, start):
                return False
            return bool(self._poll.poll(left * 1000))
        return True


def _that_never_blocks(descriptor: int) -> int:
    """Another descriptor of the same file, which the caller closes; -1 if none can be.

    `O_NONBLOCK` belongs to an open file, which other processes may share, so a terminal
    or a pipe is opened anew. A file on a disk is not: it has a position.
    """
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.dup(descriptor)
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError as error:
        _log.debug("! no descriptor of its own for %d: %s", descriptor, error)
    return -1


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
