r"""Keys as they are pressed, on a terminal that is given back as it was.

Ctrl-C, Ctrl-Z and Ctrl-\ stay what they are: signals.
"""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Any, Final

SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
}
"""What terminals send for keys that are no character; source: xterm's "ctlseqs"."""
LONGEST: Final = 16
"""Bytes of a sequence that is none of these, after which it is given up."""


class Decoder:
    """Makes keys of what a terminal sends, in whatever pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def keys(self, sent: bytes) -> Iterator[str]:
        """The keys that are complete now."""
        rest = self._rest + sent
        while rest:
            if rest[0] != 0x1B:
                if rest[0] < 0x80:
                    yield chr(rest[0])
                rest = rest[1:]
                continue
            length = _length(rest)
            if not length:
                break
            known = SEQUENCES.get(rest[:length])
            if known:
                yield known
            rest = rest[length:]
        self._rest = rest


def _length(sent: bytes) -> int:
    """Return how long the sequence is with which this begins; 0 if more is to come."""
    if len(sent) == 1:
        return 0
    if sent[1:2] == b"O":
        return 3 if len(sent) >= 3 else 0
    if sent[1:2] != b"[":
        return 1  # Escape alone, and another key
    for at, byte in enumerate(sent[2:LONGEST], 3):
        if 0x40 <= byte <= 0x7E:
            return at
    return LONGEST if len(sent) >= LONGEST else 0


class Keyboard:
    """The keys of a terminal, while it is open.

    Attributes:
        on_key: told of each key.
    """

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self.on_key: Callable[[str], None]
        self._fd = fd
        self._loop = loop
        self._before: list[Any] | None = None
        self._decoder = Decoder()

    def open(self) -> None:
        """Have keys come one by one, and none of them shown."""
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSADRAIN)
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Give the terminal back as it was."""
        before, self._before = self._before, None
        if before is not None:
            self._loop.remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def _read(self) -> None:
        try:
            sent = os.read(self._fd, 1024)
        except BlockingIOError:
            return
        except OSError:
            sent = b""  # the terminal has gone
        if not sent:
            self._loop.remove_reader(self._fd)
            self.on_key("q")
        for key in self._decoder.keys(sent):
            self.on_key(key)
