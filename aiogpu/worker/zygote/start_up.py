"""The start of a zygote's interpreter: as the program's, and fit to be forked.

Before a program, Python runs code of the environment: `sitecustomize`, `usercustomize`
and lines of `.pth` files. Tracing agents and debuggers start threads there, and a
process with threads may not be forked. Then the interpreter starts once more without
the two modules, and each worker runs them after its fork, before its first task.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, NoReturn

from aiogpu.wire.messages import Setup
from aiogpu.worker.private_hooks import set_interpreter_flag
from aiogpu.worker.zygote.preload import unfit_to_fork

WITHOUT_CUSTOMIZATION: Final = "without-customization"
"""The argument of an interpreter that leaves the two modules to the workers."""


NO_SITE: Final = "-S"


class StartUp:
    """The code that Python runs before a program, in a zygote and its workers.

    Attributes:
        problem: why this process may not be forked, "" if it may.
    """

    def __init__(self, setup: Setup) -> None:
        """Make this interpreter like the program's, or start another in its place."""
        self._is_postponed = sys.argv[1:] == [WITHOUT_CUSTOMIZATION]
        culprits = self._run_site() if self._is_postponed else []
        reason = unfit_to_fork()
        if reason and not self._is_postponed and NO_SITE not in setup.flags:
            _start_without_customization()
        self.problem = f"{reason}. {_advice(culprits)}" if reason else ""
        sys.path[:] = setup.sys_path
        sys.argv[:] = setup.argv
        for name, value in setup.environ:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        isolated = "-I" in setup.flags
        set_interpreter_flag("isolated", isolated)
        set_interpreter_flag("ignore_environment", isolated or "-E" in setup.flags)
        set_interpreter_flag("safe_path", "-P" in setup.flags)
        set_interpreter_flag("no_site", NO_SITE in setup.flags)

    def _run_site(self) -> list[str]:
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

    def customize(self) -> None:
        """In a worker: run the modules that the zygote has left to it."""
        if not self._is_postponed:
            return
        import site

        site.execsitecustomize()
        if site.ENABLE_USER_SITE:
            site.execusercustomize()


def _start_without_customization() -> NoReturn:
    """Start this program again, from the beginning of standard input."""
    os.lseek(0, 0, os.SEEK_SET)
    executable, *options = sys.orig_argv
    # The name, not the file, tells Python which virtual environment it belongs to.
    command = [executable, NO_SITE, *options, WITHOUT_CUSTOMIZATION]
    os.execv("/proc/self/exe", command)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _advice(culprits: list[str]) -> str:
    if culprits:
        return f"That is done by {', '.join(culprits)}: remove it, or turn it off"
    preloaded = os.environ.get("LD_PRELOAD")
    if preloaded:
        return f"LD_PRELOAD={preloaded} may do that: unset it"
    return "Look for a .pth file or a profiler that does that, and turn it off"


def _nothing() -> None:
    """Do nothing; the worker does it."""
