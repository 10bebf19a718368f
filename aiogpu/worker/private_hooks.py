"""Private interfaces of CPython, asyncio and PyTorch that workers use.

Each has one function here, which says what is done without it, and a test in
`tests/unit/worker/test_private_hooks.py` that runs on every Python that is supported.
"""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

IMPORT: Final = "<frozen importlib._bootstrap>"
"""The file of the frames in which CPython imports: tracebacks leave these out."""

_FIND: Final = "_find_and_load"

Find = Callable[..., Any]
"""CPython calls it for each module that is not in `sys.modules`: name, `__import__`."""


def wrap_imports(wrap: Callable[[Find], Find]) -> bool:
    """Put something in the place of what finds and loads modules, for good.

    Its frames count as a part of importlib. False, and nothing is changed, where this
    Python has another way: then no import is noted.
    """
    bootstrap: Any = getattr(importlib, "_bootstrap", None)
    found = getattr(bootstrap, _FIND, None)
    if found is None:
        return False
    wrapped: Any = wrap(found)
    wrapped.__code__ = wrapped.__code__.replace(co_filename=IMPORT)
    setattr(bootstrap, _FIND, wrapped)
    return True


def run_exit_functions() -> None:
    """Call what was registered with `atexit`; the interpreter's own end is left out."""
    if atexit._ncallbacks():
        atexit._run_exitfuncs()


def forget_exit_functions() -> None:
    """Call nothing of that: it is another process's to do so."""
    atexit._clear()


def variables() -> Mapping[bytes, bytes]:
    """The variables of this process, as bytes.

    They are read past the mapping, whose entries cost four calls of functions each:
    for fifty of them a tenth of a millisecond in every fresh process.
    """
    found: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
    return found


@contextmanager
def another_environ(kind: type[os._Environ[str]], **state: object) -> Iterator[None]:
    """Make `os.environ` one of a subclass for the block, with these attributes.

    It stays the same object, which others may hold on to.
    """
    environ = os.environ
    vars(environ).update(state)
    environ.__class__ = kind
    try:
        yield
    finally:
        environ.__class__ = os._Environ
        for name in state:
            del vars(environ)[name]


def set_running_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Have asyncio take a loop for the one that runs in this thread."""
    # Late, and past the package: a worker without coroutines has none of it.
    from _asyncio import _set_running_loop

    _set_running_loop(loop)


def leave_pending(task: asyncio.Task[Any]) -> None:
    """Have asyncio say nothing of a task that is never run to its end."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def on_cuda(cuda: Any, call: Callable[[], object]) -> None:
    """Call back when PyTorch begins CUDA in this process; raises where it cannot."""
    cuda._lazy_call(call)


def is_fork_of_cuda(cuda: Any) -> bool:
    """Return whether PyTorch sees a fork of a process that had initialised CUDA."""
    return bool(cuda._is_in_bad_fork())
