"""Each test of this folder must leave no descriptors and no mappings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def resources() -> tuple[list[str], list[str]]:
    """List descriptors of segments, pipes and sockets, and mappings of segments."""
    gc.collect()
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    ours = ("aiogpu", "(deleted)", "pipe:", "socket:")
    return sorted(file for file in files if any(key in file for key in ours)), mapped()


def mapped() -> list[str]:
    """List mappings of segments in memory and on disk."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    keys = ("aiogpu-segment", "(deleted)")
    return sorted(line for line in lines if any(key in line for key in keys))


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = resources()
    yield
    assert resources() == before
