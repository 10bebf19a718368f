"""Output of tasks: from pipes and connections of workers to a terminal or a log.

Bytes that a worker writes to descriptors 1 and 2 arrive in two named pipes
(`LinePipe`). Output of `print` in tasks arrives as messages, on the same connection as
the answer, and so before it. `Output` merges both for one slot; `Console` writes to the
terminal; on a shared node `Routes` sends lines to the task's owner and to `TaskLog`.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import logging
import os
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count, groupby
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, Self, TextIO, TypeVar, cast

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord
from aiogpu.core.scheduler.state import SchedulerState
from aiogpu.linux.sockets import is_own, open_checked
from aiogpu.runtime.connection import Peer
from aiogpu.wire.codec import unpack
from aiogpu.wire.messages import PROGRESS, Logged, Printed, Warned, visible

_log: Final = logging.getLogger(__name__)


class Source(Protocol):
    """A source of lines that can be paused."""

    def pause(self) -> None:
        """Send no more lines until `resume`."""

    def resume(self) -> None:
        """Send lines again."""


def task_printing(node: SchedulerState, worker: int, task: int) -> TaskRecord | None:
    """Return the task that printed a line; None if unknown, or if it has ended.

    `task` is 0 for the worker's current task.
    """
    if task:
        return node.tasks.get(TaskId(task))
    known = node.workers.get(WorkerId(worker))
    return None if known is None else known.task


def root_of(record: TaskRecord | None) -> int:
    """Return the number of the task that the program started for this one.

    0 for an actor and its tasks: its calls may come from anywhere.
    """
    while record is not None and record.kin is not None and record.kin.parent:
        record = record.kin.parent
    return 0 if record is None or record.spec.is_endless else record.id


T = TypeVar("T")


def batches(queue: SimpleQueue[T | None]) -> Iterator[list[T]]:
    """Yield the queued entries in batches, waiting for each batch, until a None."""
    is_open = True
    while is_open:
        taken = [queue.get()]
        while not queue.empty():
            taken.append(queue.get())
        entries = [entry for entry in taken if entry is not None]
        is_open = len(entries) == len(taken)
        yield entries


FILE: Final = "tasks.log"


SIZE: Final = 8 << 20
"""Bytes of one file; a full file is renamed to `tasks.log.1`, and so on."""


LOGS_KEPT: Final = 4
"""Old files kept in addition to the current file."""


WAITING: Final = 8 << 20
"""Most characters that wait for the disk; further lines are lost."""


PATIENCE: Final = 2.0
"""Most seconds to write the last lines when the log is closed."""


STREAMS: Final = {1: "out", 2: "err"}


_OVERHEAD: Final = 64
"""Characters that each line counts in addition to its text."""


class LogLine(NamedTuple):
    """A line that a task has printed.

    Attributes:
        at: seconds since the epoch.
        client: the program that owns the task.
        task: the task.
        stream: 1 for stdout, 2 for stderr.
        label: the name of the task or worker.
        text: the line.
    """

    at: float
    client: int
    task: int
    stream: int
    label: str
    text: str

    def __str__(self) -> str:
        whole, part = divmod(self.at, 1)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(whole))
        stream = STREAMS.get(self.stream, "out")
        return (
            f"{moment}.{int(part * 1000):03} client={self.client} task={self.task} "
            f"{stream} ({self.label}) {self.text}"
        )


class TaskLog:
    """The log of tasks' output, in files of bounded size.

    Its thread starts with the first line. If the disk is full, slow or gone, lines are
    lost and counted, and the count is logged later: the loop never waits for the disk.

    Attributes:
        lost: lines lost since the last batch because too many waited.
    """

    def __init__(self, directory: str, size: int = SIZE, kept: int = LOGS_KEPT) -> None:
        self.lost = 0
        self._pages = Pages(f"{directory}/{FILE}", size, kept)
        self._waiting = 0
        self._lines: SimpleQueue[LogLine | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TaskLog {self._pages.path}>"

    def write(self, client: int, task: int, stream: int, label: str, text: str) -> None:
        """Add a line; see `LogLine`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="aiogpu-task-log", daemon=True
            )
            self._thread.start()
            header = f"node pid={os.getpid()}", "task numbers restart here"
            self._lines.put(LogLine(time.time(), 0, 0, 1, *header))
        size = len(text) + _OVERHEAD
        with self._lock:
            if self._waiting + size > WAITING:
                self.lost += 1
                return
            self._waiting += size
        self._lines.put(LogLine(time.time(), client, task, stream, label, text))

    def close(self) -> None:
        """Write the waiting lines, for at most `PATIENCE` seconds."""
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _write_all(self) -> None:
        for entries in batches(self._lines):
            with self._lock:
                self._waiting -= sum(len(e.text) + _OVERHEAD for e in entries)
                lost, self.lost = self.lost, 0
            self._pages.write(list(map(str, entries)), lost)
        self._pages.close()


