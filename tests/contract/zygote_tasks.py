"""Tasks that look at the process they are in. Imports little: that is measured."""

from __future__ import annotations

import os
from typing import Any

import aiogpu


@aiogpu.remote(num_gpus=1)
def load(module: str) -> bool:
    """Import a module; says whether it was there already."""
    import importlib
    import sys

    was_there = module in sys.modules
    importlib.import_module(module)
    return was_there


@aiogpu.remote(num_gpus=1)
def value_of(module: str) -> Any:
    """What a module holds as `value`."""
    import importlib

    return importlib.import_module(module).value


@aiogpu.remote
def threads() -> tuple[str | None, dict[str, int]]:
    """OMP_NUM_THREADS, and the threads of each numeric library that is loaded."""
    import sys

    import numpy
    from threadpoolctl import threadpool_info

    numpy.zeros(1)
    counts = {
        str(each["internal_api"]): each["num_threads"] for each in threadpool_info()
    }
    if "torch" in sys.modules:
        counts["torch"] = sys.modules["torch"].get_num_threads()
    return os.environ.get("OMP_NUM_THREADS"), counts


@aiogpu.remote
def flags() -> dict[str, Any]:
    """What this interpreter was started with."""
    import sys

    return {
        "optimize": sys.flags.optimize,
        "hash": hash("aiogpu"),
        "path": sys.path[0],
        "seed": os.environ.get("PYTHONHASHSEED"),
        "zygote": _grandparent(),
    }


def _grandparent() -> int:
    with open(f"/proc/{os.getppid()}/stat", encoding="latin-1") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@aiogpu.remote(num_gpus=1)
def numbers() -> tuple[float, ...]:
    """One draw of each global generator that is loaded."""
    import random
    import sys

    import numpy

    drawn = [random.random(), float(numpy.random.rand())]
    if "torch" in sys.modules:
        drawn.append(float(sys.modules["torch"].rand(1)))
    return tuple(drawn)
