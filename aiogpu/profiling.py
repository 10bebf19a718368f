"""Profiles of tasks: the code of each task runs under cProfile or torch's profiler.

`profiled(f)` is a remote function that calls `f` under the profiler, in the worker. The
worker writes one file for each call, when the code has ended.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from importlib import import_module
from logging import getLogger
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from aiogpu.api.remote_function import Definition, RemoteFunction, RemoteGenerator
from aiogpu.api.runtime_context import get_runtime_context
from aiogpu.errors import MisuseError, OptionError

__all__ = ["profiled"]

F = TypeVar("F")

SUFFIXES: Final = {"cprofile": ".prof", "torch": ".json.gz"}
"""The tools, and the suffixes of their files."""

LONGEST_NAME: Final = 100
"""Characters of a task's name in the name of a file."""


class Profile(NamedTuple):
    """How to profile, as the worker gets it.

    Attributes:
        tool: a key of `SUFFIXES`.
        directory: the directory of the files, as an absolute path.
    """

    tool: str
    directory: str


def profiled(function: F, tool: str = "cprofile", directory: str = "profiles") -> F:
    """Return a remote function whose tasks run under a profiler.

    The worker writes a file `NAME-TASK.prof` or `NAME-TASK.json.gz` for each call, also
    if the code raises or is cancelled, and logs its path with level INFO. It overwrites
    no file: the next one of the same name is `NAME-TASK-2`. A killed task leaves none.

    Args:
        function: a function, coroutine function or generator under `@aiogpu.remote`,
            or under `@aiogpu.sync.remote`.
        tool: "cprofile" for `pstats` and snakeviz; "torch" for operators and CUDA
            kernels, a trace for https://ui.perfetto.dev.
        directory: where the files go, on the machine of the worker; it is created. A
            relative path is relative to the current directory of this program.

    Raises:
        OptionError: `tool` or `directory` is invalid.
        MisuseError: `function` is something else, such as a class. In the task: torch
            is missing, another profiler is active, or `directory` cannot be created.

    Example:
        `await profiled(train, "torch").remote(batch)`
    """
    from aiogpu import sync

    if tool not in SUFFIXES:
        raise _unknown_tool(tool)
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise OptionError(
            f"directory={directory!r} must be the path of a directory, such as "
            f"'profiles'."
        )
    if isinstance(function, sync.RemoteFunction):
        kind: Any = type(function)
        wrapped: F = kind(profiled(function._wrapped, tool, directory))
        return wrapped
    if type(function) not in (RemoteFunction, RemoteGenerator) or _is_done(function):
        raise MisuseError(
            f"profiled() was given {function!r}; give it a function under "
            f"@aiogpu.remote that is neither profiled nor traced yet (write "
            f"traced(profiled(f)) for both). In a method of an actor, use cProfile or "
            f"torch.profiler itself."
        )
    remote: Any = function
    definition = Definition(_wrapper(remote, Profile(tool, os.path.abspath(directory))))
    result: F = type(remote)(definition, remote._options)
    return result


def _is_done(function: Any) -> bool:
    run = function._definition.function
    return isinstance(run, partial) and run.func in CALLS.values()


def _wrapper(function: RemoteFunction[..., Any], profile: Profile) -> Any:
    """Return what the worker calls instead of the plain function."""
    plain = function._definition
    call = CALLS[plain.is_coroutine, plain.is_generator]
    run: Any = partial(call, function, profile)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run, name, getattr(function, name))
    run.__wrapped__ = function
    return run


def _unknown_tool(tool: object) -> OptionError:
    if tool == "nsys":
        return OptionError(
            "tool='nsys' is not possible: Nsight Systems profiles a program from its "
            "start, and workers are forked. Use tool='torch' for CUDA kernels, or run "
            "the code as a program with GPUs of its own: `aiogpu run --num-gpus=1 -- "
            "nsys profile python train.py`."
        )
    return OptionError(f"tool={tool!r} must be 'cprofile' or 'torch'.")


