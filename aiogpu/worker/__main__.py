"""Where the zygote's interpreter begins; the driver's `runtime.zygote` calls it."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

from aiogpu.wire.setup import Setup
from aiogpu.worker.zygote import Zygote

SCARCE: Final = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the kernel says where something is used up that others may give back."""


def main(fields: dict[str, object]) -> None:
    """Be the zygote until the node closes or the driver dies.

    Args:
        fields: the values of `Setup`, by name.
    """
    try:
        Zygote(Setup(**fields)).run()  # type: ignore[arg-type]
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno not in SCARCE:
            raise
        # The driver tries again later: another try may have what this one lacked.
        sys.excepthook(*sys.exc_info())
        sys.exit(os.EX_TEMPFAIL)
