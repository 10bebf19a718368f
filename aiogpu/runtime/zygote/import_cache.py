"""What a program's functions import, remembered between runs of the program.

A second run then starts as if its author had named the modules in `init(preload=...)`.
One small JSON file for each program and interpreter, in `$XDG_CACHE_HOME/aiogpu`. It
names modules, the time that they took to import, and which functions import them. A
module is forgotten if its file has changed or if no function has needed it for `UNUSED`
runs. Nothing here is ever a reason for an error: without a usable file a run learns
anew. `AIOGPU_IMPORT_CACHE=off` turns the cache off.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from aiogpu.runtime.zygote.learning import identity

LARGEST: Final = 1 << 18
"""Most bytes of a file."""

FILES: Final = 256
"""Most files; the one that was written first is removed for another."""

FUNCTIONS: Final = 512
"""Most functions in a file."""

UNUSED: Final = 10
"""Runs after which a module is forgotten that no function has needed."""

_log: Final = logging.getLogger(__name__)


class ImportCache:
    """The remembered imports of this program.

    Attributes:
        costs: how long each import took, in microseconds.
        late: for each function, by name, the modules that it imports as it runs.
    """

    def __init__(self, path: str) -> None:
        """Read the file, if there is one.

        Args:
            path: the file; see `learning.cache_file`.
        """
        self.costs: dict[str, int] = {}
        self.late: dict[str, set[str]] = {}
        self._unused: dict[str, int] = {}
        self._program = identity()
        self._path = path
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            self._load()

    def _load(self) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return
            data = json.loads(file.read(LARGEST))
        if data["program"] != self._program:
            return
        for module, (cost, stamp, unused) in data["modules"].items():
            if stamp == _stamp(module) and cost >= 0 and unused < UNUSED:
                self.costs[module] = int(cost)
                self._unused[module] = int(unused)
        for name, modules in data["functions"].items():
            known = {module for module in modules if module in self.costs}
            if known:
                self.late[name] = known

    def save(
        self,
        costs: Mapping[str, int],
        late: Mapping[str, Iterable[str]],
        needed: Iterable[str],
    ) -> None:
        """Write what is known now.

        Args:
            costs: the modules worth remembering, with microseconds.
            late: the modules that functions import as they run.
            needed: modules that a function of this run needed.
        """
        used = set(needed)
        modules = {
            module: (cost, _stamp(module), self._age(module, used))
            for module, cost in costs.items()
        }
        functions = {name: sorted(late[name]) for name in list(late)[-FUNCTIONS:]}
        data = json.dumps(
            {"program": self._program, "modules": modules, "functions": functions}
        )
        if len(data) > LARGEST or not modules:
            return
        try:
            _write(self._path, data)
        except OSError as error:
            _log.debug("what was learnt of imports is not kept: %s", error)

    def _age(self, module: str, used: set[str]) -> int:
        return 0 if module in used else self._unused.get(module, 0) + 1


def _stamp(module: str) -> int:
    """Return the modification time of a module's package, in nanoseconds; else 0.

    Nothing is imported to find it. An upgrade of the package changes it.
    """
    root = module.partition(".")[0]
    for place in sys.path:
        for file in (f"{place}/{root}/__init__.py", f"{place}/{root}.py"):
            with suppress(OSError, ValueError):
                return os.stat(file).st_mtime_ns
    return 0


def _write(path: str, data: str) -> None:
    directory = os.path.dirname(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NotADirectoryError(f"{directory} is not a directory of this user")
    _make_room(directory)
    draft = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(data)
    os.replace(draft, path)


def _make_room(directory: str) -> None:
    names = [entry for entry in os.scandir(directory) if entry.is_file()]
    if len(names) >= FILES:
        os.unlink(min(names, key=lambda entry: entry.stat().st_mtime).path)
