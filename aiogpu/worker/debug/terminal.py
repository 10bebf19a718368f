"""The terminal of the person who debugs, at the other end of a Unix socket.

Both ends send JSON objects, one a line. The command sends `{"listen": null}` to debug
in the terminal, or `{"listen": [host, port]}` for a debugger that speaks the Debug
Adapter Protocol, and then `{"line": text}` for each line. The worker sends
`{"text": text}` to show, `{"prompt": text}` when it waits for a line,
`{"goes_on": true}` when the code runs until the next breakpoint, and `{"error": text}`
if it cannot do what was asked. Either end closes the socket to end the debugging.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from aiogpu.linux.sockets import peer_credentials

SLICE: Final = 0.1
"""Seconds after which code that waits for a debugger looks for a reason to go on."""
LONGEST: Final = 1 << 20
"""Most bytes of one message; a longer one ends the debugging."""
PATIENCE: Final = 5.0
"""Seconds in which a command must send its first message, and take output."""


class Terminal:
    """A text file for `pdb`, which writes to the terminal and reads its lines.

    Attributes:
        check: called while a line is awaited; raises to end the wait.
    """

    encoding = "utf-8"

    def __init__(self, connected: socket.socket) -> None:
        self.check: Callable[[], object] = lambda: None
        self._socket = connected
        self._received = b""
        self._written = ""
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        connected.settimeout(PATIENCE)
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message; None if there is none within `seconds`.

        If the other end has gone, or has sent nonsense, `is_open` is False afterwards.
        """
        if not self.is_open:
            return None
        if b"\n" not in self._received and self._poll.poll(seconds * 1000):
            data = b""
            with suppress(OSError):
                data = self._socket.recv(65536)
            self._received += data
            if not data or len(self._received) > LONGEST:
                self.close()
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return None
        self._received = rest
        with suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        self.close()
        return None

    def send(self, **message: object) -> None:
        """Send a message; the end of the other end closes this one."""
        try:
            if self.is_open:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def write(self, text: str) -> int:
        """Keep text, until a line is awaited or the code goes on."""
        self._written += text
        return len(text)

    def flush(self) -> None:
        """Send the complete lines that were written; the rest is the prompt."""
        text, end, self._written = self._written.rpartition("\n")
        if end:
            self.send(text=text + end)

    def readline(self) -> str:
        """Return the next line of the terminal; "" if it has gone."""
        self.flush()
        self.check()
        prompt, self._written = self._written, ""
        self.send(prompt=prompt)
        while self.is_open:
            message = self.receive(SLICE)
            if message is not None:
                return f"{message.get('line', '')}\n"
            self.check()
        return ""

    def close(self) -> None:
        """End the debugging in this terminal."""
        self.is_open = False
        self._socket.close()


def accept(listening: socket.socket) -> Terminal | None:
    """Accept a terminal; None for one of another user."""
    connected, _ = listening.accept()
    if peer_credentials(connected).uid in {0, os.geteuid()}:
        return Terminal(connected)
    connected.close()
    return None
