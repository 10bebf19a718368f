"""A task with very many children, and the task that they wait for."""

from __future__ import annotations

import aiogpu
from tests.support.gate import pass_gate


@aiogpu.remote
def occupies(path: str, name: str) -> None:
    """Hold the only CPU until the gate opens."""
    pass_gate(path, name)


@aiogpu.remote(num_cpus=0)
def parent(path: str, count: int) -> None:
    """Start children that wait for the CPU, and leave them behind."""
    children = [nothing.remote() for _ in range(count)]
    pass_gate(path, "parent")
    del children


@aiogpu.remote
def nothing() -> None:
    """Do nothing."""
