"""When no worker can be started now, and what is said of it."""

from __future__ import annotations

import errno
from typing import Final

from aiogpu.errors import NodeStartError

_USED_UP: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
SCARCE: Final = (*_USED_UP, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""What the kernel says where something is used up that others may give back, or where
the node's directory is gone. The workers that are there can run what waits."""
NO_PROCESS: Final = (*_USED_UP, errno.EAGAIN)
"""Where a process cannot be started for want of something (fork(2))."""


class CrowdedError(OSError):
    """There is no room for another slot now; there may be later."""


class UnavailableError(NodeStartError):
    """There is no zygote for an environment now; there may be one later."""


def is_scarcity(error: BaseException | None) -> bool:
    """Whether a process could not be started for want of what others may give back."""
    return isinstance(error, OSError) and error.errno in NO_PROCESS
