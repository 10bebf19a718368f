"""When no worker can be started now, and what is said of it."""

from __future__ import annotations

import errno
from typing import Final

from aiogpu.errors import NodeStartError

SCARCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the kernel says where something is used up that others may give back."""
NO_PROCESS: Final = (*SCARCE, errno.EAGAIN)
"""The same where a process cannot be started (fork(2))."""


class CrowdedError(OSError):
    """There is no room for another slot now; there may be later."""


class UnavailableError(NodeStartError):
    """There is no zygote for an environment now; there may be one later."""


def is_scarcity(error: BaseException | None) -> bool:
    """Whether a process could not be started for want of what others may give back."""
    return isinstance(error, OSError) and error.errno in NO_PROCESS
