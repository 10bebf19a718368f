"""This program, as it introduces itself to a node that it joins."""

from __future__ import annotations

import os
import sys

from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError
from aiogpu.runtime.zygote.config import interpreter_flags
from aiogpu.wire.messages import Join


def join_of(options: NodeOptions) -> Join:
    """What the node is told of this program, by which its tasks' workers begin."""
    from aiogpu import __version__

    return Join(
        release=__version__,
        name=_name(),
        executable=sys.executable,
        flags=tuple(interpreter_flags()),
        sys_path=tuple(path for path in sys.path if isinstance(path, str)),
        directory=_directory(),
        environ=dict(os.environ),
        preload=tuple(options.preload),
        shows=options.log_to_driver,
        only_looks=options.only_looks,
        weight=_weight(),
    )


def _weight() -> float:
    """What this program gets where another gets 1, by the variable AIOGPU_WEIGHT.

    Raises:
        OptionError: it is no number above 0.
    """
    given = os.environ.get("AIOGPU_WEIGHT") or "1"
    try:
        weight = float(given)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise OptionError(
            f"AIOGPU_WEIGHT={given!r} is no weight; give a number above 0, such as 2 "
            f"for twice what another program gets, or leave it out."
        )
    return weight


def _name() -> str:
    """How people know this program."""
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return os.path.basename(script) or os.path.basename(sys.executable) or "python"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def unreachable(path: str, error: OSError) -> str:
    """The words for a node that cannot be reached."""
    return (
        f"no node can be reached at {path}: {error.strerror or error}. Start one by "
        f"`aiogpu start --head`, or leave address out for one of the program's own."
    )
