"""What the owner of a task reads when its worker has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from aiogpu.runtime.death import Death, describe_death


def status_of(end: Callable[[], object]) -> int:
    """A real wait status."""
    pid = os.fork()
    if pid == 0:
        end()
        os._exit(99)
    return os.waitpid(pid, 0)[1]


def test_an_exit_code() -> None:
    error = describe_death("train", Death(12, status_of(lambda: os._exit(3))))
    assert str(error) == (
        "the worker that ran train (pid 12) exited with code 3 without answering "
        "(os._exit?)."
    )
    assert (error.pid, error.exitcode, error.signal) == (12, 3, None)
    assert error.last_output == ()


def test_a_signal() -> None:
    status = status_of(lambda: os.kill(os.getpid(), signal.SIGKILL))
    error = describe_death("train", Death(12, status))
    assert str(error) == (
        "the worker that ran train (pid 12) was ended by signal 9 (SIGKILL)."
    )
    assert (error.exitcode, error.signal) == (None, 9)


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 3, 33])
def test_a_signal_without_a_name(number: int) -> None:
    error = describe_death("train", Death(12, int(number)))
    assert f"signal {int(number)} (a real-time signal)" in str(error)


def test_all_that_is_known_is_told() -> None:
    death = Death(12, 9, ("one", "two"), "the keeper process of its slot died")
    error = describe_death("train", death)
    assert str(error) == (
        "the worker that ran train (pid 12) was ended by signal 9 (SIGKILL); the "
        "keeper process of its slot died. Its last output:\n  one\n  two"
    )
    assert error.last_output == ("one", "two")


def test_a_worker_that_was_never_born() -> None:
    error = describe_death("train", Death(reason="too many open files"))
    assert str(error) == "no worker could be started for train: too many open files"
    assert (error.pid, error.exitcode, error.signal) == (0, None, None)
