"""Tells the service manager how the node is; the protocol of sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

_log: Final = logging.getLogger(__name__)

_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """One way to the service manager; without one, nothing is said.

    Attributes:
        interval: seconds between two signs of life that it asks for, 0 for none.
    """

    def __init__(self, address: str = "", interval: float = 0.0) -> None:
        self._address = address
        self.interval = interval

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """What the variables say; they are removed, so that no task speaks for us."""
        address = environ.pop(_SOCKET, "")
        usec, pid = (environ.pop(name, "") for name in _WATCHDOG)
        is_ours = not pid or pid == str(os.getpid())
        # Half of what it allows, as sd_watchdog_enabled(3) advises.
        interval = int(usec) / 2e6 if is_ours and usec.isdecimal() else 0.0
        if address[:1] not in ("/", "@", ""):
            _log.warning("! %s=%s is not understood; nothing is told", _SOCKET, address)
            address = ""
        return cls(address, interval if address else 0.0)

    def tell(self, **fields: object) -> None:
        """Send fields, such as `READY=1`; who does not listen is not waited for."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        # An abstract socket, which has no file, is written with an at sign.
        address = self._address
        where = f"\0{address[1:]}" if address.startswith("@") else address
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, kind) as to:
                to.sendto(text.encode(), where)
        except OSError as error:
            _log.warning("! the service manager cannot be told %r: %s", text, error)
