"""When there is no room for another slot, and what is said of it."""

from __future__ import annotations

import errno
from typing import Final

SCARCE: Final = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.ENOSPC, errno.EDQUOT, errno.ENOENT),
)
"""What the kernel says where something is used up that others may give back, or where
the node's directory is gone. The workers that are there can run what waits."""


class CrowdedError(OSError):
    """There is no room for another slot now; there may be later."""
