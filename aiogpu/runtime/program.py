"""What the workers of a program begin with: its interpreter, path, place and variables.

A node that several programs share forks the workers of each from a zygote of its own.
To the core a program is one more variable in the environment of its tasks, so that
nobody else's worker fits them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from aiogpu.core.model.ids import PROGRAM

PASSING: Final = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES"})
"""Variables that differ between two starts of the same program from one shell."""


class Program(NamedTuple):
    """See above.

    Attributes:
        executable: the interpreter.
        sys_path: where it looks for modules.
        directory: the working directory.
        environ: its variables.
        preload: modules that its zygote imports.
        flags: command-line options of its interpreter.
    """

    executable: str
    sys_path: Sequence[str]
    directory: str
    environ: Mapping[str, str]
    preload: Sequence[str] = ()
    flags: Sequence[str] = ()

    @property
    def key(self) -> str:
        """The same for two programs whose workers may stand in for each other."""
        parts: list[str] = [self.executable, self.directory, *self.sys_path, "", ""]
        parts += [*self.preload, "", "", *self.flags, "", ""]
        for name, value in sorted(self.environ.items()):
            if name not in PASSING:
                parts += [name, value]
        joined = "\0".join(parts).encode("utf-8", "surrogateescape")
        from hashlib import blake2b  # most programs join nobody

        return blake2b(joined, digest_size=8).hexdigest()


def program_of(environment: Iterable[tuple[str, str]]) -> str:
    """The key of the program whose tasks have these variables, "" for none."""
    return next((value for name, value in environment if name == PROGRAM), "")
