"""Where programs of one user meet the node that serves them.

A directory of their own, mode 0700, with the node's socket, its pidfile and its logs.
"""

from __future__ import annotations

import os
from typing import Final

SOCKET: Final = "node.sock"
PIDFILE: Final = "node.pid"
LOGS: Final = "logs"


def meeting_directory() -> str:
    """`$XDG_RUNTIME_DIR/aiogpu`, or `/tmp/aiogpu-<uid>` where there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        return f"{runtime}/aiogpu"
    return f"/tmp/aiogpu-{os.getuid()}"


def default_socket() -> str:
    """The socket that `aiogpu start` listens on and `address="auto"` joins."""
    return f"{meeting_directory()}/{SOCKET}"


def logs_beside(socket: str) -> str:
    """Where the node of that socket logs, unless it was told another directory.

    Two nodes of one user may share a directory: `b.sock` has its logs in `b-logs`.
    """
    directory, name = os.path.split(os.path.abspath(socket))
    beside = LOGS if name == SOCKET else f"{name.removesuffix('.sock')}-{LOGS}"
    return f"{directory}/{beside}"
