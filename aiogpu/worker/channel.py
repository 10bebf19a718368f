"""A worker's blocking connection to the driver.

Reads happen in the main thread only. Sends may come from any thread of the user's
that prints, and one frame is never torn by another or by an interrupt.
"""

from __future__ import annotations

import os
import socket
from _thread import allocate_lock, get_ident
from collections import deque
from typing import Final

from aiogpu.wire.connection import WORKER, Connection, greeting
from aiogpu.wire.frames import encode
from aiogpu.wire.messages import Message
from aiogpu.worker.interrupts import Interrupts

CHUNK: Final = 65536


class Channel:
    """Messages in, messages out, over one blocking socket."""

    def __init__(self, path: str, worker: int, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._connection = Connection.connecting(WORKER)
        self._received: deque[Message] = deque()
        self._lock = allocate_lock()
        self._main = get_ident()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._socket.sendall(greeting(WORKER, worker, os.getpid()))

    def fileno(self) -> int:
        """Descriptor of the socket, for an event loop to watch."""
        return self._socket.fileno()

    def next(self) -> Message | None:
        """The next message, waiting for it; None when the driver has gone.

        Raises:
            ProtocolError: the driver sent what is no message.
        """
        while not self._received:
            if not self.read():
                return None
        return self._received.popleft()

    def read(self) -> bool:
        """Read once, waiting for bytes; False when the driver has gone."""
        try:
            data = self._socket.recv(max(CHUNK, self._connection.missing))
        except OSError:
            return False
        self._received.extend(self._connection.receive(data))
        return bool(data)

    def take(self, kind: type[Message]) -> list[Message]:
        """Remove the messages of one kind that were read but not taken yet."""
        found = [message for message in self._received if type(message) is kind]
        if found:
            rest = [message for message in self._received if type(message) is not kind]
            self._received = deque(rest)
        return found

    def send(self, message: Message) -> None:
        """Send one message, waiting while the driver does not read.

        Raises:
            OSError: the driver has gone.
            SerializationError: the message is too long.
        """
        frame = encode(message)
        if self._interrupts.entered and get_ident() == self._main:
            with self._interrupts.shielded():
                self._write(frame)
        else:
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        with self._lock:
            self._socket.sendall(frame)
