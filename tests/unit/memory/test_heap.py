"""Blocks of a message's size keep their pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from aiogpu.linux.sockets import keep_pages
from aiogpu.serialization.references import SHARED_FROM

def copy_blocks():
    for _ in range(100):
        block = bytes(SHARED_FROM)
        copy = block + b"x"
        del block, copy

def faults(of):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    of()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "learning":
    print(faults(keep_pages))
else:
    if sys.argv[1] == "kept":
        keep_pages()
    print(faults(copy_blocks))
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


def test_what_it_learns_from_costs_no_page() -> None:
    """Each start of a node and of a zygote would pay for 256."""
    assert faults("learning") < 20
