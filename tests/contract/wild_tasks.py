"""Tasks that change, leave or kill their process. Light to import."""

from __future__ import annotations

import gc
import io
import locale
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing import get_context
from typing import Any

import aiogpu
from tests.contract import phase_tasks
from tests.contract.tasks import daemonise
from tests.support.gate import pass_gate, say

HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM
TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
note = ContextVar("note", default="")


@aiogpu.remote
def task_state() -> dict[str, Any]:
    """Return the state of the process that a task finds when it begins."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "pid": os.getpid(),
        "directory": os.getcwd(),
        "mask": mask,
        "interrupt": getattr(signal.getsignal(signal.SIGINT), "__name__", None),
        "stdout": type(sys.stdout).__name__,
        "handlers": [signal.getsignal(n) for n in HANDLED if n != signal.SIGINT],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timers": [signal.getitimer(which) for which in TIMERS],
        "variable": note.get(),
        "collects": gc.isenabled(),
        "trace": (sys.gettrace(), sys.getprofile()),
        "depth": sys.getrecursionlimit(),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": os.sched_getaffinity(0),
    }


@aiogpu.remote
def set_timers() -> None:
    for which in TIMERS:
        signal.setitimer(which, 1000.0)
    signal.alarm(1000)


@aiogpu.remote
def block_signals() -> None:
    """One is pending, and would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
    signal.signal(signal.SIGALRM, print)
    signal.raise_signal(signal.SIGALRM)


@aiogpu.remote
def set_variable() -> None:
    note.set("of another task")


@aiogpu.remote
def set_variable_amid_items() -> Iterator[int]:
    yield 1
    note.set("of another task")


@aiogpu.remote
def change_settings() -> None:
    gc.disable()
    sys.setrecursionlimit(500)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if os.getuid() == 0:
        os.nice(5)
    sys.settrace(lambda *_: None)
    sys.setprofile(lambda *_: None)


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
    for number in HANDLED:
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
    return "lost"


@aiogpu.remote(max_retries=0)
def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


@aiogpu.remote(max_retries=0)
def kill_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


@aiogpu.remote
async def fork_in_coroutine(code: int) -> tuple[int, int]:
    """Fork on the loop; the child returns from the task as well."""
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
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return codes[0]


@aiogpu.remote
def print_much(lines: int, length: int, raw: bool) -> int:
    line = "x" * (length - 1) + "\n"
    for _ in range(lines):
        if raw:
            os.write(1, line.encode())
        else:
            sys.stdout.write(line)
    return lines * length


kept: list[Any] = []
"""Objects that must not be freed when their function returns."""


def deafen() -> None:
    """Ignore the signals that ask a process to end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def fork(_path: str) -> list[int]:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return [pid]


def fork_tree(_path: str) -> list[int]:
    """Fork three generations, each in its own session, that ignore signals."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(2):
            os.setsid()
            deafen()
            os.write(writing, b"%d " % os.getpid())
            if os.fork():
                break
        else:
            os.write(writing, b"%d " % os.getpid())
        while True:
            signal.pause()
    text = b""
    while text.count(b" ") < 3:
        text += os.read(reading, 100)
    return [int(word) for word in text.split()]


def daemon(path: str) -> list[int]:
    if daemonise(path, "daemon"):
        deafen()
        while True:
            signal.pause()
    return []


def program(_path: str) -> list[int]:
    command = ["sleep", "1000"]
    kept.append(subprocess.Popen(command, start_new_session=True, close_fds=False))
    return [kept[-1].pid]


def deaf_program(_path: str) -> list[int]:
    source = (
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; "
        "print(flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    kept.append(child)
    assert child.stdout is not None
    child.stdout.read(1)
    return [child.pid]


def thread(_path: str) -> list[int]:
    threading.Thread(target=threading.Event().wait).start()
    return []


def thread_pool(_path: str) -> list[int]:
    kept.append(ThreadPoolExecutor(4))
    for _ in range(8):
        kept[-1].submit(threading.Event().wait)
    return []


def process_pool(_path: str) -> list[int]:
    kept.append(ProcessPoolExecutor(2, mp_context=get_context("fork")))
    pids = {kept[-1].submit(os.getpid).result() for _ in range(4)}
    kept[-1].submit(signal.pause)
    return sorted(pids)


def spawned_process(_path: str) -> list[int]:
    """Spawn a process; multiprocessing's resource tracker outlives all others."""
    context = get_context("spawn")
    started = context.Process(target=signal.pause)
    started.start()
    kept.append((started, context.Semaphore()))
    assert started.pid is not None
    return [started.pid]


def deaf_worker(_path: str) -> list[int]:
    deafen()
    return []


WAYS: dict[str, Callable[[str], list[int]]] = {
    way.__name__: way
    for way in (
        *(fork, fork_tree, daemon, program, deaf_program, thread, thread_pool),
        *(process_pool, spawned_process, deaf_worker),
    )
}


@aiogpu.remote(num_gpus=1, max_retries=0)
def leave(way: str, path: str) -> list[int]:
    """Leave processes or threads, wait at the gate, and return the process ids."""
    pids = WAYS[way](path)
    pass_gate(path, "left")
    return pids


@aiogpu.remote(num_gpus=1, max_retries=0)
def never_return_deaf(path: str) -> None:
    deafen()
    daemonise(path, "daemon") and threading.Event().wait()
    pass_gate(path, "deaf")
    threading.Event().wait()


@aiogpu.remote(num_gpus=0.5, max_calls=0)
def break_context(text: str) -> None:
    """Fail as PyTorch does."""
    raise RuntimeError(text, os.getpid())


@aiogpu.remote(max_concurrency=10_000)
class Crowd:
    """Answers many calls in one turn of its loop, then ends its process."""

    def __init__(self) -> None:
        import asyncio

        self.opened = asyncio.Event()
        self.unanswered = 0

    async def answer(self, number: int) -> int:
        self.unanswered += 1
        await self.opened.wait()
        self.unanswered -= 1
        return number

    async def answer_all_and_die(self, path: str, fifo: str) -> None:
        """Wait for a byte, answer all calls, end the process."""
        say(path, "ready")
        with open(fifo, "rb") as file:
            file.read(1)
        import asyncio

        self.opened.set()
        while self.unanswered:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the answers of one turn are sent in the next turn
        os._exit(3)


@aiogpu.remote
def put_and_wait() -> None:
    """Send the node a message without an answer, and wait."""
    put = aiogpu.put("a value")
    threading.Event().wait()
    del put


@aiogpu.remote
def set_trace(_item: int = 0) -> None:
    import pdb

    pdb.set_trace()


@aiogpu.remote
class Debugged:
    def debug(self) -> None:
        import pdb

        pdb.set_trace()