# In the worker.


def _plain(function: Any) -> Any:
    """Return the function that was decorated.

    In a worker, a function of `aiogpu.sync` is twice decorated: its module has it under
    the name by which the worker imports it.
    """
    while hasattr(function, "__aiogpu_function__"):
        function = function.__aiogpu_function__
    return function


def run_plain(
    function: RemoteFunction[..., Any], profile: Profile, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a task under the profiler."""
    with _profiling(profile):
        return _plain(function)(*args, **kwargs)


async def run_coroutine(
    function: RemoteFunction[..., Any], profile: Profile, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a task of a coroutine function under the profiler."""
    with _profiling(profile):
        return await _plain(function)(*args, **kwargs)


def run_generator(
    function: RemoteFunction[..., Any], profile: Profile, /, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """Run a generator under the profiler, from its first item to its end."""
    with _profiling(profile):
        yield from _plain(function)(*args, **kwargs)


async def run_async_generator(
    function: RemoteFunction[..., Any], profile: Profile, /, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Run an async generator under the profiler, from its first item to its end."""
    with _profiling(profile):
        async with aclosing(_plain(function)(*args, **kwargs)) as items:
            async for item in items:
                yield item


CALLS: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): run_plain,
    (True, False): run_coroutine,
    (False, True): run_generator,
    (True, True): run_async_generator,
}
"""What the worker calls, for each pair of (is a coroutine, is a generator)."""


@contextmanager
def _profiling(profile: Profile) -> Iterator[None]:
    context = get_runtime_context()
    name, directory = context.task_name, Path(profile.directory)
    _check_directory(directory, name)  # before the code runs, which may take hours
    stop, save = STARTS[profile.tool](name)
    try:
        yield
    finally:
        stop()
        stem = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
        said = f"profile of {name} (task {context.task_id})"
        try:
            path = _new_file(
                directory, f"{stem}-{context.task_id}", SUFFIXES[profile.tool]
            )
            save(str(path))
            getLogger(__name__).info("%s: %s", said, path)
        except OSError as error:  # a full disk costs the profile, not the result
            getLogger(__name__).warning("%s is not written: %s", said, error)


def _check_directory(directory: Path, name: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} is not writable")
    except OSError as error:
        raise MisuseError(
            f"The profile of {name} cannot be written: {error}. Give "
            f"profiled(..., directory=) a directory in which the worker can write."
        ) from error


def _new_file(directory: Path, stem: str, suffix: str) -> Path:
    """Create an empty file with a name that no other file has."""
    path, number = directory / f"{stem}{suffix}", 1
    while True:
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
            path = directory / f"{stem}-{number}{suffix}"
        else:
            return path


Started = tuple[Callable[[], object], Callable[[str], object]]
"""What stops a profiler, and what saves the profile at a path."""


def _start_cprofile(name: str) -> Started:
    from cProfile import Profile as CProfile

    profiler = CProfile()
    if sys.getprofile() is not None:
        raise _is_active(name)
    try:
        profiler.enable()
    except ValueError as error:  # from Python 3.12 on
        raise _is_active(name) from error
    return profiler.disable, profiler.dump_stats


def _start_torch(name: str) -> Started:
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise MisuseError(
            f"{name} cannot run under torch's profiler: {error}. Install torch in the "
            f"environment of the workers, or use profiled(..., 'cprofile')."
        ) from error
    if torch.autograd._profiler_enabled():
        raise _is_active(name)
    profiler = torch.profiler.profile()
    profiler.start()
    return profiler.stop, profiler.export_chrome_trace


STARTS: Final = {"cprofile": _start_cprofile, "torch": _start_torch}


def _is_active(name: str) -> MisuseError:
    return MisuseError(
        f"{name} cannot be profiled: another profiler is active in its process. On an "
        f"inline node, profile one task at a time, and do not run the program under a "
        f"profiler."
    )