class Pages:
    """The files of the log, mode 0600; used by one thread.

    A `RotatingFileHandler` neither counts the lines that it could not write nor drops
    them from its buffer.

    Attributes:
        path: the path of the current file.
    """

    def __init__(self, path: str, size: int, kept: int) -> None:
        self.path = path
        self._limit = size
        self._kept = kept
        self._size = 0
        self._descriptor = -1
        self._lost = 0
        self._has_warned = False

    def write(self, lines: list[str], lost: int = 0) -> None:
        """Write lines; `lost` is the number of lines missing before them."""
        self._lost += lost
        done = 0
        try:
            if self._lost:
                self._put(f"! {self._lost} lines are missing here: no room for them")
                self._lost = 0
            for line in lines:
                self._put(line)
                done += 1
        except OSError as error:
            self._lost += len(lines) - done
            self.close()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("! lines of tasks are missing in the log: %s", error)

    def _put(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        if self._descriptor < 0:
            self._open()
        if self._size and self._size + len(data) > self._limit:
            self._rotate()
        self._size += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _rotate(self) -> None:
        """Start a new file."""
        self.close()
        for number in range(self._kept, 0, -1):
            older = f"{self.path}.{number - 1}" if number > 1 else self.path
            with suppress(FileNotFoundError):
                os.replace(older, f"{self.path}.{number}")
        self._open()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


class Reader(Protocol):
    """A program that has joined.

    Attributes:
        peer: its connection, None once it has disconnected.
        shows: it wants the output of its tasks.
        is_slow: it has not read what it was sent before.
    """

    peer: Peer | None
    shows: bool
    is_slow: bool


class Routes:
    """Sends the lines of tasks to the programs that own the tasks.

    Lines use the same connection as the answer, and so arrive before it. Lines without
    a task stay with the node.

    Args:
        node: the tasks and workers.
        readers: the programs.
        log: stores the lines; None for no log.
        number_of: returns the program's own number of a task, 0 if it has ended.

    Attributes:
        log: stores all lines of other programs' tasks; None for no log.
    """

    def __init__(
        self,
        node: SchedulerState,
        readers: Mapping[int, Reader],
        log: TaskLog | None = None,
        number_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.log = log
        self._number_of = number_of
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
        fields: bytes = b"",
    ) -> bool:
        """Send a line to its owner; return False if the owner is the node itself.

        Args:
            stream: 1 for stdout, 2 for stderr.
            label: the name of the task or worker.
            text: the line.
            source: the source of the line, paused while the owner is slow.
            worker: the worker that printed the line.
            task: the task that printed the line; 0 for the worker's current task.
            replaces: the worker whose progress the line replaces; 0 for none.
            fields: the packed attributes of a `logging` record with this text.
        """
        record = task_printing(self._node, worker, task)
        if record is None or not record.client:
            return False
        client = record.client
        if self.log is not None and not text.endswith(PROGRESS):
            for line in text.split("\n"):
                self.log.write(client, record.id, stream, label, line)
        reader = self._readers.get(client)
        if reader is None or reader.peer is None or not reader.shows:
            return True
        shown = text if text == PROGRESS else f"({label}) {text}"
        child = self._number_of(root_of(record))
        reader.peer.send_one(
            Logged(label, text, fields, child)
            if fields
            else Printed(stream, shown, replaces, child)
        )
        if reader.is_slow:
            self._paused.setdefault(client, set()).add(source)
            source.pause()
        return True

    def warn(self, client: int, text: str) -> bool:
        """Send a program a warning to log; return False if it is not connected."""
        reader = self._readers.get(client)
        if reader is None or reader.peer is None:
            return False
        reader.peer.send_one(Warned(text))
        return True

    def resume(self, client: int) -> None:
        """Resume the sources for a program that has caught up or disconnected."""
        for source in self._paused.pop(client, ()):
            source.resume()

    async def close(self) -> None:
        """Resume all sources and close the log."""
        for client in list(self._paused):
            self.resume(client)
        if self.log is not None:
            await asyncio.to_thread(self.log.close)


FULL: Final = 1 << 20
"""Characters that may wait for the terminal before their sources are paused."""


WIDE: Final = 200
"""Characters of progress shown on a terminal of unknown width."""


IDLE: Final = 0.5
"""Seconds that the thread waits for a turn of the loop before it checks that the loop
runs."""


MOMENT: Final = 3e-3
"""Most seconds that the loop waits for a terminal to accept the rest of a line."""


class LoggedText(str):
    """The text of a `logging` record of a task.

    Attributes:
        label: the name of the task, for printed lines.
        packed: the record's attributes; see `wire.messages.Record`.
    """

    def __new__(cls, label: str, text: str, packed: bytes) -> Self:
        """Make a text with the label and the attributes of its record."""
        logged = super().__new__(cls, text)
        logged.label, logged.packed = label, packed
        return logged

    label: str
    packed: bytes

    def fields(self) -> dict[str, Any]:
        """Return the record's attributes.

        Raises:
            ProtocolError: they cannot be read.
        """
        (fields,) = cast("tuple[dict[str, Any]]", unpack(self.packed))
        return fields

    def lines(self) -> list[str]:
        """Return the lines to print."""
        return [f"({self.label}) {line}" for line in self.split("\n")]


class Line(NamedTuple):
    """A line for the terminal; see `Console.write`."""

    worker: int
    text: str
    cell: Any


def _output_under(cell: Any) -> AbstractContextManager[None]:
    if cell is None:
        return nullcontext()
    from aiogpu.notebook.cells import output_under

    return output_under(cell)


def _kind_and_place(line: Line) -> tuple[bool, int]:
    """Return what must be equal for lines that are written together."""
    return type(line.text) is LoggedText, id(line.cell)


class Console:
    """The driver's terminal, written by a thread, since a terminal may block.

    The thread starts with the first line. Lines are numbered, so that an answer can be
    delayed until the lines before it are written. A source that prints faster than the
    terminal is paused.

    Attributes:
        written: the number of the last written line.
        routes: sends lines to other programs; None if no program can join.
        cell_of: returns the notebook's cell of the task that printed, by worker and
            task; None outside notebooks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_shown: bool) -> None:
        self.written = 0
        self.routes: Routes | None = None
        self.cell_of: Callable[[int, int], Any] | None = None
        self._loop = loop
        self._is_shown = is_shown
        self._is_holding = True
        self._last = 0
        self._waiting = 0
        self._paused: set[Source] = set()
        self._order = count()
        self._after: list[tuple[int, int, Callable[[], None]]] = []
        self._lines: SimpleQueue[tuple[int, int, Line] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._drained: asyncio.Future[None] | None = None
        self._progress_line = ProgressLine()

    def write(
        self, stream: int, text: str, source: Source, worker: int = 0, cell: Any = None
    ) -> int:
        """Queue a line for stdout (1) or stderr (2); return its number.

        Args:
            stream: the stream.
            text: the line.
            source: paused while the terminal is slow.
            worker: the worker whose progress the line replaces; 0 for none.
            cell: the cell of a notebook under which it is shown; None for the running
                cell.
        """
        if not self._is_shown:
            return self._last
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="aiogpu-console", daemon=True
            )
            self._thread.start()
        self._last += 1
        self._waiting += len(text)
        self._lines.put((self._last, stream, Line(worker, text, cell)))
        if self._waiting > FULL and source not in self._paused:
            self._paused.add(source)
            source.pause()
        return self._last

    def after(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` once line `number` is written, maybe now. Order is kept."""
        if number <= self.written or not self._is_holding:
            action()
        else:
            heappush(self._after, (number, next(self._order), action))

    def hold_nothing(self) -> None:
        """Stop delaying answers: the node is closing."""
        self._is_holding = False
        self._release()

    async def drain(self, timeout: float) -> None:
        """Wait until all lines are written, for at most `timeout` seconds."""
        self._drained = self._loop.create_future()
        timer = self._loop.call_later(timeout, _finish, self._drained)
        if self.written == self._last:
            _finish(self._drained)
        await self._drained
        timer.cancel()

    def close(self) -> None:
        """End the thread after the queued lines."""
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
        """Write and report each batch; runs on the thread."""
        for lines in batches(self._lines):
            for stream in (1, 2):
                texts = [line for _, of, line in lines if of == stream]
                for (are_logged, _), group in groupby(texts, _kind_and_place):
                    shown = [*group]
                    with _output_under(shown[0].cell):
                        if are_logged:
                            for line in shown:
                                self._log(cast("LoggedText", line.text))
                        else:
                            self._write(stream, [line[:2] for line in shown])
            if lines:
                self._report(lines[-1][0], sum(len(line.text) for *_, line in lines))

    def _log(self, text: LoggedText) -> None:
        """Pass a record to the program's own logging, or print its text."""
        try:
            record = logging.makeLogRecord(text.fields())
            logger = logging.getLogger(record.name)
            if not logger.isEnabledFor(record.levelno):
                return
            if not logger.hasHandlers():
                self._write(2, [(0, line) for line in text.lines()])
                return
            # Hide progress first: a handler may write to the same terminal.
            self._write(2, [], hides=True)
            logger.handle(record)
            self._write(2, [])
        except Exception as error:  # noqa: BLE001 - a filter may raise anything
            _log.debug("! a record of a task is lost: %s", error)

    def _write(
        self, stream: int, lines: list[tuple[int, str]], hides: bool = False
    ) -> None:
        """Write to the current `sys.stdout` or `sys.stderr`; notebooks replace them.

        `hides`: erase the progress.
        """
        file = sys.stdout if stream == 1 else sys.stderr
        try:
            if hides:
                text = self._progress_line.hide(file)
            else:
                text = self._progress_line.over(stream, file, lines)
            # A stream in front of it, as a progress bar has, arranges lines itself.
            raw = file.buffer if isinstance(file, io.TextIOWrapper) else None
            if not text:
                pass
            elif isinstance(raw, io.FileIO):
                # Unbuffered: `print` writes text and line end separately, and another
                # thread may write in between.
                data = text.encode(file.encoding, "backslashreplace")
                _write_between_turns(self._loop, raw, data)
            else:
                _print(file, text)
        except Exception as error:  # noqa: BLE001 - a stream may raise anything
            # A closed stream, a broken pipe, or no stream: tasks go on.
            _log.debug("! %d lines of output are lost: %s", len(lines), error)

    def _report(self, number: int, size: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._progress, number, size)
        except RuntimeError:
            _log.debug("x the loop closed before line %d was out", number)


class ProgressLine:
    """The last line of a terminal, which shows the progress of tasks.

    The cursor stays at the start of the line, so that all other output overwrites it.
    Each worker has one progress state per stream, until it prints something else. The
    state that changed last is shown, and again below each line that overwrites it.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], str] = {}
        self._file: TextIO | None = None
        self._length = 0

    def over(self, stream: int, file: TextIO, lines: list[tuple[int, str]]) -> str:
        """Return the text that prints lines of workers, with the progress below.

        A line of worker 0 leaves all states unchanged.
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
            # The text may reach the screen through a pipe (`tee`), but not through a
            # file. So erase the progress; the next state will be shown.
            blank = self._blank(file) if ended and not _is_on_disk(file) else ""
            return "".join((blank, *ended))
        return "".join((self._blank(file), *ended, self._newest(file)))

    def hide(self, file: TextIO) -> str:
        """Return the text that erases the progress; `over` shows it again."""
        return self._blank(file)

    def _newest(self, file: TextIO) -> str:
        """Return the state that changed last, cut to the width of the line."""
        if not self._states:
            return ""
        line = next(reversed(self._states.values()))
        state = line[: min(len(line), _columns(file)) - 1]
        self._file, self._length = file, len(state)
        return f"{state}\r"

    def _blank(self, file: TextIO) -> str:
        """Return the text that erases the shown state, or erase it elsewhere."""
        shown_on, self._file = self._file, None
        if shown_on is None:
            return ""
        blank = f"{' ' * self._length}\r"
        with suppress(OSError, ValueError):  # the stream may have been closed
            if _is_same(shown_on, file):
                return blank
            _print(shown_on, blank)
        return ""


def _is_screen(file: TextIO) -> bool:
    """Return True if carriage returns work: in a terminal or a notebook."""
    isatty = getattr(file, "isatty", None)  # a program's own stream may have none
    if isatty is not None and isatty():
        return True
    return type(file).__module__.startswith("ipykernel.")


def _is_same(first: TextIO, second: TextIO) -> bool:
    """Return True if both are the same screen, as stdout and stderr often are."""
    return first is second or (
        first.isatty()
        and second.isatty()
        and os.path.sameopenfile(first.fileno(), second.fileno())
    )


def _is_on_disk(file: TextIO) -> bool:
    """Return True if the stream writes to a regular file."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        return False


def _columns(file: TextIO) -> int:
    if not file.isatty():
        return WIDE
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):  # no terminal of the kernel, as in IDLE
        return WIDE


def _print(file: TextIO, text: str) -> None:
    try:
        file.write(text)
    except UnicodeEncodeError as error:
        raw = text.encode(error.encoding, "backslashreplace")
        file.write(raw.decode(error.encoding))
    file.flush()


def _write_between_turns(
    loop: asyncio.AbstractEventLoop, file: io.FileIO, data: bytes
) -> None:
    """Write to an unbuffered stream between two steps of the program's event loop.

    Lines must not be written into the middle of a `print` on the loop. So this thread
    waits until the stream accepts bytes, and the loop writes as many as it accepts at
    once. This thread itself writes if the loop does not run, and so prints nothing, or
    if a write may block (a socket).

    Raises:
        OSError: the stream accepts no more.
    """
    descriptor, written = _open_nonblocking(file.fileno()), 0
    try:
        while descriptor >= 0 and written < len(data):
            _wait_until_writable(descriptor)
            turn: Future[int] = Future()
            try:
                loop.call_soon_threadsafe(_write_some, turn, descriptor, data, written)
            except RuntimeError:
                break  # the loop is closed
            while not wait((turn,), IDLE).done:
                # A loop that runs again later finds its turn cancelled.
                if not loop.is_running() and turn.cancel():
                    break
            if turn.cancelled():
                break
            written = turn.result()
        while written < len(data):
            written += file.write(data[written:]) or 0
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write_some(turn: Future[int], descriptor: int, data: bytes, start: int) -> None:
    """Write without blocking, on the loop; set the result to the position reached.

    Writes whole lines, at most as many bytes as a pipe accepts atomically. If a
    terminal accepts only part of a line, waits for the rest for at most `MOMENT`.
    """
    if not turn.set_running_or_notify_cancel():
        return
    written, until = start, time.monotonic() + MOMENT
    try:
        while written < len(data):
            most = written + select.PIPE_BUF
            end = data.rfind(b"\n", written, most) + 1 or most
            try:
                written += os.write(descriptor, data[written:end])
            except BlockingIOError:
                remaining = until - time.monotonic()
                is_line_begun = written and not data.endswith(b"\n", 0, written)
                if remaining <= 0 or not is_line_begun:
                    break
                _wait_until_writable(descriptor, remaining * 1000)
        turn.set_result(written)
    except Exception as error:  # noqa: BLE001 - raised again on the thread
        turn.set_exception(error)


def _wait_until_writable(descriptor: int, milliseconds: float | None = None) -> None:
    poll = select.poll()  # `select` takes no descriptor above 1023
    poll.register(descriptor, select.POLLOUT)
    poll.poll(milliseconds)


def _open_nonblocking(descriptor: int) -> int:
    """Return a non-blocking descriptor of the same file; -1 if that is impossible.

    `O_NONBLOCK` belongs to the open file description, which other processes may share.
    So a terminal or a pipe is opened again. A regular file is not, since it would lose
    its position.
    """
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.dup(descriptor)
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError as error:
        _log.debug("! cannot reopen descriptor %d: %s", descriptor, error)
    return -1


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


CHUNK: Final = 1 << 16
"""Bytes of one read, and the length at which a line is split."""


class LinePipe:
    """The read end of a pipe; `show` gets each line without its line end.

    Attributes:
        partial: the bytes since the last end of line.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        show: Callable[[bytes], None],
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._show = show
        self._is_closed = False
        self.partial = b""
        os.set_blocking(descriptor, False)
        self.resume()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def pause(self) -> None:
        """Stop reading until `resume`; writers block when the pipe is full."""
        self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read whenever there are bytes."""
        if not self._is_closed:
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> int:
        """Read once; return the number of bytes."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return 0
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self.partial) >= CHUNK or not data:
            self.end_line()
        if not data:
            self.pause()
        return len(data)

    def end_line(self) -> None:
        """Show the bytes since the last end of line as a line, if there are any."""
        if self.partial:
            line, self.partial = self.partial, b""
            self._show(line)

    def drain(self) -> None:
        """Read the current content of the pipe, even if writers keep it full."""
        available = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        (rest,) = struct.unpack("i", available)
        while rest > 0 and (count := self._read()):
            rest -= count

    def close(self) -> None:
        """Close the descriptor; a later `resume` does nothing."""
        self._is_closed = True
        self.pause()
        os.close(self._descriptor)


