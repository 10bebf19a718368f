"""Private interfaces of CPython, asyncio and PyTorch that workers use.

Each has one function here, which documents the fallback, and a test in
`tests/unit/worker/test_private_hooks.py` that runs on every supported Python.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

IMPORT: Final = "<frozen importlib._bootstrap>"
"""The file name of CPython's import frames, which tracebacks omit."""

_FIND: Final = "_find_and_load"

Find = Callable[..., Any]
"""CPython calls it with a name and `__import__` for each module not in
`sys.modules`."""


def wrap_imports(wrap: Callable[[Find], Find]) -> bool:
    """Replace the function that finds and loads modules, for good.

    The new function's frames count as importlib's. False if this Python has no such
    function: then imports are not recorded.
    """
    bootstrap: Any = getattr(importlib, "_bootstrap", None)
    find = getattr(bootstrap, _FIND, None)
    if find is None:
        return False
    wrapped: Any = wrap(find)
    wrapped.__code__ = wrapped.__code__.replace(co_filename=IMPORT)
    setattr(bootstrap, _FIND, wrapped)
    return True


def hook_signals(**functions: Callable[..., Any]) -> None:
    """Replace C functions that the module `signal` calls and exports, for good.

    `signal.signal` and its like convert enums, and look up the C function in a variable
    of their module. So code that has imported them by name is hooked as well. Without
    this variable, and for functions that are exported as they are, only code that finds
    them in the module is hooked.

    Args:
        **functions: the replacements, by name; they take and return plain integers.
    """
    c_module: Any = getattr(signal, "_signal", None)
    for name, function in functions.items():
        if c_module is None or getattr(signal, name) is getattr(c_module, name):
            setattr(signal, name, function)
    if c_module is not None:
        signal._signal = SimpleNamespace(**{**vars(c_module), **functions})  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call the `atexit` functions without ending the interpreter."""
    if atexit._ncallbacks():
        atexit._run_exitfuncs()


def forget_exit_functions() -> None:
    """Unregister all `atexit` functions: they belong to the parent process."""
    atexit._clear()


def resource_trackers() -> list[Any]:
    """Return the trackers of shared memory that this process has started.

    They are of `multiprocessing` and of packages derived from it; `_pid` is their
    process. If a later version keeps them elsewhere, a zygote kills them as strays.
    """
    named = [name for name in sys.modules if name.endswith("resource_tracker")]
    found = (getattr(sys.modules[name], "_resource_tracker", None) for name in named)
    # Packages import the standard one under their own name.
    unique = {id(each): each for each in found}
    return [each for each in unique.values() if getattr(each, "_fd", None) is not None]


def leave_resource_trackers() -> None:
    """Close the pipes to these trackers; the next use starts another.

    A tracker cleans up when all processes that have its pipe have closed it.
    """
    for tracker in resource_trackers():
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None


def set_interpreter_flag(name: str, value: bool) -> None:
    """Set an attribute of `sys.flags`, which Python sets only at its start.

    The standard library reads the flags, for example for the options of child
    processes. There is no fallback: the function is part of CPython's stable API.
    """
    before = getattr(sys.flags, name)
    if bool(before) == value:
        return
    import ctypes  # late: programs that have joined a node import this module too

    after = ctypes.py_object(type(before)(value))
    index = ctypes.c_ssize_t(type(sys.flags).__match_args__.index(name))
    python = ctypes.pythonapi
    python.Py_IncRef(after)  # the next call takes over one reference
    python.PyStructSequence_SetItem(ctypes.py_object(sys.flags), index, after)


def variables() -> Mapping[bytes, bytes]:
    """Return the variables of this process, as bytes.

    Reads the dict behind `os.environ`, which calls four functions per variable: 0.1 ms
    for fifty variables in every fresh process.
    """
    environ: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
    return environ


@contextmanager
def another_environ(kind: type[os._Environ[str]], **state: object) -> Iterator[None]:
    """Change the class of `os.environ` in the block, and set attributes on it.

    It stays the same object, since other code may refer to it.
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
    """Set the loop that asyncio takes for the running loop of this thread."""
    # Late, and not from `asyncio`, which workers without coroutines do not import.
    from _asyncio import _set_running_loop

    _set_running_loop(loop)


def leave_pending(task: asyncio.Task[Any]) -> None:
    """Silence asyncio's warning about a task that never ends."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def on_cuda(cuda: Any, call: Callable[[], object]) -> None:
    """Register a callback for PyTorch's initialisation of CUDA in this process."""
    cuda._lazy_call(call)


def is_fork_of_cuda(cuda: Any) -> bool:
    """Return whether PyTorch sees this process as a fork of a process with CUDA."""
    return bool(cuda._is_in_bad_fork())
