"""The node's directory: private, short, and gone when the node is."""

from __future__ import annotations

import os
from typing import Final

from aiogpu.errors import NodeStartError

LONGEST: Final = 80
"""Bytes of a directory's path that leave room for a socket's name (unix(7): 108)."""


def create_directory() -> str:
    """Make a directory that only this user may enter (mode 0700).

    Raises:
        NodeStartError: no place can be written to.
    """
    # Of `tempfile` and its 10 ms of imports the other rules are not missed.
    named = [os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
    places = [os.path.abspath(place) for place in (*named, "/tmp") if place]
    problem: OSError | None = None
    for place in places:
        if len(os.fsencode(place)) <= LONGEST:
            path = f"{place}/aiogpu-{os.urandom(6).hex()}"
            try:
                os.mkdir(path, 0o700)
            except OSError as error:
                problem = error
            else:
                return path
    raise NodeStartError(
        f"no directory for the node's socket can be made in "
        f"{', '.join(places)}: {problem}. Set "
        f"XDG_RUNTIME_DIR or TMPDIR to a directory that you may write to."
    )


def remove_directory(path: str) -> None:
    """Remove the directory with all in it; one that has gone is fine."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
