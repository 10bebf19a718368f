"""The output of commands: nothing that comes from elsewhere commands the terminal.

Names of processes and tasks, their output, and errors with such names may contain any
text, such as escape sequences that rewrite the screen or the clipboard. Everything that
a command prints passes a `PrintableStream`, which escapes control characters. Only rich
and `rewrite_line` go around it, with control sequences of their own; what rich is given
to show is escaped by `tables.SafeConsole`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

import click

from aiogpu.core.model.text import escaped


class PrintableStream:
    """A text stream that escapes control characters; otherwise as `stream`.

    Attributes:
        stream: the stream that gets the escaped texts.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write a text, escaped."""
        self.stream.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, escaped."""
        self.write("".join(lines))


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream itself, for a program's own control sequences."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


def is_terminal() -> bool:
    """Return whether the output is a terminal."""
    return sys.stdout.isatty()


def open_streams() -> None:
    """Prepare the standard streams of a command.

    Closed streams, as after `>&-`, become /dev/null. Otherwise the next socket to be
    opened becomes the standard output. Characters that the encoding lacks, such as bars
    in ASCII, are printed as question marks.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # `aiogpu run` and `aiogpu start` pass it on to their processes.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout, sys.stderr = map(_printable, (sys.stdout, sys.stderr))


def _printable(stream: TextIO) -> TextIO:
    return cast("TextIO", PrintableStream(unescaped(stream)))


def echo(text: str, *, err: bool = False) -> None:
    """Print a text and an end of line.

    Not by `click.echo`, which writes around a stream whose encoding is ASCII.
    """
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def rewrite_line(text: str) -> None:
    """Show a text on stderr in place of the last one; "" clears the line."""
    stream = unescaped(sys.stderr)
    stream.write(f"\r{escaped(text)}\x1b[K")
    stream.flush()


def show_error(error: click.ClickException) -> None:
    """Print the error of a command, as click does."""
    shown = io.StringIO()
    error.show(shown)
    echo(shown.getvalue().removesuffix("\n"), err=True)
