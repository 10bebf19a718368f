"""The systems, one a file. Each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from benchmarks.port import Environment


@dataclass(frozen=True, slots=True)
class Place:
    """Where an environment stands.

    Attributes:
        module: of this folder.
        cls: the class in it.
        needs: the module of the system that it is for.
    """

    module: str
    cls: str
    needs: str

    def __call__(self) -> Environment:
        """Import it and make it."""
        module = import_module(f"{__name__}.{self.module}")
        environment: Environment = getattr(module, self.cls)()
        return environment


_PLACES: Final = {
    "aiogpu": Place("aiogpu_local", "AiogpuLocal", "aiogpu"),
    "node": Place("aiogpu_node", "AiogpuNode", "aiogpu"),
    "executor": Place("executor", "Executor", "concurrent.futures"),
    "loky": Place("loky", "Loky", "loky"),
    "dask": Place("dask", "Dask", "distributed"),
    "xoscar": Place("xoscar", "Xoscar", "xoscar"),
    "ray": Place("ray", "Ray", "ray"),
}

ENVIRONMENTS: Final[Mapping[str, Callable[[], Environment]]] = _PLACES


def missing(name: str) -> str:
    """Why this environment cannot be had here; nothing if it can."""
    needs = _PLACES[name].needs
    return "" if find_spec(needs) else f"{needs} is not installed"
