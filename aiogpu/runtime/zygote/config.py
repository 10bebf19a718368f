"""What a zygote is started with: its program, environment and interpreter options.

A node that several programs share forks the workers of each from a zygote of its own.
To the core a program is one more variable in the environment of its tasks, so no other
program's worker fits them. A variable that is read when a process is exec'd, or when a
module is imported, has no effect in a fork of a zygote that has done both: tasks that
set one get a zygote of their own environment (`early_variables`); all others share the
plain one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.linux.cgroup_hierarchy import NodeCgroup
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.messages import LOG_LEVEL

_FLAGS: Final = (("optimize", "O"), ("dont_write_bytecode", "B"), ("no_user_site", "s"))


_CARRIED: Final = frozenset(
    {
        *("dev", "faulthandler", "frozen_modules", "int_max_str_digits"),
        *("no_debug_ranges", "pycache_prefix", "tracemalloc", "utf8"),
        "warn_default_encoding",
    }
)
"""What may stand behind -X of the workers; the rest would print at the end."""


def _log_level() -> Sequence[str]:
    """What tells workers the level of this program's logging, where it has chosen one.

    Workers have no handlers: `logging.lastResort` prints what they log.
    """
    root = logging.getLogger()
    if not root.handlers or root.level == logging.WARNING:
        return ()
    return ("-X", f"{LOG_LEVEL}={root.level}")


def interpreter_flags() -> Sequence[str]:
    """The command-line options of this interpreter that its workers are to share."""
    options = [
        "-" + letter * int(getattr(sys.flags, name))
        for name, letter in _FLAGS
        if getattr(sys.flags, name)
    ]
    for name, value in sys._xoptions.items():
        if name in _CARRIED:
            options += ["-X", name if value is True else f"{name}={value}"]
    options += [f"-W{option}" for option in sys.warnoptions]
    return [*options, *_log_level()]


AT_EXEC: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
"""Prefixes of what the dynamic linker, the C library and Python read."""


AT_LOAD: Final = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("VECLIB_", "NUMEXPR_"),
)
"""Prefixes of what numeric libraries read when they are loaded."""


SET_LATER: Final = frozenset(
    {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
    }
)
"""Thread counts: a worker sets them by the libraries' own setters."""


OF_DEVICES: Final = ("_VISIBLE_DEVICES", "_DEVICE_ORDER")
"""Suffixes of what says which devices there are: a zygote must see none."""


ALIASES: Final = {
    "cupy": ("CUPY_",),
    "huggingface_hub": ("HF_",),
    "jax": ("JAX_", "XLA_"),
    "tensorflow": ("TENSORFLOW_", "TF_"),
    "torch": ("TORCH_", "PYTORCH_"),
    "transformers": ("TRANSFORMERS_", "HF_"),
}
"""Prefixes that do not follow from a module's name."""


def early_variables(
    environment: Environment, modules: Iterable[str], read: Iterable[str]
) -> Environment:
    """The part of a task's variables that its zygote must be started with.

    Args:
        environment: all variables of the task's `runtime_env`.
        modules: top-level modules that the plain zygote has imported.
        read: names of variables that were read meanwhile.
    """
    if not environment:
        return ()
    prefixes: tuple[str, ...] = AT_EXEC + AT_LOAD
    for module in modules:
        prefixes += ALIASES.get(module, (f"{module.upper()}_",))
    names = set(read)
    return tuple(
        (name, value)
        for name, value in environment
        if (name in names or name.startswith(prefixes) or name == PROGRAM)
        and name not in SET_LATER
        and not name.endswith(OF_DEVICES)
    )


class ZygoteConfig(NamedTuple):
    """What all zygotes of a node share, as it was when the node was opened.

    A later generation finds what the first one has found, whatever the program has
    done to its own environment, path or directory meanwhile.

    Attributes:
        node: the node's id.
        directory: where its socket and pipes are.
        page: descriptor of the control page.
        place: descriptor of the working directory, None where we may not even
            enter it.
        cgroup: the node's, chosen before the first start.
        learns: whether workers report what they import.
        spill: directory for values beyond the memory limit, "" for the system's.
        programs: those that have joined, by key; each has zygotes of its own.
    """

    node: str
    directory: str
    page: int
    place: int | None
    cgroup: NodeCgroup
    learns: bool
    environ: Mapping[str, str]
    sys_path: Sequence[str]
    spill: str
    programs: dict[str, Program]

    @classmethod
    def take(
        cls,
        node: str,
        directory: str,
        cgroup: NodeCgroup,
        learns: bool,
        spill: str = "",
    ) -> ZygoteConfig:
        """Return what they are now, with a new control page."""
        try:
            place = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            place = None
        return cls(
            node=node,
            directory=directory,
            page=ControlPage.create(),
            place=place,
            cgroup=cgroup,
            learns=learns,
            spill=spill,
            environ=dict(os.environ),
            # Python ignores what else there may be, such as a Path.
            sys_path=[str(path) for path in sys.path if isinstance(path, str)],
            programs={},
        )

    @property
    def own(self) -> Program:
        """What is the node's own program."""
        place = "" if self.place is None else f"/proc/self/fd/{self.place}"
        flags = interpreter_flags()
        return Program(
            *(sys.executable, self.sys_path, place, self.environ), flags=flags
        )

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.page)
        if self.place is not None:
            os.close(self.place)


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
