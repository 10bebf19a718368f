"""Blocks of a message's size keep their pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from aiogpu.memory.heap import keep_pages
from aiogpu.wire.outgoing import APART

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        block = bytes(APART)
        copy = block + b"x"
        del block, copy
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_pages()
print(faults())
"""


def faults(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, check=True, text=True
    )
    return int(run.stdout)


def test_pages_are_faulted_in_once() -> None:
    """Two blocks of 65 pages, a hundred times."""
    afresh = faults("afresh")
    if afresh < 1000:
        pytest.skip("this C library keeps pages by itself")
    assert faults("kept") < afresh / 20
