"""Segments: none is left, neither as a descriptor nor as a mapping."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def held() -> tuple[list[str], list[str]]:
    """Descriptors of segments, pipes and sockets, and mappings of segments."""
    gc.collect()
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    ours = ("aiogpu", "(deleted)", "pipe:", "socket:")
    return sorted(each for each in files if any(key in each for key in ours)), mapped()


def mapped() -> list[str]:
    """Mappings of segments in memory or on disk."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    keys = ("aiogpu-segment", "(deleted)")
    return sorted(line for line in lines if any(key in line for key in keys))


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = held()
    yield
    assert held() == before
