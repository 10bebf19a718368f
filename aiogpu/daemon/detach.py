"""Starts a node's process in a session of its own, and waits until it is ready.

A fresh interpreter, not a fork: what has threads must not fork, and users' programs
may ask for a node as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

from aiogpu.daemon.plan import LAST_WORDS, Plan
from aiogpu.daemon.readiness import Ready, hear
from aiogpu.errors import NodeStartError
from aiogpu.runtime.zygote.config import interpreter_flags

GIVE_UP: Final = 10.0
"""Seconds that a process gets to end before it is killed."""
_TAIL: Final = 4096


def start_detached(plan: Plan) -> Ready:
    """Start the node and wait until programs can join it.

    Raises:
        NodeError: it did not start.
        DeviceError: the devices asked for are not there.
        KeyboardInterrupt: the wait was interrupted; then no node is left either.
    """
    reading, writing = os.pipe()
    words = os.memfd_create("aiogpu-words", os.MFD_CLOEXEC)
    try:
        child = _start(plan, writing, words)
    except BaseException:
        os.close(reading)
        os.close(words)
        raise
    finally:
        os.close(writing)
    try:
        ready = hear(reading, plan.opens_within)
        if ready is None:
            raise _death(plan, child.wait(), words)
    except TimeoutError:
        _end(child)
        raise NodeStartError(
            f"the node was not ready within {plan.opens_within:.0f} s and was ended. "
            f"What it did is told in {plan.place.logs}."
        ) from None
    except BaseException:
        _end(child)
        raise
    finally:
        os.close(reading)
        os.close(words)
    child.returncode = 0  # it lives on, and is not ours to wait for
    return ready


def _start(plan: Plan, pipe: int, words: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, *interpreter_flags(), *_safe(), "-m", "aiogpu.daemon"]
    source = os.memfd_create("aiogpu-plan", os.MFD_CLOEXEC)
    try:
        os.write(source, plan.packed())
        os.lseek(source, 0, os.SEEK_SET)
        return subprocess.Popen(
            [*command, plan.place.socket, str(pipe)],
            stdin=source,
            stdout=words,
            stderr=words,
            pass_fds=(pipe,),
            start_new_session=True,
        )
    except OSError as error:
        raise NodeStartError(f"{sys.executable} cannot be started: {error}") from error
    finally:
        os.close(source)


def _safe() -> tuple[str, ...]:
    """`-P` keeps the directory off `python -m`'s path, if it was not on ours."""
    try:
        return () if os.getcwd() in sys.path else ("-P",)
    except FileNotFoundError:
        return ("-P",)  # it was removed


def _end(child: subprocess.Popen[bytes]) -> None:
    """Have it close what it has begun, twice asked; by force in time."""
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(GIVE_UP)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _death(plan: Plan, status: int, words: int) -> NodeStartError:
    """The error for a process that has died without saying why."""
    ended = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    said = _tail(words)
    with suppress(OSError), open(f"{plan.place.logs}/{LAST_WORDS}", "rb") as file:
        said = said or _tail(file.fileno())
    after = f" Its last words:\n{said}" if said else ""
    return NodeStartError(
        f"the node ended before it was ready ({ended}); more may be told in "
        f"{plan.place.logs}.{after}"
    )


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
    return text.decode(errors="replace").strip()
