"""aiogpu's zygote without a node, in the state in which it first forks.

`benchmarks.forks` runs this text in a new interpreter. It imports nothing that a zygote
does not import: a fork costs more the more memory is shared.
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
from aiogpu.worker.zygote.bootstrap import WorkerTemplate, nothing
from aiogpu.worker.zygote.log_records import handle_records
from aiogpu.worker.zygote.preload import Files, Imports, Preload

objects: Final[list[Any]] = [zygote]
"""Objects that a zygote keeps, too."""


def become(preload: list[str], learns: bool) -> None:
    """Import and build what a zygote has at its first fork, and freeze all of it.

    Args:
        preload: modules that the user has named.
        learns: workers report which modules they import.
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
    if Preload(setup, _give_up, _leave, driver, _note).run() is None:
        raise SystemExit(f"an interpreter with {preload} cannot be forked")
    objects.append(Files(began))
    threads.scan()
    threads.begin_with_one()
    if learns:
        imports.watch()
    objects.append(WorkerTemplate(setup, pages, imports, threads, nothing))
    gc.collect()
    gc.freeze()


def _note(_module: str) -> None:
    """Ignore the beginning of an import."""


def _give_up(message: object) -> NoReturn:
    """Exit: without learned modules, a zygote sends nothing but why it cannot fork."""
    raise SystemExit(f"the image cannot be forked: {message}")


def _leave() -> None:
    """Do nothing: there is no connection to leave."""
