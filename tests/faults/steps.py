"""The messages of a task's life, counted as the driver sees them, and a death after
the n-th of them.

Both directions count: what zygotes, keepers and workers say and what they are told.
So "kill the keeper after message 1, 2, 3 …" is a table without gaps: a step that no
message reaches ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from aiogpu.runtime.connection import Peer
from aiogpu.wire.connection import Connection
from aiogpu.wire.messages import Hello, Message

DRIVER: Final = "driver"
NOBODY: Final = "nobody"


class Steps:
    """While it is entered, all messages of this process's nodes pass through it.

    Attributes:
        passed: the messages since `begin`, by who sends or gets them and kind.
        killed: process id of who was killed, 0 if nobody was.
    """

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.killed = 0
        self._victim, self._at = NOBODY, 0
        self._is_counting = False
        self._peers: dict[int, Peer] = {}
        self._hellos: dict[int, Hello] = {}
        self._originals: list[tuple[type, str, Any]] = []

    def begin(self, victim: str, at: int) -> None:
        """Count from here; after message `at` the victim is killed."""
        self.passed.clear()
        self.killed = 0
        self._victim, self._at = victim, at
        self._is_counting = True

    def end(self) -> bool:
        """Count no more; whether there was a message with that number."""
        self._is_counting = False
        return len(self.passed) >= self._at

    def __enter__(self) -> Steps:
        for name in ("send", "send_one", "post"):
            self._wrap(Peer, name, self._on_sent)
        self._wrap(Connection, "receive", self._on_received)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for place, name, original in self._originals:
            setattr(place, name, original)

    def _wrap(self, place: type, name: str, note: Any) -> None:
        original = getattr(place, name)
        self._originals.append((place, name, original))

        def wrapped(subject: Any, *args: Any) -> Any:
            result = original(subject, *args)
            note(subject, args, result)
            return result

        setattr(place, name, wrapped)

    def _on_sent(self, peer: Peer, messages: Sequence[Message], _: object) -> None:
        self._pass(id(peer._connection), ">", messages)

    def _on_received(
        self, connection: Connection, _data: object, messages: Sequence[Message]
    ) -> None:
        for message in messages:
            if isinstance(message, Hello):
                # Young ones last, as dicts keep their order.
                self._hellos.pop(id(connection), None)
                self._hellos[id(connection)] = message
        self._pass(id(connection), "<", messages)

    def _pass(self, whose: int, way: str, messages: Sequence[Message]) -> None:
        if not self._is_counting:
            return
        for message in messages:
            hello = self._hellos.get(whose)
            role = hello.role if hello is not None else "?"
            self.passed.append(f"{role} {way} {type(message).__name__}")
            if len(self.passed) == self._at:
                self._kill(whose)

    def _kill(self, whose: int) -> None:
        """Whom the message concerns, or the youngest of its kind."""
        if self._victim == DRIVER:
            os.kill(os.getpid(), signal.SIGKILL)
        found = [hello for hello in self._hellos.values() if hello.role == self._victim]
        speaker = self._hellos.get(whose)
        if speaker in found:
            found.append(speaker)
        for hello in reversed(found):
            if _is_alive(hello.pid):
                self.killed = hello.pid
                os.kill(hello.pid, signal.SIGKILL)
                return


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            name, _, rest = file.read().rpartition(")")
    except OSError:
        return False
    # Of the same number there may be another by now.
    return "(aiogpu" in name and rest.split()[0] not in "ZX"
