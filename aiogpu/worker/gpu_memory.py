"""Tells PyTorch how much memory of each GPU this worker may use.

PyTorch reads no variable for it that all its releases know, and asking it to set the
limit would begin CUDA, which costs memory and half a second, also where the task
never needs it. So the limit is left with it to be set when CUDA begins: at once where
the zygote has loaded it, else when it has been imported. Other frameworks read
variables, of which the driver knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from aiogpu.worker.context import current

MODULE: Final = "torch.cuda"
"""Where PyTorch keeps what is to be done when CUDA begins."""


def limit_torch(limits: Sequence[int]) -> None:
    """Have PyTorch keep to so many bytes of each visible GPU, 0 for no limit.

    Never raises: what goes wrong is one line of the task's output.
    """
    cuda = sys.modules.get(MODULE)
    if cuda is not None:
        leave_with(cuda, limits)
        return
    sys.meta_path.insert(0, Watching(partial(leave_with, limits=tuple(limits))))


class Watching:
    """Finds nothing itself; calls back with PyTorch's module once it was imported.

    It stays where it is: whoever goes through `sys.meta_path` in another thread would
    miss a finder if one before it was removed.

    Attributes:
        is_waiting: whether it has not called back yet.
    """

    def __init__(self, call: Callable[[ModuleType], object]) -> None:
        self.is_waiting = True
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leave the module to the other finders, and have it call back."""
        if name != MODULE or not self.is_waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        try:
            execute = loader.exec_module
            if isinstance(loader, type):
                raise AttributeError(f"{loader} is a class, which loads others too")
            # A loader may serve many modules, and be found again for this one.
            if getattr(execute, "func", None) != self._execute:
                loader.exec_module = partial(self._execute, loader, execute)
        except AttributeError as error:
            _complain(error)

    def _execute(
        self, loader: Any, execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        if module.__name__ != MODULE:
            execute(module)
            return
        del loader.exec_module
        execute(module)  # one that fails is perhaps imported again
        self.is_waiting = False
        self._call(module)


def leave_with(cuda: Any, limits: Sequence[int]) -> None:
    """Have PyTorch's module set the limits when CUDA begins, or now if it has."""
    try:
        set_all = partial(_set_all, cuda, tuple(limits))
        if cuda.is_initialized():
            set_all()
        else:
            cuda._lazy_call(set_all)
    except Exception as error:  # noqa: BLE001 - the user's import must go on
        _complain(error)


def _set_all(cuda: Any, limits: tuple[int, ...]) -> None:
    try:
        for index, limit in _by_index(limits, cuda.device_count()):
            total = cuda.get_device_properties(index).total_memory
            if 0 < limit < total:
                cuda.set_per_process_memory_fraction(limit / total, index)
    except Exception as error:  # noqa: BLE001 - CUDA itself must begin nevertheless
        _complain(error)


def _by_index(limits: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """The limits by the index of the GPU as PyTorch counts."""
    if count == len(limits):
        return list(enumerate(limits))
    # The user keeps the assigning variable to himself, so all of the node's are seen.
    ids = current.accelerators.get("GPU", ())
    found = zip(ids, limits, strict=False)
    return [(index, limit) for index, limit in found if isinstance(index, int)]


def _complain(error: Exception) -> None:
    sys.stderr.write(
        f"aiogpu: PyTorch could not be told how much GPU memory it may use, and is not "
        f"limited: {type(error).__name__}: {error}\n"
    )
