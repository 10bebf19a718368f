"""Tasks that look at their process. Imports little: tests measure imports."""

from __future__ import annotations

import os
from typing import Any

import aiogpu


@aiogpu.remote(num_gpus=1)
def load(module: str) -> bool:
    """Import a module; return True if it was imported already."""
    import importlib
    import sys

    was_loaded = module in sys.modules
    importlib.import_module(module)
    return was_loaded


@aiogpu.remote(num_gpus=1)
def value_of(module: str) -> Any:
    """Import a module and return its `value`."""
    import importlib

    return importlib.import_module(module).value


@aiogpu.remote
def threads() -> tuple[str | None, dict[str, int]]:
    """Return OMP_NUM_THREADS, and the threads of each loaded numeric library."""
    import sys

    import numpy
    from threadpoolctl import threadpool_info

    numpy.zeros(1)
    counts = {p["internal_api"]: p["num_threads"] for p in threadpool_info()}
    if "torch" in sys.modules:
        counts["torch"] = sys.modules["torch"].get_num_threads()
    return os.environ.get("OMP_NUM_THREADS"), counts


@aiogpu.remote
def flags() -> dict[str, Any]:
    """Return what this interpreter was started with."""
    import sys

    with open(f"/proc/{os.getppid()}/stat", encoding="latin-1") as file:
        zygote = int(file.read().rpartition(")")[2].split()[1])
    return {
        "optimize": sys.flags.optimize,
        "hash": hash("aiogpu"),
        "path": sys.path[0],
        "seed": os.environ.get("PYTHONHASHSEED"),
        "zygote": zygote,
    }


@aiogpu.remote(num_gpus=1)
def numbers() -> tuple[float, ...]:
    """Draw a number from each loaded global generator."""
    import random
    import sys

    import numpy

    drawn = [random.random(), float(numpy.random.rand())]
    if "torch" in sys.modules:
        drawn.append(float(sys.modules["torch"].rand(1)))
    return tuple(drawn)
