"""The lines of one slot's workers: from their connection and from their pipes.

What a worker writes straight to descriptors 1 and 2 arrives in two named pipes; what
its tasks print arrives as messages. Both are shown with a prefix, and the last lines
are kept for the error if the worker dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import struct
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiogpu.runtime.connection import Peer
from aiogpu.runtime.output.console import Console
from aiogpu.wire.messages import PROGRESS, visible

CHUNK: Final = 1 << 16
"""Bytes of one read, and the length at which a line is cut."""


class LinePipe:
    """The reading end of a pipe; `show` gets each line without its end.

    Attributes:
        partial: what came since the last end of line.
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
        """Its descriptor."""
        return self._descriptor

    def pause(self) -> None:
        """Read no more for now; writers will block when the pipe is full."""
        self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read whenever there is something."""
        if not self._is_closed:
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> int:
        """Read once; gives how many bytes came."""
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
        """Show what came since the last end of line, if anything."""
        if self.partial:
            line, self.partial = self.partial, b""
            self._show(line)

    def drain(self) -> None:
        """Read what the pipe holds now; whoever writes on may never let it empty."""
        held = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        (rest,) = struct.unpack("i", held)
        while rest > 0 and (read := self._read()):
            rest -= read

    def close(self) -> None:
        """Close the descriptor; a `resume` that comes late does nothing."""
        self._is_closed = True
        self.pause()
        os.close(self._descriptor)


KEPT: Final = 20
"""Lines kept for `WorkerDiedError.last_output`."""


class Output:
    """Both streams of a slot.

    Attributes:
        label: who writes to the pipes, such as `worker-3 pid=4711`.
        worker: its id.
        last: the last lines, oldest first, each with the task that has printed it;
            0 for what came by the pipes.
        number: of the last line given to the console.
        peer: the worker's connection, by which its tasks' lines come.
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
                # Open for both, so that a pipe without a writer is not at its end.
                descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
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
        """Forget the worker before: its lines are no concern of the next one."""
        self.last.clear()
        self.number = 0

    def name(self, worker: int, pid: int) -> None:
        """Note whose the pipes are now."""
        self.worker = worker
        self.label = f"worker-{worker} pid={pid}"

    def listen_to(self, peer: Peer) -> None:
        """Have the slot's worker wait as well while its pipes do."""
        self.peer = peer
        if self._is_paused:
            peer.pause()

    def unlink(self) -> None:
        """Remove the pipes' names; the keeper has opened them."""
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def show(self, stream: int, label: str, line: bytes, task: int = 0) -> None:
        """Show a line of the worker with the prefix `(label)`, to whom it concerns.

        It comes by the connection, and replaces the worker's progress on that stream.

        `task`: has printed it; 0 for whichever the worker runs.
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

    def _pass_on(
        self, stream: int, label: str, text: str, task: int, replaces: int
    ) -> None:
        routes = self._console.routes
        if routes is None or not routes.take(
            stream, label, text, self, self.worker, task, replaces
        ):
            shown = text if text == PROGRESS else f"({label}) {text}"
            self.number = self._console.write(stream, shown, self, replaces)

    def forget(self, task: int) -> None:
        """Keep no line any more that this task has printed: it has ended."""
        self.last = deque((one for one in self.last if one[0] != task), KEPT)

    def _show_raw(self, stream: int, line: bytes) -> None:
        """Show a line of a pipe, which leaves the worker's progress as it is."""
        text = visible(line).decode("utf-8", "backslashreplace")
        self.last.append((0, text))
        self._pass_on(stream, self.label, text, 0, 0)

    def catch_up(self) -> None:
        """Show all that has been written to the pipes, unfinished lines too."""
        if self._poll.poll(0):
            for pipe in self._pipes:
                pipe.drain()
        for pipe in self._pipes:
            if pipe.partial:
                pipe.end_line()

    def end_progress(self) -> None:
        """Show as lines what was shown as progress last: nothing replaces it now."""
        if not self._states:
            return
        for stream, (label, line, (task, _)) in list(self._states.items()):
            self.show(stream, label, line, task)

    def pause(self) -> None:
        """Read no more for now, neither from the pipes nor from the worker."""
        self._is_paused = True
        for pipe in self._pipes:
            pipe.pause()
        if self.peer is not None:
            self.peer.pause()

    def resume(self) -> None:
        """Read again."""
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
