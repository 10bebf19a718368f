"""Stops code of a task at `breakpoint()` until a debugger lets it go on.

The code waits for `aiogpu debug`, which connects to a socket in the node's directory.
One breakpoint at a time has the terminal: threads that reach another one wait for their
turn. A terminal stays for the task's or the actor's next breakpoints.
"""

from __future__ import annotations

import os
import socket
from _thread import RLock, get_ident
from collections.abc import Callable, Container
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from aiogpu.client.current import current, method_called
from aiogpu.wire.messages import Halted, Log
from aiogpu.worker.debug.terminal import SLICE, Terminal, accept

if TYPE_CHECKING:
    from aiogpu.worker.connection import Channel
    from aiogpu.worker.interrupts import Interrupts


class Session(Protocol):
    """A debugger in which the code of one task or actor can stop.

    Attributes:
        task: number of the task or actor.
    """

    task: int

    @property
    def is_open(self) -> bool:
        """True until the debugger is detached."""

    def stop(self, frame: FrameType, number: int, header: str | None) -> None:
        """Stop the code of a task or call in this frame, once `breakpoint()` returns.

        `Breakpoints.go_on` is called when the code goes on.
        """

    def close(self) -> None:
        """Detach the debugger."""


class Breakpoints:
    """The breakpoints of one worker.

    Args:
        channel: to the driver.
        interrupts: of the main thread.
        dropped: the running calls that were cancelled and go on.
        open_session: returns the session that a terminal asks for, for a task and its
            running call; None if the code is to wait for another terminal.

    Attributes:
        turn: held by the thread that has the terminal.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: Interrupts,
        dropped: Container[int],
        open_session: Callable[[Breakpoints, Terminal, int, int], Session | None],
    ) -> None:
        self.turn = RLock()
        self._channel = channel
        self._interrupts = interrupts
        self._dropped = dropped
        self._open = open_session
        self._session: Session | None = None
        self._halted: set[int] = set()
        self._let_go: set[int] = set()
        self._owner = 0
        self._has_read = False
        self._main = get_ident()

    def stop(self, frame: FrameType, header: str | None) -> None:
        """Stop in a frame of user code; return at once if no debugger may come."""
        task, number = current.task, method_called.get()[1] or current.task
        if not task or number in self._let_go or self._owner == get_ident():
            return  # or a debugger runs the code
        has_stopped = False
        try:
            self.halt(number, place_of(frame))
            with self.turn:
                session = self._session
                if session is not None and not session.is_open:
                    session.close()
                    session = self._session = None
                if number in self._let_go:
                    return
                if session is None or session.task != task:
                    session = self._session = self._wait(task, number, frame)
                if session is not None:
                    session.stop(frame, number, header)
                    has_stopped = True
        finally:
            if not has_stopped:
                self.go_on(number)

    def halt(self, number: int, where: str, path: str = "") -> None:
        """Report that a task or call stands at a place; see `Halted`."""
        self._halted.add(number)
        self._channel.send(Halted(number, where, path))

    def go_on(self, number: int) -> None:
        """Report that a task or call goes on, if it stands."""
        if number in self._halted:
            self._halted.discard(number)
            if self._has_read and current.client is not None:
                # For the event loop, which saw no bytes arrive.
                self._has_read = False
                if (wake := getattr(current.client, "wake", None)) is not None:
                    wake()
            if not self._channel.is_closed:
                self._channel.send(Halted(number))

    def let_go(self, number: int) -> None:
        """Stop a task or call at no further breakpoint."""
        self._let_go.add(number)

    def stands(self, number: int) -> bool:
        """Return whether a task or call was reported to stand at a place."""
        return number in self._halted

    def check(self, number: int) -> None:
        """Raise `KeyboardInterrupt` if a task or call was cancelled meanwhile.

        An interrupt is lost if it comes while a debugger evaluates an expression.
        """
        is_main = get_ident() == self._main
        if is_main and self._interrupts.is_cancelled(number):
            raise KeyboardInterrupt(f"task {number} was cancelled")

    def is_over(self, task: int, number: int) -> bool:
        """Return whether code must not wait any longer: its call or task has ended."""
        if current.task != task or self._channel.is_closed or number in self._dropped:
            return True
        client = current.client
        if get_ident() != self._main or getattr(client, "loop", None) is None:
            return False
        # The event loop that would read the messages waits here.
        if not self._channel.is_silent(0):
            self._has_read = True
            if not self._channel.read_ready():
                return True  # the driver has gone
        # A dropped call is cancelled at its next `await`.
        return self._channel.has_drop(number)

    def _wait(self, task: int, number: int, frame: FrameType) -> Session | None:
        """Wait for a debugger; None if the code is to go on without one."""
        place = place_of(frame)
        path = f"{os.path.dirname(self._channel.path)}/pdb{current.worker}"
        with suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            try:
                listening.bind(path)
                listening.listen()
            except OSError as error:
                self._say(f"goes on at {place}: no debugger can connect: {error}")
                return None
            try:
                listening.settimeout(SLICE)
                self.halt(number, place, path)
                command = f"aiogpu debug {task}"
                if self._channel.driver:
                    command += f" --pid {self._channel.driver}"  # of several nodes
                self._say(f"waits at {place} for a debugger: {command}")
                while not self.is_over(task, number):
                    with suppress(TimeoutError):
                        terminal = accept(listening)
                        if terminal is None:
                            continue
                        session = self._open(self, terminal, task, number)
                        if session is not None:
                            self.halt(number, place)
                            return session
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        return None

    def own(self, is_owner: bool) -> None:
        """Note that this thread runs a debugger, in which breakpoints do not stop."""
        self._owner = get_ident() if is_owner else 0

    def _say(self, text: str) -> None:
        """Print a line to the program's stderr, wherever the task prints."""
        self._channel.send(Log(current.task, 2, text.encode("utf-8", "replace")))


def place_of(frame: FrameType) -> str:
    """Return a place in the code in words: "train.py:31 in train"."""
    code = frame.f_code
    file = os.path.basename(code.co_filename)
    return f"{file}:{frame.f_lineno} in {code.co_qualname}"
