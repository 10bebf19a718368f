"""Reports that a node is ready, or why it failed, to its starter and to systemd.

The starter reads one line of JSON from a pipe. If the pipe ends without a line, the
process has died.
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
        pid: the node's process.
        resources: the node's resources by name.
        socket: the node's socket.
        logs: the directory of the node's logs.
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
    """Wait for the report of a node; return None if the node ends without a report.

    Raises:
        AiogpuError: the reason why the node did not start.
        TimeoutError: no report within `seconds`.
    """
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        remaining = max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], remaining)[0]:
            raise TimeoutError
        part = os.read(pipe, CHUNK)
        if not part:
            return None
        line += part
    fields = json.loads(line)
    if "ready" in fields:
        return Ready(**fields["ready"])
    kind = getattr(errors, fields["failed"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.AiogpuError)):
        kind = errors.NodeStartError  # a newer version may have other errors
    raise kind(fields["text"])


_log: Final = logging.getLogger(__name__)
_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Sends messages to the service manager, if there is one.

    Attributes:
        interval: seconds between watchdog messages; 0 without a watchdog.
    """

    def __init__(self, address: str = "", interval: float = 0.0) -> None:
        self._address = address
        self.interval = interval

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Read the variables of sd_notify(3), and remove them for all tasks."""
        address = environ.pop(_SOCKET, "")
        usec, pid = (environ.pop(name, "") for name in _WATCHDOG)
        is_ours = not pid or pid == str(os.getpid())
        # Half of the watchdog's limit, as sd_watchdog_enabled(3) advises.
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
