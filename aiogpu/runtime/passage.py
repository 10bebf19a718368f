"""The second socket of a node: over it go the descriptors of shared memory.

asyncio's transports cannot carry them, so its connections are raw ones, made by those
workers alone that have to do with shared memory. A worker says its id, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

from aiogpu.linux.syscalls import peer_credentials

if TYPE_CHECKING:
    from aiogpu.runtime.store import Store

_log: Final = logging.getLogger(__name__)
BACKLOG: Final = 64
RETRY: Final = 0.1
"""Seconds after which connections are accepted again where that was not possible."""
ID: Final = 8
"""Bytes of a worker's id, the lowest first."""
WITHIN: Final = 10.0
"""Seconds in which it says its id; it does so at once, unless it is stopped."""


class Passage:
    """Accepts workers' connections and hands them to what keeps their loans."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str, store: Store
    ) -> None:
        self._loop = loop
        self._store = store
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind(path)
        self._listening.listen(BACKLOG)
        self._later: asyncio.TimerHandle | None = None
        self._listen()
        store.catch_up = self.catch_up

    def _listen(self) -> None:
        self._later = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> bool:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            # No descriptor, or no memory: who waits there is asked in again later.
            _log.warning("! a worker cannot connect for shared memory yet: %s", error)
            self._loop.remove_reader(self._listening.fileno())
            if self._later is None:
                self._later = self._loop.call_later(RETRY, self._listen)
            return False
        connected.setblocking(False)
        if peer_credentials(connected).uid != os.geteuid():
            connected.close()
            return True
        late = self._loop.call_later(WITHIN, self._turn_away, connected)
        self._greeting[connected] = late
        self._loop.add_reader(connected.fileno(), partial(self._greet, connected))
        return True

    def catch_up(self) -> None:
        """Take in who has connected, before the loop comes to tell of it.

        What a worker says of a segment may come first by the other socket.
        """
        while self._accept():
            pass
        for connected in list(self._greeting):
            self._greet(connected)

    def _turn_away(self, connected: socket.socket) -> None:
        """It has said nothing."""
        self._loop.remove_reader(connected.fileno())
        del self._greeting[connected]
        connected.close()

    def _greet(self, connected: socket.socket) -> None:
        told = b""
        try:
            told = connected.recv(ID)
        except BlockingIOError:
            return
        except OSError:
            pass  # it has gone
        self._greeting.pop(connected).cancel()
        self._loop.remove_reader(connected.fileno())
        caller = self._store.caller(int.from_bytes(told, "little"))
        if caller is None or len(told) != ID:
            connected.close()
            return
        lending, pid = self._store.lending(caller), peer_credentials(connected).pid
        if lending.is_connected or (caller.pid and caller.pid != pid):
            _log.warning(
                "! refused shared memory to process %d, which says that it is number "
                "%d (process %d): each connects once, and for itself",
                *(pid, caller.id, caller.pid),
            )
            connected.close()
            return
        lending.connect(connected)

    def close(self) -> None:
        """Accept nobody any more."""
        if self._later is not None:
            self._later.cancel()
        for late in self._greeting.values():
            late.cancel()
        for sock in (*self._greeting, self._listening):
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._greeting.clear()
