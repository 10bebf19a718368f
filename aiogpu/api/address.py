"""Which node is meant where none is named."""

from __future__ import annotations

import os

from aiogpu.errors import NodeError
from aiogpu.worker.context import current


def default_address() -> str | None:
    """The address that the variable AIOGPU_ADDRESS supplies, None without."""
    return os.environ.get("AIOGPU_ADDRESS") or None


def refuse_in_worker(what: str) -> None:
    """Raise `NodeError` where this process is a worker.

    Raises:
        MisuseError: it is one that imports a module for its task, or whose task does.
    """
    if current.worker or current.is_loading:
        from aiogpu.worker.nested import refuse_to_begin_anew

        refuse_to_begin_anew()
    if current.worker:
        raise NodeError(
            f"{what} cannot be reached inside a task or what it has forked; it is the "
            f"program's. A task starts others by .remote(); on an inline node it does "
            f"so in the thread that it runs in."
        )
