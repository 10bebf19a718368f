"""Cancelled calls, as the process of an actor hears of them.

Ray 2.60 loses an actor's order where a call of a plain method is cancelled that waits.
So these are cancelled past it: their ids come to a socket of the actor's process, which
does not begin them any more, and interrupts the one that runs. The socket has a name
and no file, so that nothing of it is left, whatever ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from aiogpu.engines import ray
from aiogpu.engines.cluster.interrupts import interrupts

ID_SIZE: Final = 24
"""Bytes of the id of a call."""
MOST: Final = 1000
"""Ids in one message."""
KEPT: Final = 100_000
"""Ids that are kept of calls that have not come; those that have ended never do."""
INTERRUPT: Final = signal.SIGURG
"""Ray's workers have SIGINT blocked. Whoever does not expect this one ignores it."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Who has sent a message, as the system says: process, user, group."""


def name_of(actor: str) -> str:
    """Under which the process of an actor hears; it stands for no file."""
    return f"\0aiogpu/{actor}"


class Cancels:
    """See above.

    Attributes:
        has_come: whether the call that runs in the main thread was interrupted.
    """

    def __init__(self, actor: str) -> None:
        self.has_come = False
        self._ids: dict[bytes, object] = {}
        self._lock = threading.Lock()
        self._is_heard = False
        self._socket: socket.socket | None = None
        self._glance = select.poll()
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        opened.setblocking(False)
        try:
            opened.bind(name_of(actor))
        except OSError:
            opened.close()  # a process of the same actor has not quite ended
        else:
            self._socket = opened
            self._glance.register(opened, select.POLLIN)

    def __repr__(self) -> str:
        return f"<Cancels {len(self._ids)}>"

    def fileno(self) -> int:
        """Of the socket; -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def watch(self) -> None:
        """Hear in a thread; what runs in the main thread, this one, is interrupted."""
        if self._socket is not None:
            signal.signal(INTERRUPT, self._on_interrupt)
            here = threading.get_ident()
            threading.Thread(target=self._listen, args=(here,), daemon=True).start()

    def _listen(self, main: int) -> None:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        while True:
            poll.poll()
            if self.take() and self._is_heard:
                signal.pthread_kill(main, INTERRUPT)

    def take(self) -> list[bytes]:
        """Return what has come since the last time."""
        found: list[bytes] = []
        with self._lock:
            while (message := self._received()) is not None:
                found += [
                    message[start : start + ID_SIZE]
                    for start in range(0, len(message), ID_SIZE)
                ]
            self._ids.update(dict.fromkeys(found))
            while len(self._ids) > KEPT:
                del self._ids[next(iter(self._ids))]
        return found

    def _received(self) -> bytes | None:
        """The next message of this user; None if there is none."""
        if self._socket is None:
            return None
        try:
            message, told, _, _ = self._socket.recvmsg(
                ID_SIZE * MOST, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
        except BlockingIOError:
            return None
        for level, kind, data in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                user = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1]
                return message if user == os.getuid() else b""
        return b""

    def has(self) -> bool:
        """Return whether the call that is to begin was cancelled."""
        if self._socket is None:
            return False
        with self._lock:
            if not self._ids and not self._glance.poll(0):
                return False
        self.take()
        return bool(self._ids) and self._is_running()

    def _is_running(self) -> bool:
        """Return whether it is the call that runs here; it is no more."""
        return self.forget(bytes.fromhex(ray.task_id()))

    def forget(self, call: bytes) -> bool:
        """Return whether a call was cancelled; it is told once."""
        return self._ids.pop(call, self) is None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """The block runs the code of a call, which its cancel interrupts."""
        self.has_come = False
        self._is_heard = True
        try:
            if self._ids and self._is_running():
                self.has_come = True
                raise KeyboardInterrupt
            yield
        finally:
            self._is_heard = False
            interrupts.forget()

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if self._is_heard and self._is_running():
            self.has_come = True
            interrupts.interrupt(frame)
