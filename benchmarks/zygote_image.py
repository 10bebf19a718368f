"""aiogpu's zygote without a node: what `worker.zygote.main` is when it first forks.

Its text is run by an interpreter of its own, and imports nothing that a zygote would
not: a fork costs what it shares.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any, Final, NoReturn

from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.messages import Setup
from aiogpu.worker.environment import Threads
from aiogpu.worker.zygote import main as zygote
from aiogpu.worker.zygote.bootstrap import Birth
from aiogpu.worker.zygote.log_records import handle_records
from aiogpu.worker.zygote.preload import Files, Imports, Preload

held: Final[list[Any]] = [zygote]
"""What a zygote would hold, too."""


def become(preload: list[str], learns: bool) -> None:
    """Import what a zygote imports, make what it makes, and freeze it all.

    Args:
        preload: modules that the user has named.
        learns: whether workers are to say what they import.
    """
    page = ControlPage.create()
    setup = Setup(
        sys_path=sys.path,
        node="benchmarks",
        directory="/nowhere",
        driver=os.getppid(),
        page=page,
        preload=preload,
        learns=learns,
    )
    threads, imports = Threads(), Imports()
    pages = ControlPage.open(page)
    handle_records()
    began = time.time_ns()
    driver = os.pidfd_open(os.getppid())
    if Preload(setup, _give_up, _leave, driver).run() is None:
        raise SystemExit(f"an interpreter with {preload} cannot be forked")
    held.append(Files(began))
    threads.scan()
    threads.begin_with_one()
    if learns:
        imports.watch()
    held.append(Birth(setup, pages, imports, threads))
    gc.collect()
    gc.freeze()


def _give_up(message: object) -> NoReturn:
    """Without learnt modules a zygote says nothing but why it cannot be forked."""
    raise SystemExit(f"it cannot be forked: {message}")


def _leave() -> None:
    """There is no connection to be left."""
