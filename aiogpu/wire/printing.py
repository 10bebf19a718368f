"""What tasks print, on its way to who sees it; see `wire.messages`."""

from typing import Final, NamedTuple

PROGRESS: Final = "\r"
"""Ends a line that the next one replaces, as progress bars want it. No other line ends
so; one that is nothing else takes away what was shown."""


def visible(line: bytes) -> bytes:
    """What a terminal would show of a line in which carriage returns go back.

    Parts that come later hide those before them, unless they are blank.
    """
    if b"\r" not in line:
        return line
    parts = line.removesuffix(b"\r").split(b"\r")
    return b"" if parts[-1].isspace() else parts[-1]


class Log(NamedTuple):
    """Worker to driver: a line that the task printed; `stream` is 1 or 2.

    `task` is 0 for output outside of any task. `line` may end with `PROGRESS`.
    """

    task: int
    stream: int
    line: bytes


class Printed(NamedTuple):
    """Node to client: a line that one of its tasks printed; `stream` is 1 or 2.

    `text` is as its terminal is to show it, with who has printed it before it. It may
    end with `PROGRESS`.
    """

    stream: int
    text: str


class Warned(NamedTuple):
    """Node to client: a warning about one of its tasks, for its log."""

    text: str
