"""`pdb` at a prompt in another process's terminal.

It shows and steps through user code alone: not the code of this library, which has
called the user's, nor that of the event loop. Leaving the debugger never ends the task.
"""

from __future__ import annotations

import pdb
import sys
from _thread import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import current
from aiogpu.worker.debug.breakpoints import place_of
from aiogpu.worker.interrupts import PACKAGE

if TYPE_CHECKING:
    from aiogpu.worker.debug.breakpoints import Breakpoints
    from aiogpu.worker.debug.terminal import Terminal

LOOP: Final = "/asyncio/"
"""Part of the paths of the code that runs coroutines."""
_CAN_SUSPEND: Final = 0x20 | 0x80 | 0x200
"""Flags of the code of a generator, a coroutine, an async generator."""


class PromptSession:
    """Debugs one task or actor in a terminal; see `breakpoints.Session`."""

    def __init__(self, breakpoints: Breakpoints, terminal: Terminal, task: int) -> None:
        self.task = task
        self.terminal = terminal
        self.breakpoints = breakpoints
        self._debuggers: dict[int, TaskPdb] = {}

    @property
    def is_open(self) -> bool:
        """True until the terminal has gone."""
        terminal = self.terminal
        # A closed socket is readable.
        if terminal.is_open and terminal.receive(0) is not None:
            terminal.close()  # it has sent a line that nobody has asked for
        return terminal.is_open

    def stop(self, frame: FrameType, number: int, header: str | None) -> None:
        """Stop in a frame at its next line."""
        debugger = self._debuggers.get(get_ident())
        if debugger is None:
            debugger = self._debuggers[get_ident()] = TaskPdb(self)
        if header is not None:
            debugger.message(header)
        debugger.begin(frame, number)

    def close(self) -> None:
        """Close the terminal; it shows what was printed."""
        self.terminal.flush()
        self.terminal.close()


class TaskPdb(pdb.Pdb):
    """The debugger of one thread.

    Attributes:
        number: the task or call that it debugs.
    """

    def __init__(self, session: PromptSession) -> None:
        stream: Any = session.terminal
        super().__init__(stdin=stream, stdout=stream, nosigint=True)
        self.use_rawinput = False
        self.number = 0
        self._session = session
        self._breakpoints = session.breakpoints

    def begin(self, frame: FrameType, number: int) -> None:
        """Stop at the next line of a frame; trace the frames that have called it."""
        sys.settrace(None)  # else it would stop in its own code
        self.reset()
        self.number = number
        outer: FrameType | None = frame
        while outer is not None and not _is_foreign(outer):
            # `pdb` shows no calls outside of this frame.
            self.botframe = outer
            outer.f_trace = self.trace_dispatch
            outer.f_trace_lines = True
            outer = outer.f_back
        if self.botframe is not None and self.botframe.f_code.co_flags & _CAN_SUSPEND:
            self._untrace_with_coroutine()
        self.set_step()
        sys.settrace(self.trace_dispatch)

    def _untrace_with_coroutine(self) -> None:
        """Stop tracing when the coroutine has ended, not when it is suspended."""
        asyncio = sys.modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None:
            task = asyncio.current_task()
            if task is not None:
                task.add_done_callback(lambda _task: self._untrace())

    def _untrace(self) -> None:
        """Trace nothing until the next `breakpoint()`; keep no frame."""
        if sys.gettrace() == self.trace_dispatch:
            sys.settrace(None)
        self._forget_frames()
        self._breakpoints.go_on(self.number)

    def _forget_frames(self) -> None:
        self.botframe = self.stopframe = self.returnframe = None

    # bdb

    def dispatch_call(self, frame: FrameType, arg: None) -> Any:
        """Trace a call of the debugged task; untrace when another task runs."""
        if current.task != self._session.task:
            self._untrace()
            return None
        return super().dispatch_call(frame, arg)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Stop tracing at the end of the user's code."""
        is_end = frame is self.botframe and not frame.f_code.co_flags & _CAN_SUSPEND
        traced = super().dispatch_return(frame, arg)
        if is_end:
            self._untrace()
            return None
        return traced

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether a step ends in a frame: never in code of this library."""
        return not _is_foreign(frame) and super().stop_here(frame)

    def set_continue(self) -> None:
        """Run until a breakpoint; time limits run as well."""
        super().set_continue()
        self._session.terminal.flush()
        self._session.terminal.send(goes_on=True)
        self._breakpoints.go_on(self.number)
        if not self.breaks:
            self._forget_frames()

    # pdb

    def interaction(self, frame: FrameType | None, *rest: Any) -> None:
        """Ask for commands, unless the terminal has gone."""
        breakpoints, terminal = self._breakpoints, self._session.terminal
        if frame is not None and not breakpoints.stands(self.number):
            breakpoints.halt(self.number, place_of(frame))  # at one that `b` has set
        with breakpoints.turn:
            breakpoints.own(True)
            terminal.check = self._check
            try:
                super().interaction(frame, *rest)
            except BaseException as error:
                self.message(f"*** ended by {type(error).__name__}: {error}")
                self._session.close()
                self._untrace()
                raise
            finally:
                breakpoints.own(False)

    def _check(self) -> None:
        self._breakpoints.check(self.number)
        if self._breakpoints.is_over(self._session.task, self.number):
            self.message("*** the call was cancelled, and goes on to its end")
            self._session.close()

    def _cmdloop(self) -> None:
        # The original takes the interrupt of a cancelled task for a Ctrl-C at the
        # prompt.
        self.cmdloop()

    def do_quit(self, arg: str) -> bool | None:
        """Leave the debugger; the task goes on to its end, past all breakpoints."""
        self._breakpoints.let_go(self.number)
        self.clear_all_breaks()
        self.set_continue()
        self._session.close()
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815

    def do_run(self, arg: str) -> bool | None:
        """Refuse to start a task again."""
        self.error("a task cannot be started again from its debugger.")
        return None

    do_restart = do_run

    def do_interact(self, arg: str) -> bool | None:
        """Refuse: the interpreter would read from the worker's own terminal."""
        self.error("this prompt takes statements too: write them here.")
        return None


def _is_foreign(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) or LOOP in file
