"""The driver's end of a worker's, a keeper's or a zygote's connection, in a test."""

from __future__ import annotations

import socket

from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.messages import Message


class DriverEnd:
    """Listens where the child's end connects; speaks in messages."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/node.sock")
        self._listener.listen()
        self._reader = FrameReader()
        self._messages: list[Message] = []
        self.socket: socket.socket | None = None

    @property
    def path(self) -> str:
        return f"{self.directory}/node.sock"

    def accept(self) -> Message:
        """Take the one connection; give its greeting."""
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(60)
        return self.next()

    def next(self) -> Message:
        """The next message; EOFError when none will come."""
        assert self.socket is not None
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def rest(self) -> list[Message]:
        """All messages until the other end closes."""
        found = []
        try:
            while True:
                found.append(self.next())
        except EOFError:
            return found

    def send(self, *messages: Message) -> None:
        assert self.socket is not None
        self.socket.sendall(b"".join(map(encode, messages)))

    def hang_up(self) -> None:
        assert self.socket is not None
        self.socket.close()

    def close_listener(self) -> None:
        """Who comes now is refused."""
        self._listener.close()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self._listener.close()
