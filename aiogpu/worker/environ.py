"""Sets a worker's environment, before anything of the user's is unpickled."""

from __future__ import annotations

import os
import sys
from typing import Final

from aiogpu.wire.messages import Bind
from aiogpu.worker.context import current

_bound: Final[dict[str, str]] = {}


def bind(message: Bind) -> None:
    """Take on the environment and the devices that this worker has for life."""
    _bound.update(message.environ)
    os.environ.update(message.environ)
    current.accelerators = message.accelerators


def restore() -> None:
    """Undo what a task did to the bound variables; the next one relies on them."""
    for name, value in _bound.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def renew_randomness() -> None:
    """Seed anew the generators that libraries imported before the fork.

    A fork repeats its parent's numbers. The standard library's `random` sees to
    itself after a fork; numpy's and torch's global generators do not.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
