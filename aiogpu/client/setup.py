"""The option `setup`: a function that runs once in a process, before tasks of another.

Both are pickled together: pickled by value, they share their globals only then. The
process unpickles the pair once, and runs the setup at that time.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.errors import WorkerSetupError
from aiogpu.serialization.serializer import load_function, load_reference

_lock: Final = RLock()
"""The inline engine loads functions in several threads."""

_loaded: Final[dict[bytes, Callable[..., Any]]] = {}
"""The functions whose setup has run in this process, by the pickled pair."""

_ran: Final[set[Callable[[], object]]] = set()
"""The setups that have run; of functions sent by name, several may have the same."""


class PickledSetup:
    """A pickled function and its setup that unpickle as the function, set up.

    Args:
        name: name of the function, for errors.
        pair: a list of the setup and the function, pickled together; each by value,
            or by its module and name.
    """

    def __init__(self, name: str, pair: bytes) -> None:
        self._name = name
        self._pair = pair

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return load_set_up, (self._name, self._pair)


def load_part(part: Any) -> Callable[..., Any]:
    """Return a function that was sent by value, or by its module and name."""
    if not isinstance(part, tuple):
        return part  # type: ignore[no-any-return]
    function = load_reference(*part)
    return getattr(function, "__aiogpu_function__", function)  # type: ignore[no-any-return]


def load_set_up(name: str, pair: bytes) -> Callable[..., Any]:
    """Unpickle a function; run its setup unless it has run in this process.

    Raises:
        WorkerSetupError: the setup has raised; the next call tries it again.
    """
    with _lock:
        function = _loaded.get(pair)
        if function is None:
            setup, function = map(load_part, load_function(pair))
            if setup not in _ran:
                _run(name, setup)
                _ran.add(setup)
            _loaded[pair] = function
        return function


def _run(name: str, setup: Callable[[], object]) -> None:
    loader, current.loader = current.loader, 0  # user code runs, which may start tasks
    try:
        setup()
    except (Exception, SystemExit) as error:
        title = getattr(setup, "__name__", repr(setup))
        raise WorkerSetupError(
            f"{name} cannot run in this worker: its setup {title}() raised "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        current.loader = loader
