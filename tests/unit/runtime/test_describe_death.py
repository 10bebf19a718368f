"""What the owner of a task reads when its worker has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from aiogpu.linux.procfs import Findings
from aiogpu.runtime.workers.death import Death, describe_death, describe_out_of_memory


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
        "the worker that ran train (pid 12) exited with code 3 without answering: "
        "probably os._exit(), or exit() in native code. Return, or raise an "
        "exception, where the task is to end."
    )
    assert (error.pid, error.exitcode, error.signal) == (12, 3, None)
    assert (error.last_output, error.cause) == ((), "exit")


def test_a_signal() -> None:
    status = status_of(lambda: os.kill(os.getpid(), signal.SIGKILL))
    error = describe_death("train", Death(12, status))
    assert str(error).startswith(
        "the worker that ran train (pid 12) was ended by signal 9 (SIGKILL): somebody "
        "else sent that signal"
    )
    assert (error.exitcode, error.signal, error.cause) == (None, 9, "killed")


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 3, 33])
def test_a_signal_without_a_name(number: int) -> None:
    error = describe_death("train", Death(12, int(number)))
    assert f"signal {int(number)} (a real-time signal)" in str(error)
    assert error.cause == "signal"


def test_of_a_long_line_the_text_quotes_the_beginning() -> None:
    lines = ("x" * 65536, "y" * 500)
    error = describe_death("train", Death(12, 9, lines))
    quoted = str(error).partition("Its last output:")[2]
    assert quoted == f"\n  {'x' * 500}... (65536 characters)\n  {'y' * 500}"
    assert error.last_output == lines


def test_all_that_is_known_is_told() -> None:
    log = "python[12]: segfault at 0 ip 0 sp 0 error 4 in libx.so"
    death = Death(12, 11, ("one", "two"), "it was new", findings=Findings(log=log))
    error = describe_death("train", death)
    assert str(error) == (
        "the worker that ran train (pid 12) was ended by signal 11 (SIGSEGV): native "
        f"code used memory that is not its own (kernel: {log}); it was new. Run the "
        "function in this process, or call faulthandler.enable() in it, to see where. "
        "Its last output:\n  one\n  two"
    )
    assert (error.last_output, error.cause) == (("one", "two"), "segfault")


def test_a_worker_that_was_never_born() -> None:
    error = describe_death("train", Death(reason="too many open files"))
    assert str(error) == "no worker could be started for train: too many open files"
    assert (error.pid, error.exitcode, error.signal) == (0, None, None)
    assert error.cause == "not started"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "words"),
    [(0, "it asked for none (memory=)"), (512 << 20, "it asked for 512MiB")],
)
def test_a_task_that_used_too_much_memory(asked: int, words: str) -> None:
    death = Death(12, 9, ("one",))
    used, limit = int(3.14 * GIB), 4 * GIB
    error = describe_out_of_memory("train", death, asked, used, limit)
    assert str(error) == (
        f"train (pid 12) was ended while it used 3.2GiB of memory; {words}, and all "
        "together may use 4GiB before the kernel ends processes of its own choice. "
        'Give the task memory="3.2GiB", so that fewer run at once, or let it use '
        "less. Its last output:\n  one"
    )
    assert isinstance(error, MemoryError)
    assert (error.pid, error.signal, error.cause) == (12, 9, "out of memory")
    assert (error.asked, error.used, error.limit) == (asked, used, limit)
