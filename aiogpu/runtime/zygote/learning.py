"""Which modules the zygotes of an environment should import, and where that is kept."""

from __future__ import annotations

import os
import sys
from binascii import crc32
from collections.abc import Iterable, Sequence
from typing import Any, Final

VARIABLE: Final = "AIOGPU_IMPORT_CACHE"
"""Set to "off", it keeps nothing between runs of the program."""

DEAR: Final = 50_000
"""A module is learnt at once if its import takes at least this many microseconds."""


NOT_CHEAP: Final = 5_000
"""A module is learnt if its import takes at least this many microseconds twice."""


MOST: Final = 64
"""Most modules learnt for one environment."""


REMEMBERED: Final = 1024
"""Most modules remembered after one slow import."""


DEVICE_MODULES: Final = frozenset(
    {
        "bitsandbytes",
        "cupy",
        "deepspeed",
        "flash_attn",
        "numba.cuda",
        "pycuda",
        "tensorrt",
        "triton",
        "vllm",
        "xformers",
    }
)
"""Modules that look for devices at import and remember the result. In a zygote, which
sees no devices, they would find none."""


class Learning:
    """The modules that the zygotes of an environment should import.

    A module is learnt if a function names it, or from the imports of workers: if its
    import was slow once, or not fast in two workers.

    Attributes:
        modules: the modules, in the order in which they are imported.
        needed: those that a call has needed in this run; the others may never be.
        left_out: unfit modules, each with the reason.
        costs: how long imports have taken, in microseconds.
        is_full: the zygotes use so much memory that nothing more is learnt.
        spent: how long workers have spent on slow imports, in microseconds.
    """

    def __init__(self, explicit: Iterable[str], learnt: Sequence[str] = ()) -> None:
        self.modules: list[str] = list(learnt)
        self.needed: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.costs: dict[str, int] = {}
        self.spent: dict[str, int] = {}
        self.is_full = False
        self._explicit = frozenset(explicit)
        self._seen: set[str] = set()

    def note(self, names: Sequence[str], microseconds: Sequence[int]) -> bool:
        """Note the imports of one worker; return True if a module was learnt.

        A worker imports a module once, so each report comes from another worker.
        """
        count = len(self.modules)
        for name, cost in zip(names, microseconds, strict=False):
            self.costs[name] = cost
            if cost >= DEAR and not sees_devices(name):
                self.spent[name] = self.spent.get(name, 0) + cost
            if cost < NOT_CHEAP or not self.may_learn(name):
                continue
            if cost >= DEAR or name in self._seen:
                self._seen.discard(name)
                self.modules.append(name)
                self.needed.add(name)
            elif len(self._seen) < REMEMBERED:
                self._seen.add(name)
        return len(self.modules) > count

    def note_zygote(self, names: Sequence[str], microseconds: Sequence[int]) -> None:
        """Note the imports of a zygote, one after the other.

        A module that an earlier one has brought costs nothing there. In a process that
        imports it alone it would cost what is known of it, or at most all of these.
        """
        total = sum(microseconds)
        for name, cost in zip(names, microseconds, strict=False):
            known = self.costs.get(name, 0)
            was_brought = cost < NOT_CHEAP <= known
            self.costs[name] = min(known, total) if was_brought else cost

    def want(self, names: Iterable[str]) -> list[str]:
        """Learn modules that a function needs; return those that may be learnt."""
        wanted = []
        for name in names:
            if name not in self.modules and self.may_learn(name):
                self.modules.append(name)
            if name in self.modules:
                wanted.append(name)
        return wanted

    def dearest(self) -> list[str]:
        """Return the modules that cost workers the most, the dearest first.

        On a busy machine even the import of a small module takes long now and then.
        So these are the modules with at least a tenth of the time each; or the dearest
        one, if none has as much.
        """
        total = sum(self.spent.values())
        names = sorted(self.spent, key=self.spent.__getitem__, reverse=True)
        return [name for name in names if 10 * self.spent[name] >= total] or names[:1]

    def may_learn(self, name: str) -> bool:
        """Return True if a zygote may try to import a module that is not learnt yet."""
        return (
            len(self.modules) < MOST
            and not self.is_full
            and name not in self._explicit
            and name not in self.modules
            and name not in self.left_out
            and not sees_devices(name)
        )

    def leave_out(self, module: str, reason: str) -> None:
        """Note that a module is unfit: no zygote imports it from now on."""
        self.left_out[module] = reason
        if module in self.modules:
            self.modules.remove(module)


def sees_devices(module: str) -> bool:
    """Return True if importing the module would look for devices."""
    return any(f"{module}.".startswith(f"{name}.") for name in DEVICE_MODULES)


def identity() -> list[str]:
    """Return what identifies this program and its interpreter."""
    main: Any = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    try:
        # A notebook or a prompt has no file: its directory stands for it.
        name = os.path.abspath(file) if isinstance(file, str) else os.getcwd()
    except FileNotFoundError:
        name = ""  # the directory was removed
    return [name, str(getattr(spec, "name", "")), sys.executable, sys.version]


def cache_file() -> str:
    """Return the path of this program's `ImportCache`; "" for none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    program = identity()
    if os.environ.get(VARIABLE) == "off" or not os.path.isabs(cache) or not program[0]:
        return ""
    number = crc32("\0".join(program).encode("utf-8", "replace"))
    return f"{cache}/aiogpu/imports-{number:08x}.json"
