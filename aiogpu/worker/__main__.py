"""Where the zygote's interpreter begins; the driver's `runtime.zygote` calls it."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final, NoReturn

from aiogpu.wire.messages import Setup
from aiogpu.worker.private_hooks import run_exit_functions
from aiogpu.worker.zygote.main import Zygote

SCARCE: Final = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the kernel says where something is used up that others may give back."""


def main(fields: dict[str, object]) -> None:
    """Be the zygote until the node closes or the driver dies.

    Args:
        fields: the values of `Setup`, by name.
    """
    status = 0
    try:
        Zygote(Setup(**fields)).run()  # type: ignore[arg-type]
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno not in SCARCE:
            raise
        # The driver tries again later: another try may have what this one lacked.
        sys.excepthook(*sys.exc_info())
        status = os.EX_TEMPFAIL
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End this process: exit functions of what was imported, a flush, no more.

    The interpreter's own finalisation frees nothing that is frozen, and some libraries
    print at its end what was not freed: nanobind thirty lines, where torch was learnt.
    """
    try:
        run_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
