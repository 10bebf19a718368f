"""The node's directory: private, short, and gone when the node is."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Final

from aiogpu.errors import NodeStartError

LONGEST: Final = 80
"""Bytes of a directory's path that leave room for a socket's name (unix(7): 108)."""


def create_directory() -> str:
    """Make a directory that only this user may enter (mode 0700).

    Raises:
        NodeStartError: no place can be written to.
    """
    places = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    problem: OSError | None = None
    for place in places:
        if place and len(os.fsencode(place)) <= LONGEST:
            try:
                return tempfile.mkdtemp(prefix="aiogpu-", dir=place)
            except OSError as error:
                problem = error
    raise NodeStartError(
        f"no directory for the node's socket can be made in "
        f"{', '.join(place for place in places if place)}: {problem}. Set "
        f"XDG_RUNTIME_DIR or TMPDIR to a directory that you may write to."
    )


def remove_directory(path: str) -> None:
    """Remove the directory with all in it; one that has gone is fine."""
    shutil.rmtree(path, ignore_errors=True)
