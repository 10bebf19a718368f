"""Where the zygote's interpreter begins; the driver's `runtime.zygote` calls it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from aiogpu.wire.setup import Setup
from aiogpu.worker.zygote import Zygote


def main(fields: dict[str, object]) -> None:
    """Be the zygote until the node closes or the driver dies.

    Args:
        fields: the values of `Setup`, by name.
    """
    Zygote(Setup(**fields)).run()  # type: ignore[arg-type]
    _leave()


def _leave() -> NoReturn:
    """End this process: exit functions of what was imported, a flush, no more.

    The interpreter's own finalisation frees nothing that is frozen, and some libraries
    print at its end what was not freed: nanobind thirty lines, where torch was learnt.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
