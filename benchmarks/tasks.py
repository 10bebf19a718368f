"""The user code of all workloads. Imports nothing, since workers import it."""

import sys


def noop(number: int) -> None:
    """Do nothing."""


def count_asyncio(number: int) -> int:
    """How many modules of asyncio this process has loaded."""
    return sum(name.partition(".")[0] == "asyncio" for name in sys.modules)
