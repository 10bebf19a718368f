"""What a zygote imports before it forks: what the user has named, what was learnt."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from aiogpu.wire.messages import LeftOut, Message, Ready, Setup, Unfit
from aiogpu.worker.context import current
from aiogpu.worker.fitness import GUARDS, unfit_to_fork
from aiogpu.worker.keeper import end_children
from aiogpu.worker.probe import DriverHasDied, probe
from aiogpu.worker.reading import recorded_reads
from aiogpu.worker.sentinel import watched_over

NEEDED: Final = (
    "cloudpickle",
    "aiogpu.serialization.pickler",
    "aiogpu.memory.mapping",
    "aiogpu.memory.fd_passing",
    "aiogpu.memory.segment_pool",
)
"""What nearly every worker would import for its first function and its result; the
latter ones also where it has no descriptor left."""


class Preload:
    """The imports of one zygote, before its first fork.

    Args:
        setup: names the modules.
        send: tells the driver.
        leave: called in forks, to give up what is this process's alone.
        driver: pidfd of the driver, whose death ends all imports.
    """

    def __init__(
        self,
        setup: Setup,
        send: Callable[[Message], None],
        leave: Callable[[], None],
        driver: int,
    ) -> None:
        self._setup = setup
        self._send = send
        self._leave = leave
        self._driver = driver

    def run(self) -> Ready | None:
        """Import all; gives what is to be said of it.

        Returns:
            None if that made us unfit, and `Unfit` was sent; or the driver has died.
        """
        with _guarded():
            if not all(self._import_named(module) for module in NEEDED):
                return None
            gc.enable()  # until here there was nothing but modules, which stay
            before = _top_level()
            with recorded_reads() as names, _loading():
                if not self._import_asked():
                    return None
        modules = _top_level() - before - sys.stdlib_module_names
        return Ready(tuple(sorted(modules)), tuple(sorted(names)))

    def _import_asked(self) -> bool:
        setup = self._setup
        proven = [module for module in setup.learnt if module in setup.proven]
        rest = [module for module in setup.learnt if module not in setup.proven]
        try:
            return (
                self._import_all(self._import_named, setup.preload)
                and self._import_all(self._import_learnt, proven)
                and self._import_all(self._import_learnt, self._choose(rest))
            )
        except DriverHasDied:
            return False

    def _import_all(self, how: Callable[[str], bool], modules: Sequence[str]) -> bool:
        if not modules:
            return True
        with watched_over(self._setup, self._driver, self._leave):
            return all(map(how, modules))

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

    def _choose(self, modules: Sequence[str]) -> list[str]:
        """Those of them that a process may import that is to be forked."""
        if not modules:
            return []
        fit, unfit = probe(modules, self._leave, self._driver)
        # What they have started, and left when they were ended.
        end_children()
        for module, reason in unfit.items():
            self._send(LeftOut(module, reason))
        return fit


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


@contextmanager
def _loading() -> Iterator[None]:
    """Have a module refused that would begin its program, and so another zygote."""
    current.loader, current.name = get_ident(), "init(preload=...)"
    try:
        yield
    finally:
        current.loader, current.name = 0, ""


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
