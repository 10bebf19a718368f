"""Which variables of a task must be there before its worker is forked. Pure.

A variable that is read when a process is exec'd, or when a module is imported, has no
effect in a fork of a zygote that has done both. Tasks that set one get a zygote of
their own environment; all others share the plain one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment

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
