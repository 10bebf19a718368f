"""Lets debuggers connect that speak the Debug Adapter Protocol, by debugpy.

debugpy listens on a TCP port until the process ends. While a client is connected, time
limits stand still; when it disconnects, the code goes on.
"""

from __future__ import annotations

import os
import time
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Final

from aiogpu.client.current import current
from aiogpu.worker.debug.terminal import SLICE

if TYPE_CHECKING:
    from aiogpu.worker.debug.breakpoints import Breakpoints
    from aiogpu.worker.debug.terminal import Terminal

_endpoint: list[tuple[str, int]] = []
"""Where debugpy listens in this process; empty before."""

MISSING: Final = (
    "debugpy is not installed where the task runs: `pip install 'aiogpu[debugpy]'` "
    "there, or leave out --listen."
)


class AdapterSession:
    """Debugs one task or actor by debugpy; see `breakpoints.Session`."""

    def __init__(self, breakpoints: Breakpoints, terminal: Terminal, task: int) -> None:
        self.task = task
        self._terminal = terminal
        self._breakpoints = breakpoints
        self._stopped: set[int] = set()
        self._watch: Thread | None = None

    @property
    def is_open(self) -> bool:
        """True while a client is connected."""
        import debugpy

        return bool(debugpy.is_client_connected())

    def listen(self, host: str, port: int, number: int) -> bool:
        """Listen and wait for a client; False if none comes.

        The task waits for another debugger then.
        """
        try:
            import debugpy
        except ImportError:
            self._refuse(MISSING)
            return False
        try:
            if not _endpoint:
                _endpoint.append(debugpy.listen((host, port)))
        except (RuntimeError, OSError) as error:
            self._refuse(f"debugpy cannot listen at {host}:{port}: {error}")
            return False
        host, port = _endpoint[0]
        self._terminal.send(
            text=f"debugpy listens at {host}:{port} of pid {os.getpid()}: attach your "
            f"editor. The task goes on when the editor disconnects.\n"
        )
        while not self.is_open:
            self._terminal.receive(SLICE)
            if not self._terminal.is_open:
                return False
            self._breakpoints.check(number)
            if self._breakpoints.is_over(self.task, number):
                self._refuse("the task goes on: it was cancelled.")
                return False
        debugpy.wait_for_client()  # until it has set its breakpoints
        return True

    def _refuse(self, why: str) -> None:
        self._terminal.send(error=why)
        self._terminal.close()

    def stop(self, frame: FrameType, number: int, header: str | None) -> None:
        """Stop in a frame at its next line."""
        import pydevd  # type: ignore[import-not-found]  # a part of debugpy

        if header is not None:
            self._terminal.send(text=f"{header}\n")
        self._stopped.add(number)
        if self._watch is None:
            self._watch = Thread(
                target=self._go_on_with_client, name="aiogpu-debugpy", daemon=True
            )
            self._watch.start()
        pydevd.settrace(
            suspend=True,
            trace_only_current_thread=True,
            patch_multiprocessing=False,
            stop_at_frame=frame,
        )

    def _go_on_with_client(self) -> None:
        """Let time limits run again once the client has disconnected."""
        while self.is_open and current.task == self.task:
            time.sleep(SLICE)
        self.close()

    def close(self) -> None:
        """Let the code go on, past all breakpoints."""
        for number in list(self._stopped):
            self._breakpoints.let_go(number)
            self._breakpoints.go_on(number)
        self._terminal.close()
