"""Cgroups for tests, where the machine allows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiogpu.linux.cgroup import Cgroup, find_cgroup

PLACE = find_cgroup()
needs_cgroup = pytest.mark.skipif(PLACE.directory is None, reason=PLACE.reason)
"""Skips tests that make cgroups where the machine does not allow it."""


@contextmanager
def group(name: str) -> Iterator[Cgroup]:
    """A cgroup for a test, killed and removed afterwards."""
    cgroup = Cgroup(f"{PLACE.directory}/test-{name}-{os.getpid()}")
    cgroup.make()
    try:
        yield cgroup
    finally:
        cgroup.kill()
        assert cgroup.wait_until_empty(10)
        assert cgroup.remove()


def all_groups() -> set[str]:
    """Names of all cgroups beside this process's own."""
    return set(os.listdir(PLACE.directory)) if PLACE.directory is not None else set()


def groups_of(pid: int) -> list[str]:
    """Names of the cgroups of a driver's nodes."""
    return [name for name in all_groups() if name.endswith(f"-{pid}")]