KEPT: Final = 20
"""Lines kept for `WorkerDiedError.last_output`."""


class Output:
    """Both output streams of a slot.

    Keepers open the pipes by name: their zygote was started earlier, and asyncio cannot
    pass descriptors. The last lines are kept for the error if the worker dies.

    Attributes:
        label: the name of the worker that writes to the pipes: "worker-3 pid=4711".
        worker: the id of this worker.
        last: the last lines, oldest first, each with its task; task 0 for lines from
            the pipes.
        number: the number of the last line given to the console.
        peer: the worker's connection, which carries the lines of its tasks.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, console: Console, paths: tuple[str, str]
    ) -> None:
        self.label = ""
        self.worker = 0
        self.last: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self.number = 0
        self._states: dict[int, tuple[str, bytes, tuple[int, str]]] = {}
        self.peer: Peer | None = None
        self._console = console
        self._paths = paths
        self._is_paused = False
        self._pipes: list[LinePipe] = []
        self._poll = select.poll()
        try:
            for stream, path in enumerate(paths, start=1):
                os.mkfifo(path, 0o600)
                # Open for writing too, so that reads never return an end of file.
                descriptor = open_checked(path, os.O_RDWR, stat.S_ISFIFO, is_own)
                pipe = LinePipe(loop, descriptor, partial(self._show_raw, stream))
                self._pipes.append(pipe)
                self._poll.register(descriptor, select.POLLIN)
        except OSError:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor that was opened last."""
        return self._pipes[-1].fileno()

    def begin(self) -> None:
        """Forget the lines of the slot's previous worker."""
        self.last.clear()
        self.number = 0

    def name(self, worker: int, pid: int) -> None:
        """Note which worker writes to the pipes from now on."""
        self.worker = worker
        self.label = f"worker-{worker} pid={pid}"

    def listen_to(self, peer: Peer) -> None:
        """Pause and resume the connection of the slot's worker with the pipes."""
        self.peer = peer
        if self._is_paused:
            peer.pause()

    def unlink(self) -> None:
        """Remove the names of the pipes, once the keeper has opened them."""
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def show(self, stream: int, label: str, line: bytes, task: int = 0) -> None:
        """Show a line from the connection, with the prefix `(label)`.

        The line replaces the worker's progress on the stream. `task` is the task that
        printed the line; 0 for the worker's current task.
        """
        text = line.decode("utf-8", "backslashreplace")
        entry = task, text.removesuffix(PROGRESS)
        state = self._states.pop(stream, None)
        if state is not None and self.last and self.last[-1] is state[2]:
            self.last.pop()
        if text != PROGRESS:
            self.last.append(entry)
            if text.endswith(PROGRESS):
                self._states[stream] = label, line[:-1], entry
        self._pass_on(stream, label, text, task, self.worker)

    def log(self, label: str, text: str, fields: bytes, task: int = 0) -> None:
        """Pass on a `logging` record; see `show` and `wire.messages.Record`."""
        self.last.extend((task, line) for line in text.split("\n"))
        self._pass_on(2, label, text, task, 0, fields)

    def _pass_on(
        self,
        stream: int,
        label: str,
        text: str,
        task: int,
        replaces: int,
        fields: bytes = b"",
    ) -> None:
        routes = self._console.routes
        if routes is None or not routes.take(
            stream, label, text, self, self.worker, task, replaces, fields
        ):
            if fields:
                shown: str = LoggedText(label, text, fields)
            else:
                shown = text if text == PROGRESS else f"({label}) {text}"
            cell_of = self._console.cell_of
            cell = None if cell_of is None else cell_of(self.worker, task)
            self.number = self._console.write(stream, shown, self, replaces, cell)

    def forget(self, task: int) -> None:
        """Forget the lines of an ended task."""
        self.last = deque((entry for entry in self.last if entry[0] != task), KEPT)

    def _show_raw(self, stream: int, line: bytes) -> None:
        """Show a line from a pipe; the worker's progress stays."""
        text = visible(line).decode("utf-8", "backslashreplace")
        self.last.append((0, text))
        self._pass_on(stream, self.label, text, 0, 0)

    def catch_up(self) -> None:
        """Show all bytes written to the pipes so far, including unfinished lines."""
        if self._poll.poll(0):
            for pipe in self._pipes:
                pipe.drain()
        for pipe in self._pipes:
            if pipe.partial:
                pipe.end_line()

    def end_progress(self) -> None:
        """Show the last progress as lines, since no output will replace it."""
        if not self._states:
            return
        for stream, (label, line, (task, _)) in list(self._states.items()):
            self.show(stream, label, line, task)

    def pause(self) -> None:
        """Stop reading the pipes and the connection until `resume`."""
        self._is_paused = True
        for pipe in self._pipes:
            pipe.pause()
        if self.peer is not None:
            self.peer.pause()

    def resume(self) -> None:
        """Read the pipes and the connection again."""
        self._is_paused = False
        for pipe in self._pipes:
            pipe.resume()
        if self.peer is not None:
            self.peer.resume()

    def close(self) -> None:
        """Close the pipes and remove their names."""
        for pipe in self._pipes:
            pipe.close()
        self.unlink()
