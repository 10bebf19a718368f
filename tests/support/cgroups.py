"""Whether this machine lets a test have cgroups of its own, and which there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiogpu.linux.cgroup import Cgroup, find_cgroup

PLACE = find_cgroup()
needs_cgroup = pytest.mark.skipif(PLACE.directory is None, reason=PLACE.reason)
"""For tests that make groups; where none can be made, the reason is shown."""


@contextmanager
def group(name: str) -> Iterator[Cgroup]:
    """A group for a test, killed and removed afterwards."""
    made = Cgroup(f"{PLACE.directory}/test-{name}-{os.getpid()}")
    made.make()
    try:
        yield made
    finally:
        made.kill()
        assert made.wait_until_empty(10)
        assert made.remove()


def all_groups() -> set[str]:
    """Names of the groups that all drivers' nodes have, and of others."""
    return set(os.listdir(PLACE.directory)) if PLACE.directory is not None else set()


def groups_of(pid: int) -> list[str]:
    """Names of the groups that a driver's nodes have."""
    return [name for name in all_groups() if name.endswith(f"-{pid}")]
