"""Where values are written that have no room in memory, unless told."""

from __future__ import annotations

import os
from typing import Final

NAMED_BY: Final = ("TMPDIR", "TEMP", "TMP")
"""Variables that name the temporary directory, as for `tempfile.gettempdir`."""
USUAL: Final = ("/tmp", "/var/tmp", "/usr/tmp")


def spill_directory() -> str:
    """The temporary directory.

    `tempfile` tries each place with a file, which stays behind where the process is
    killed in that moment.
    """
    named = [os.environ.get(name) for name in NAMED_BY]
    for place in (*named, *USUAL):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return os.path.abspath(place)
    return os.getcwd()
