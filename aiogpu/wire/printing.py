"""What tasks print, on its way to who sees it; see `wire.messages`."""

from typing import NamedTuple


class Log(NamedTuple):
    """Worker to driver: a line that the task printed; `stream` is 1 or 2.

    `task` is 0 for output outside of any task.
    """

    task: int
    stream: int
    line: bytes


class Printed(NamedTuple):
    """Node to client: a line that one of its tasks printed; `stream` is 1 or 2.

    `text` is as its terminal is to show it, with who has printed it before it.
    """

    stream: int
    text: str


class Warned(NamedTuple):
    """Node to client: a warning about one of its tasks, for its log."""

    text: str
