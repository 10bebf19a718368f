"""The systems, one a file. Each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.port import Environment


def _aiogpu() -> Environment:
    from benchmarks.environments.aiogpu_local import AiogpuLocal

    return AiogpuLocal()


def _executor() -> Environment:
    from benchmarks.environments.executor import Executor

    return Executor()


ENVIRONMENTS: Final[Mapping[str, Callable[[], Environment]]] = {
    "aiogpu": _aiogpu,
    "executor": _executor,
}
