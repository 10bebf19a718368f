"""The command line of every Python interpreter that aiogpu starts."""

from __future__ import annotations

from collections.abc import Sequence


def interpreter_command(
    executable: str, *program: str, flags: Sequence[str] = ()
) -> list[str]:
    """Return the command line of an interpreter that imports nothing from here.

    Without -P, Python puts the current directory first on the import path, for `-c` and
    for `-m`. In a directory such as /tmp any user can leave a `json.py`, which would
    then run as the user who started aiogpu.

    Args:
        executable: the interpreter.
        program: `-c` and a source text, or `-m` and a module; then its arguments.
        flags: other options of the interpreter.
    """
    return [executable, *flags, "-P", *program]
