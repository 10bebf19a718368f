"""Tasks of modules that are dear to import, which the tests write as packages."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiogpu


@aiogpu.remote(num_gpus=0.25)
def uses(number: int) -> int:
    """Use a module that takes long to import."""
    import dear_lib

    return dear_lib.double(number)


@aiogpu.remote(num_gpus=0.25)
def uses_late(number: int) -> int:
    """Use a module that imports another one when it is called."""
    import dear_lib

    return dear_lib.late(number)


@aiogpu.remote(num_gpus=0.25)
def uses_nothing(number: int) -> int:
    """Use no module."""
    return 2 * number


@aiogpu.remote
def uses_on_cpu(number: int) -> int:
    """Use the module in a process that is used again."""
    import dear_lib

    return dear_lib.double(number)


@aiogpu.remote(num_gpus=0.25)
class Uses:
    """An actor that uses the module."""

    def double(self, number: int) -> int:
        """Return the number twice."""
        import dear_lib

        return dear_lib.double(number)


@aiogpu.remote(num_gpus=0.25)
def waits_for(path: str) -> int:
    """Import the module, whose import waits for the file; return this process's id."""
    import dear_lib

    assert dear_lib
    assert os.path.exists(path)
    return os.getpid()


@aiogpu.remote
def imports_in_forks() -> list[int]:
    """Import in a fork, and a module that forks; return the exit codes."""
    child = os.fork()
    if child == 0:
        with exits():
            importlib.import_module("dear_lib")
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    with exits(in_process=os.getpid()):
        forked = importlib.import_module("forking_lib").CHILD
    return [*codes, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]


@contextmanager
def exits(in_process: int = 0) -> Iterator[None]:
    """Exit at the end, with code 1 after an error, but not in one process."""
    code = 1
    try:
        yield
        code = 0
    finally:
        if os.getpid() != in_process:
            os._exit(code)


def spin(seconds: float) -> None:
    """Use the processor: a sleeping import would not starve others."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
