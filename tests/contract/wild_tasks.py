"""Tasks that treat their process as if it were their own. Light to import."""

from __future__ import annotations

import io
import locale
import os
import resource
import signal
import sys
import threading
from typing import Any

import aiogpu
from tests.contract import phase_tasks
from tests.support.gate import pass_gate, say


@aiogpu.remote
def task_state() -> dict[str, Any]:
    """What a task finds where it begins."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "pid": os.getpid(),
        "directory": os.getcwd(),
        "mask": mask,
        "interrupt": getattr(signal.getsignal(signal.SIGINT), "__name__", None),
        "stdout": type(sys.stdout).__name__,
    }


@aiogpu.remote
def change_directory(to: str) -> str:
    os.chdir(to)
    return os.getcwd()


@aiogpu.remote
def change_to_a_removed_directory(place: str) -> None:
    os.mkdir(place)
    os.chdir(place)
    os.rmdir(place)


@aiogpu.remote
def change_mask() -> int:
    return os.umask(0o777)


@aiogpu.remote
def change_handlers() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


@aiogpu.remote
async def change_handler_by_loop() -> None:
    import asyncio

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, print)


@aiogpu.remote
def change_stdout(way: str) -> None:
    if way == "none":
        sys.stdout = None  # type: ignore[assignment]
    else:
        sys.stdout = io.StringIO()


@aiogpu.remote
def change_locale() -> None:
    locale.setlocale(locale.LC_ALL, "C")
    os.environ["LC_ALL"] = "no_SUCH.locale"


@aiogpu.remote
def change_variables() -> None:
    os.environ["PATH"] = "/nowhere"
    os.environ["HOME"] = "changed"
    del os.environ["LOGNAME_OF_TEST"]
    os.environb.pop(b"OTHER_OF_TEST")


@aiogpu.remote
def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


@aiogpu.remote
def lower_limit(name: str, soft: int) -> None:
    number = getattr(resource, name)
    resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))


@aiogpu.remote(max_retries=0)
def compute_beyond(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 9))
    phase_tasks.spin()


@aiogpu.remote(max_retries=0)
def allocate_beyond(limit: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return len(bytearray(2 * limit))


@aiogpu.remote(max_retries=0)
def become(*command: str) -> None:
    os.execvp(command[0], command)


@aiogpu.remote(max_retries=0)
def close_all_and_return() -> str:
    os.closerange(3, 1000)
    return "nobody will hear this"


@aiogpu.remote(max_retries=0)
def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


@aiogpu.remote(max_retries=0)
def kill_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


@aiogpu.remote
async def fork_in_coroutine(code: int) -> tuple[int, int]:
    """Fork on the loop; the child comes back from the task as well."""
    import asyncio

    child = os.fork()
    if child == 0:
        await asyncio.sleep(0)
        raise SystemExit(code)
    _, status = os.waitpid(child, 0)
    return os.getpid(), os.waitstatus_to_exitcode(status)


@aiogpu.remote
def fork_in_thread() -> int:
    """Fork in a thread; the child ends with that thread's function."""
    found: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child:
            found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return found[0]


@aiogpu.remote
def daemonise(path: str, name: str) -> int:
    """Fork twice, a new session in between, all descriptors closed; as daemons do."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            say(path, name)
            os.write(writing, b".")
            os.chdir("/")
            os.closerange(0, 1000)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            phase_tasks.spin()
        os._exit(0)
    os.read(reading, 1)
    return os.getpid()


@aiogpu.remote
def print_much(lines: int, length: int, raw: bool) -> int:
    line = "x" * (length - 1) + "\n"
    for _ in range(lines):
        if raw:
            os.write(1, line.encode())
        else:
            sys.stdout.write(line)
    return lines * length


@aiogpu.remote
def hold(path: str, name: str) -> int:
    pass_gate(path, name)
    return os.getpid()
