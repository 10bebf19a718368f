"""Sends the output of tasks as lines with the task's number.

`sys.stdout` and `sys.stderr` become text streams that send whole lines on the worker's
connection, so lines reach the driver before the task's answer. Bytes written directly
to descriptors 1 and 2 go through the slot's pipes. A line that a carriage return
restarts, as in progress bars, is sent before its end, at a limited rate; so is a
flushed line. Nested progress bars, as tqdm draws them, are buffered while the cursor
may go up to them.
"""

from __future__ import annotations

import io
import sys
import time
from _thread import RLock
from typing import TYPE_CHECKING, Final, cast

from aiogpu.client.current import current
from aiogpu.wire.messages import Log, visible
from aiogpu.worker.connection import Channel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LONGEST: Final = 1 << 16
"""Bytes after which an unfinished line is sent."""
OFTEN: Final = 0.2
"""Seconds between two states of a progress bar, on average."""
BURST: Final = 5
"""States that are sent at once after a pause, so that the last of a few is shown.
Together with the following second this makes ten."""
DEEPEST: Final = 64
"""Lines above the cursor that are buffered, approximately."""
UP: Final = b"\x1b[A"
"""Moves the cursor up; tqdm writes it alone, once per line that it went down."""


class LineSender(io.BufferedIOBase):
    """Takes bytes, sends lines. Any thread may write.

    Attributes:
        partial: bytes written since the last end of line.
        above: lines to which the cursor may go up again.
    """

    def __init__(self, channel: Channel, stream: int) -> None:
        super().__init__()
        self._channel = channel
        self._stream = stream
        self.partial = b""
        self.above: list[bytes] = []
        self._goes_up = False
        self._is_redrawn = False
        self._lock = RLock()
        self._shown = b""
        self._asked_at = 0.0
        self._allowed: float = BURST

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor that subprocesses would inherit: 1 or 2."""
        return self._stream

    def write(self, data: ReadableBuffer, /) -> int:
        """Send complete lines, keep the rest."""
        fresh = bytes(data)
        with self._lock:
            if (self._goes_up or fresh[:1] == UP[:1]) and self._moves(fresh):
                return len(fresh)
            *lines, rest = (self.partial + fresh).split(b"\n")
            begins_anew = b"\r" in rest
            if begins_anew:
                state = visible(rest)
                # Some programs write a carriage return before each state, some after
                # it.
                rest = state + b"\r" if rest.endswith(b"\r") else b"\r" + state
            end = len(rest) - len(rest) % LONGEST
            self.partial = rest[end:]
            for line in lines:
                self._end(line)
            for start in range(0, end, LONGEST):
                self._send(rest[start : start + LONGEST])
            if begins_anew:
                self._show(state)
        return len(fresh)

    def flush(self) -> None:
        """Send an unfinished line that the task has flushed, like a progress bar.

        If the process dies, this is the last known output.
        """
        super().flush()
        with self._lock:
            if self.partial and b"\r" not in self.partial:
                self._show(visible(self.partial))

    def _moves(self, fresh: bytes) -> bool:
        """Return whether `fresh` only moves the cursor between progress bars.

        Called once the cursor has gone up; before that, a bar ends with its line.
        """
        above = self.above
        ups, downs = len(fresh) // len(UP), len(fresh)
        if not fresh:
            return True
        if fresh == UP * ups:
            self._goes_up, self._is_redrawn = True, False
            # A row that was already sent is blank here, and is not sent again.
            self.partial = above[-ups] if ups <= len(above) else b"\r"
            del above[-ups:]
            return True
        if fresh == b"\n" * downs and (above or b"\r" in self.partial):
            if self._is_redrawn or len(above) > DEEPEST:
                self._end_above()
            self.above += self.partial, *[b"\r"] * (downs - 1)
            self.partial = b""
            return True
        if above:
            if self._is_redrawn or fresh[:1] != b"\r" or b"\n" in fresh:
                self._end_above()
            else:
                self._is_redrawn = True
        return False

    def _end_above(self) -> None:
        above, self.above, self._is_redrawn = self.above, [], False
        for line in above:
            self._end(line)

    def end_line(self) -> None:
        """Send an unfinished line, if there is one."""
        if self.partial or self.above:
            with self._lock:
                self._end_above()
                line, self.partial = self.partial, b""
                if line:
                    self._end(line)

    def _end(self, line: bytes) -> None:
        """Send a finished line, which replaces its progress."""
        shown, self._shown = self._shown, b""
        text = visible(line)
        if text or b"\r" not in line:
            self._send(text)
        elif shown:
            self._send(b"\r")

    def _show(self, state: bytes) -> None:
        """Send the state of an unfinished line, within the rate limit.

        An empty state, which clears the line, is sent at once: it may be the last.
        """
        before, self._asked_at = self._asked_at, time.monotonic()
        self._allowed = min(BURST, self._allowed + (self._asked_at - before) / OFTEN)
        if state != self._shown and (self._allowed >= 1 or not state):
            if state:
                self._allowed -= 1
            self._shown = state
            self._send(state + b"\r")

    def _send(self, line: bytes) -> None:
        self._channel.send(Log(current.task, self._stream, line))


class Stdio:
    """The two output streams of a worker, and its log records.

    Attributes:
        senders: the senders of stdout and stderr.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._make()

    def _make(self) -> None:
        self.senders = [LineSender(self._channel, 1), LineSender(self._channel, 2)]
        self._texts = [_text(sender) for sender in self.senders]

    def begin(self) -> None:
        """Install the streams as `sys.stdout` and `sys.stderr`."""
        sys.stdout, sys.stderr = self._texts
        self._send_records(self._channel)

    def _send_records(self, channel: Channel | None) -> None:
        for handler in sys.modules["logging"].getLogger().handlers:
            if hasattr(handler, "aiogpu_channel"):
                handler.aiogpu_channel = channel

    def restore(self) -> None:
        """Reinstall the streams if a task has replaced or closed them."""
        out, err = self._texts
        if out.closed or err.closed:
            self._make()
            sys.stdout, sys.stderr = self._texts
        elif sys.stdout is not out or sys.stderr is not err:
            sys.stdout, sys.stderr = out, err

    def leave(self) -> None:
        """Write to descriptors 1 and 2 directly, in a fork of the worker."""
        self._send_records(None)
        sys.stdout, sys.stderr = (
            open(  # noqa: SIM115 - they live as long as the process
                stream, "w", buffering=1, closefd=False, errors="backslashreplace"
            )
            for stream in (1, 2)
        )

    def flush(self) -> None:
        """Flush streams that the user's code has installed instead."""
        for stream, own in zip((sys.stdout, sys.stderr), self._texts, strict=True):
            # This library's streams buffer nothing.
            if stream is not own:
                stream.flush()

    def end_lines(self) -> None:
        """Send unfinished lines at the end of a task."""
        for sender in self.senders:
            if sender.partial or sender.above:
                sender.end_line()


def _text(sender: LineSender) -> io.TextIOWrapper[io.BufferedWriter]:
    # `TextIOWrapper` uses only methods of the writer that `LineSender` has.
    buffer = cast("io.BufferedWriter", sender)
    return io.TextIOWrapper(
        buffer, "utf-8", "backslashreplace", line_buffering=True, write_through=True
    )
