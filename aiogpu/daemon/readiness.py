"""Reports that a node is ready, or why it failed, to its starter and to systemd.

The starter reads one line of JSON from a pipe. A pipe that ends without one means that
the process has died.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final, NamedTuple

from aiogpu import errors

CHUNK: Final = 1 << 16


class Ready(NamedTuple):
    """The report of a node that is ready.

    Attributes:
        pid: its process.
        resources: what it has, by name.
        socket: where it listens.
        logs: the directory of its logs.
    """

    pid: int
    resources: dict[str, float]
    socket: str
    logs: str


def report_ready(pipe: int, ready: Ready) -> None:
    """Report that the node is ready; the reader may have gone."""
    _tell(pipe, {"ready": ready._asdict()})


def report_failure(pipe: int, error: errors.AiogpuError) -> None:
    """Report why the node did not start."""
    _tell(pipe, {"failed": type(error).__name__, "text": str(error)})


def _tell(pipe: int, fields: dict[str, object]) -> None:
    with suppress(OSError):
        os.write(pipe, json.dumps(fields).encode() + b"\n")


def wait_for_report(pipe: int, seconds: float) -> Ready | None:
    """Wait for the report of a node; return None if it ends without one.

    Raises:
        AiogpuError: why it did not start.
        TimeoutError: no report within `seconds`.
    """
    ends, said = time.monotonic() + seconds, b""
    while not said.endswith(b"\n"):
        left = max(0.0, ends - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        part = os.read(pipe, CHUNK)
        if not part:
            return None
        said += part
    fields = json.loads(said)
    if "ready" in fields:
        return Ready(**fields["ready"])
    kind = getattr(errors, fields["failed"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AiogpuError)):
        kind = errors.NodeStartError  # a newer version may have others
    raise kind(fields["text"])


_log: Final = logging.getLogger(__name__)
_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Sends messages to the service manager; without one they are dropped.

    Attributes:
        interval: seconds between two watchdog messages; 0 if none are asked for.
    """

    def __init__(self, address: str = "", interval: float = 0.0) -> None:
        self._address = address
        self.interval = interval

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Read the variables of sd_notify(3), and remove them: no task may use them."""
        address = environ.pop(_SOCKET, "")
        usec, pid = (environ.pop(name, "") for name in _WATCHDOG)
        is_ours = not pid or pid == str(os.getpid())
        # Half of what it allows, as sd_watchdog_enabled(3) advises.
        interval = int(usec) / 2e6 if is_ours and usec.isdecimal() else 0.0
        if address[:1] not in ("/", "@", ""):
            _log.warning("! %s=%s is not understood; nothing is told", _SOCKET, address)
            address = ""
        return cls(address, interval if address else 0.0)

    def send(self, **fields: object) -> None:
        """Send fields, such as `READY=1`, without blocking."""
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
