"""The code that Python runs before a program, if a zygote may not be forked after it.

Python runs `sitecustomize`, `usercustomize` and lines of `.pth` files before each
program. Tracing agents start threads there, and a process with threads may not be
forked. Then the zygote's interpreter starts once more without the two modules, and each
worker runs them after its fork, before its first task. Lines of `.pth` files are always
run: editable installations need them. Most zygotes do not import this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiogpu.worker.zygote.preload import unfit_to_fork

NO_SITE: Final = "-S"
"""The option with which Python runs no code before a program."""


def postpone(flags: Sequence[str]) -> tuple[str, Callable[[], None]]:
    """Leave the two modules to the workers; start this interpreter again if necessary.

    Args:
        flags: the program's command-line options.

    Returns:
        Why this process still may not be forked, "" if it may; and the function that
        each worker must call first.
    """
    culprits: list[str] = []
    customize = _nothing
    if NO_SITE not in flags:
        if not sys.flags.no_site:
            _start_again()
        culprits, customize = _run_site(), _customize
    reason = unfit_to_fork()
    return f"{reason}. {_advice(culprits)}" if reason else "", customize


def _start_again() -> None:
    """Start this program again with -S, from the beginning of standard input."""
    os.lseek(0, 0, os.SEEK_SET)
    executable, *options = sys.orig_argv
    # The name, not the file, tells Python which virtual environment it belongs to.
    os.execv("/proc/self/exe", [executable, NO_SITE, *options])


def _run_site() -> list[str]:
    """Do what Python does without -S, except for the two modules.

    Returns:
        The `.pth` files whose code has started threads.
    """
    import site

    culprits = []
    count = _count_threads()
    before = site.addpackage, site.execsitecustomize, site.execusercustomize

    def add_package(sitedir: Any, name: Any, known_paths: Any) -> Any:
        nonlocal count
        added = before[0](sitedir, name, known_paths)
        threads = _count_threads()
        if threads > count:
            culprits.append(os.path.join(sitedir, name))
        count = threads
        return added

    site.addpackage = add_package
    site.execsitecustomize = site.execusercustomize = _nothing
    try:
        site.main()
    finally:
        site.addpackage, site.execsitecustomize, site.execusercustomize = before
    return culprits


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _nothing() -> None:
    """Do nothing, in place of the two modules."""


def _advice(culprits: list[str]) -> str:
    """Return what to do about start-up code that prevents forks."""
    if culprits:
        return f"That is done by {', '.join(culprits)}: remove it, or turn it off"
    preloaded = os.environ.get("LD_PRELOAD")
    if preloaded:
        return f"LD_PRELOAD={preloaded} may do that: unset it"
    return "Look for a .pth file or a profiler that does that, and turn it off"


def _customize() -> None:
    """Run the two modules, as `site` does."""
    import site

    site.execsitecustomize()
    if site.ENABLE_USER_SITE:
        site.execusercustomize()
