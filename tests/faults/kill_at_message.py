"""Count the messages of a scenario as the driver sees them; kill after the n-th.

Both directions count: messages from zygotes, keepers and workers, and messages to them.
So "kill the keeper after message 1, 2, 3 …" is a table without gaps, which ends with
the first number that no message has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from aiogpu.linux.procfs import read_stat
from aiogpu.runtime.connection import Peer
from aiogpu.wire.connection import Connection
from aiogpu.wire.messages import Hello, Message

DRIVER: Final = "driver"
NOBODY: Final = "nobody"


class MessageKiller:
    """Within its `with` block, sees all messages of this process's nodes.

    Attributes:
        passed: the messages since `begin`: the role of the other side, and the type.
        killed: id of the killed process, 0 if there is none.
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
        """Count from here on; kill the victim after message `at`."""
        self.passed.clear()
        self.killed = 0
        self._victim, self._at = victim, at
        self._is_counting = True

    def end(self) -> bool:
        """Stop counting; return True if there was a message with that number."""
        self._is_counting = False
        return len(self.passed) >= self._at

    def __enter__(self) -> MessageKiller:
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
                # The youngest process last: dicts keep their order.
                self._hellos.pop(id(connection), None)
                self._hellos[id(connection)] = message
        self._pass(id(connection), "<", messages)

    def _pass(self, connection_id: int, way: str, messages: Sequence[Message]) -> None:
        if not self._is_counting:
            return
        for message in messages:
            hello = self._hellos.get(connection_id)
            role = hello.role if hello is not None else "?"
            self.passed.append(f"{role} {way} {type(message).__name__}")
            if len(self.passed) == self._at:
                self._kill(connection_id)

    def _kill(self, connection_id: int) -> None:
        """Kill the process at this connection, or the youngest one of the role."""
        if self._victim == DRIVER:
            os.kill(os.getpid(), signal.SIGKILL)
        hellos = [each for each in self._hellos.values() if each.role == self._victim]
        sender = self._hellos.get(connection_id)
        if sender in hellos:
            hellos.append(sender)
        for hello in reversed(hellos):
            if _is_alive(hello.pid):
                self.killed = hello.pid
                os.kill(hello.pid, signal.SIGKILL)
                return


def _is_alive(pid: int) -> bool:
    # Another process may have the same number by now.
    stat = read_stat(pid)
    return stat is not None and "aiogpu" in stat.name and stat.state not in "ZX"
