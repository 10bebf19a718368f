"""Progress bars: one in a notebook, one in a terminal, none in a pipe."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiogpu.notebook.cells import is_notebook

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY: Final = 0.1
"""Least seconds between two updates of a bar in a notebook without tqdm."""


class Bar(Protocol):
    """Shows how many results have come."""

    def advance(self) -> None:
        """Count one result."""

    def close(self) -> None:
        """Show the last state, and end; may be called again."""


def new_bar(name: str, total: int | None) -> Bar | None:
    """Return a bar for `total` results, None for an unknown number.

    In a notebook it is tqdm's, if tqdm and ipywidgets are installed, else plain HTML;
    in a terminal it is drawn on stderr. None if stderr is no terminal.
    """
    if is_notebook():
        if find_spec("tqdm") and find_spec("ipywidgets"):
            return TqdmBar(name, total)
        return HtmlBar(name, total)
    return TerminalBar(name, total) if sys.stderr.isatty() else None


class TqdmBar:
    """A widget of a notebook."""

    def __init__(self, name: str, total: int | None) -> None:
        from tqdm.notebook import tqdm

        self._bar: Any = tqdm(desc=name, total=total)

    def advance(self) -> None:
        """See `Bar.advance`."""
        self._bar.update()

    def close(self) -> None:
        """See `Bar.close`."""
        self._bar.close()


class HtmlBar:
    """An output of a notebook that is updated."""

    def __init__(self, name: str, total: int | None) -> None:
        from IPython import display

        self._name = name
        self._total = total
        self._done = 0
        self._begin = self._drawn = monotonic()
        show: Any = display.display  # untyped
        self._shown: Any = show(self._data(), raw=True, display_id=True)

    def _data(self) -> dict[str, str]:
        from html import escape

        of = "" if self._total is None else f" of {self._total}"
        rate = self._done / max(monotonic() - self._begin, 1e-3)
        text = f"{self._name}: {self._done}{of}, {rate:.1f}/s"
        value = "" if self._total is None else f"value={self._done} max={self._total}"
        bar = f"<progress {value}></progress> " if value else ""
        return {"text/plain": text, "text/html": bar + escape(text)}

    def advance(self) -> None:
        """See `Bar.advance`."""
        self._done += 1
        if monotonic() - self._drawn >= EVERY:
            self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        self._shown.update(self._data(), raw=True)

    def close(self) -> None:
        """See `Bar.close`."""
        self._draw()


class TerminalBar:
    """A line at the bottom of a terminal; what tasks print appears above it."""

    def __init__(self, name: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        self._progress: Progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
            # Else the output of a program with `> file` would go to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()

    def advance(self) -> None:
        """See `Bar.advance`."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """See `Bar.close`."""
        self._progress.stop()
