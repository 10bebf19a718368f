"""Which of the usual libraries may be preloaded: imported once, and then forked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Final

from aiogpu.runtime.checks.finding import Finding, Level
from aiogpu.runtime.checks.trial import TrialError, try_out

LIBRARIES: Final = ("numpy", "torch", "jax", "tensorflow", "cupy")
LIMIT: Final = 120.0
"""Seconds that one import may take."""

IMPORT: Final = """
import importlib, json, os, sys, time
from aiogpu.worker.preload import GUARDS, unfit_to_fork

os.environ.update(GUARDS)
begin = time.perf_counter()
module = importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - begin
version = str(getattr(module, "__version__", ""))
print(json.dumps([seconds, version, unfit_to_fork()]))
"""
"""Imports as a zygote does, and proves what a zygote proves."""


def check_import(
    library: str,
    is_there: Callable[[str], bool] = lambda name: find_spec(name) is not None,
    limit: float = LIMIT,
) -> Iterator[Finding]:
    """Import one library in a throw-away process; says nothing if it is not there."""
    if not is_there(library):
        return
    name = f"import {library}"
    try:
        seconds, version, reason = try_out(
            IMPORT, library, limit=limit, environ=dict(os.environ)
        )
    except TrialError as error:
        yield Finding(
            name,
            Level.WARN,
            str(error),
            "It cannot be preloaded, and tasks that import it fail as well.",
            f"See what `python -c 'import {library}'` says.",
        )
        return
    told = f"{version} in {seconds:.1f} s".strip()
    if reason is None:
        yield Finding(name, Level.OK, f"{told}; it may be preloaded")
        return
    yield Finding(
        name,
        Level.WARN,
        f"{told}; {reason}",
        "It is not preloaded: workers import it themselves, each for that long.",
    )
