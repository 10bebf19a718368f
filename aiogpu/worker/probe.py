"""Imports learnt modules in a throw-away fork, to see whether a zygote can have them.

One child imports all of them in order; after one that is unfit, the rest is for
another child.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from aiogpu.linux import syscalls as kernel
from aiogpu.worker.fitness import unfit_to_fork
from aiogpu.worker.reading import recorded_reads

LIMIT: Final = 60.0
"""Seconds that the import of one module may take."""
VISIBILITY: Final = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ROCR_VISIBLE_DEVICES",
)
"""Variables that nobody reads who does not want to know which devices there are."""


class DriverHasDied(Exception):  # noqa: N818 - it is no error
    """There is nobody for whom to go on."""


def probe(
    modules: Sequence[str], leave: Callable[[], None], driver: int
) -> tuple[list[str], dict[str, str]]:
    """Try to import each module.

    Args:
        modules: their names, in the order in which to import them.
        leave: called in each fork first, to give up what is the parent's alone.
        driver: pidfd of the driver.

    Returns:
        Those that leave a process fit to be forked, and why the others do not.

    Raises:
        DriverHasDied: while a module was imported.
    """
    fit: list[str] = []
    unfit: dict[str, str] = {}
    rest = list(modules)
    while rest:
        # Those that are fit go first, since others may build on them.
        answers = _attempt([*fit, *rest], len(fit), leave, driver)
        for answer in answers:
            if answer == "":
                fit.append(rest.pop(0))
            else:
                unfit[rest.pop(0)] = answer
    return fit, unfit


def _attempt(
    modules: Sequence[str], known: int, leave: Callable[[], None], driver: int
) -> list[str]:
    """What is said of the modules after the first `known`, up to the first culprit."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            kernel.die_with_parent(parent)
            leave()
            _import_all(modules, known, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        answers, is_hanging = _listen(reading, len(modules) - known, driver)
    finally:
        os.close(reading)
        kernel.kill(pid)
        status = os.waitpid(pid, 0)[1]
    if len(answers) < len(modules) - known and not any(answers):
        answers.append(_describe(status, is_hanging))
    return answers


def _import_all(modules: Sequence[str], known: int, answers: int) -> None:
    """Import one after the other, and say of each what comes of it; in the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        # What they print is shown when the zygote imports them.
        os.dup2(nothing, stream)
    for count, module in enumerate(modules):
        reason = _import_one(module)
        if count >= known or reason:
            os.write(answers, f"{reason}\n".encode())
        if reason:
            return


def _import_one(module: str) -> str:
    """Import it; gives why it is unfit, nothing if it is fit."""
    try:
        with recorded_reads() as names:
            importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - an import may raise anything
        reason = f"its import raises {type(error).__name__}: {error}"
        return " ".join(reason.split())[:500]
    seen = names.intersection(VISIBILITY)
    if seen:
        return f"it reads {min(seen)} while it is imported"
    return unfit_to_fork() or ""


def _listen(reading: int, count: int, driver: int) -> tuple[list[str], bool]:
    """Read so many answers, up to the first that names a reason.

    Returns:
        The answers, and whether the next one did not come in time.
    """
    poll = select.poll()
    for descriptor in (reading, driver):
        poll.register(descriptor, select.POLLIN)
    answers: list[str] = []
    partial = b""
    deadline = time.monotonic() + LIMIT
    while len(answers) < count and not any(answers):
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not ready:
            return answers, True
        if driver in ready:
            raise DriverHasDied
        data = os.read(reading, 1 << 16)
        if not data:
            break
        *lines, partial = (partial + data).split(b"\n")
        if lines:
            answers += [line.decode("utf-8", "replace") for line in lines]
            deadline = time.monotonic() + LIMIT
    return answers, False


def _describe(status: int, is_hanging: bool) -> str:
    """Why the child has not answered."""
    if is_hanging:
        return f"its import did not end within {LIMIT:g} s"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"its import was ended by {name}"
    return f"its import ended the process with code {os.WEXITSTATUS(status)}"
