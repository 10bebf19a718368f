"""What a zygote imports before it forks: what the user has named, what was learnt."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from aiogpu.wire.forking import LeftOut, Ready, Unfit
from aiogpu.wire.messages import (
    Message,
)
from aiogpu.wire.setup import Setup
from aiogpu.worker.fitness import GUARDS, unfit_to_fork
from aiogpu.worker.keeper import end_children
from aiogpu.worker.probe import probe
from aiogpu.worker.reading import recorded_reads

NEEDED: Final = ("cloudpickle",)
"""What nearly every worker would import to read its first function."""


class Preload:
    """The imports of one zygote, before its first fork."""

    def __init__(
        self, setup: Setup, send: Callable[[Message], None], leave: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._send = send
        self._leave = leave

    def run(self) -> Ready | None:
        """Import all; gives what is to be said of it, None if that made us unfit.

        Then `Unfit` was sent.
        """
        with _guarded():
            if not all(self._import_named(module) for module in NEEDED):
                return None
            before = _top_level()
            with recorded_reads() as names:
                if not all(map(self._import_named, self._setup.preload)):
                    return None
                if not all(map(self._import_learnt, self._choose())):
                    return None
        modules = _top_level() - before - sys.stdlib_module_names
        return Ready(tuple(sorted(modules)), tuple(sorted(names)))

    def _import_named(self, module: str) -> bool:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - an import may raise anything
            self._send(Unfit(module, f"{type(error).__name__}: {error}", True))
            return False
        return self._prove(module)

    def _import_learnt(self, module: str) -> bool:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - an import may raise anything
            reason = f"its import raises {type(error).__name__}: {error}"
            self._send(Unfit(module, reason, False))
            return False
        return self._prove(module)

    def _prove(self, module: str) -> bool:
        reason = unfit_to_fork()
        if reason is not None:
            self._send(Unfit(module, reason, False))
        return reason is None

    def _choose(self) -> Iterator[str]:
        """The learnt modules to import: those known to be fit, then those found so."""
        proven = set(self._setup.proven)
        yield from (module for module in self._setup.learnt if module in proven)
        rest = [module for module in self._setup.learnt if module not in proven]
        if rest:
            fit, unfit = probe(rest, self._leave)
            # What they have started, and left when they were ended.
            end_children()
            for module, reason in unfit.items():
                self._send(LeftOut(module, reason))
            yield from fit


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


@contextmanager
def _guarded() -> Iterator[None]:
    """Have libraries start no threads and see no devices in the block."""
    before = {name: os.environ.get(name) for name in GUARDS}
    os.environ.update(GUARDS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
