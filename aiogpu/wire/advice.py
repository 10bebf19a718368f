"""A warning that points at the user's line, not at aiogpu's."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Final

from aiogpu.errors import AiogpuWarning

_OURS: Final = frozenset({"aiogpu", "cloudpickle"})


def advise(text: str) -> None:
    """Warn by `AiogpuWarning` at the innermost line that is not aiogpu's own.

    Args:
        text: what is slow or wasteful, and what to do.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(text, AiogpuWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in _OURS
