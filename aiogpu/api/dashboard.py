"""The dashboard of a program's node: a process beside the program, and in a notebook.

The process is that of `aiogpu dashboard`. It ends with the node, at the latest with the
program.
"""

from __future__ import annotations

import asyncio
import html
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Final

from aiogpu.errors import NodeStartError, OptionError

if TYPE_CHECKING:
    from aiogpu.observe.status import NodeStatus

READY_WITHIN: Final = 60.0
"""Seconds until the process must have printed its URL; it imports Bokeh in one."""
END_WITHIN: Final = 5.0
"""Seconds from SIGTERM to SIGKILL."""
HEIGHT: Final = 560
"""Pixels of the overview in a notebook; longer ones scroll."""
FRAME: Final = (
    '<iframe title="aiogpu" sandbox style="width: 100%; height: {height}px; border: 0" '
    'srcdoc="{page}"></iframe>'
)
"""No script runs in the frame, and its styles are its own."""


def check_dashboard() -> None:
    """Check that the dashboard can be started.

    Raises:
        OptionError: Bokeh is not installed.
    """
    from importlib.util import find_spec

    if find_spec("bokeh") is None:
        raise OptionError(
            "init(dashboard=True) needs Bokeh, which is not installed. Install it by "
            "pip install 'aiogpu[dashboard]', or leave the option out."
        )


class DashboardProcess:
    """The process that serves the dashboard.

    Attributes:
        url: the URL, with the token; "" before `start` has returned.
    """

    def __init__(self, socket: str) -> None:
        """Start the process.

        Args:
            socket: the path of the node's socket.
        """
        self.url = ""
        self._errors: IO[str] = TemporaryFile(  # noqa: SIM115 - closed by `_end`
            "w+", encoding="utf-8", errors="replace"
        )
        command = [sys.executable, "-m", "aiogpu", "dashboard", "--no-browser"]
        self._child = subprocess.Popen(
            [*command, "--address", socket, "--until", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the program
        )

    def __repr__(self) -> str:
        return f"<DashboardProcess {self._child.pid}>"

    async def start(self) -> None:
        """Wait until the process serves, and print its URL to stderr.

        Raises:
            NodeStartError: it has ended, or does not answer.
        """
        assert self._child.stdout is not None, self
        line = ""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_WITHIN):
                    line = await asyncio.to_thread(self._child.stdout.readline)
        finally:
            word, _, self.url = line.strip().partition(" ")
            if word != "Dashboard:":
                said = self._end()
        if word != "Dashboard:":
            said = said or f"it has printed no URL within {READY_WITHIN:g} s."
            raise NodeStartError(
                f"init(dashboard=True): the dashboard did not start: {said}"
            )
        sys.stderr.write(f"aiogpu dashboard: {self.url}\n")

    async def close(self) -> None:
        """End the process."""
        self._child.terminate()
        await asyncio.to_thread(self._end)

    def close_now(self) -> None:
        """End the process, without an event loop."""
        self._end()

    def _end(self) -> str:
        """End the process, and return what it has said of errors."""
        self._child.terminate()
        try:
            self._child.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().strip().removeprefix("Error: ")

    def after_fork(self) -> None:
        """Forget the process in a fork, whose child it is not."""
        self._child.returncode = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """The overview of a node at one moment; a notebook shows it below the cell.

    Attributes:
        status: the status of the node; `print` shows the view as this text.
    """

    status: NodeStatus

    def _repr_html_(self) -> str:
        from aiogpu.observe.overview import STYLE, overview, without_links

        drawn = overview(self.status, age=0.0, problem="", throughput=None)
        page = f"<!DOCTYPE html><style>{STYLE}</style>{without_links(drawn)}"
        return FRAME.format(height=HEIGHT, page=html.escape(page))

    def __repr__(self) -> str:
        return f"<NodeView {self.status!r}>"

    def __str__(self) -> str:
        return str(self.status)
