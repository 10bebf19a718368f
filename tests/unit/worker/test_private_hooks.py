"""What is used of others though they do not promise it: it works on this Python."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from typing import Any

import pytest

from aiogpu.worker import private_hooks

IMPORTING = """
import sys, traceback
from aiogpu.worker.private_hooks import wrap_imports

seen = []

def wrap(find):
    def note(name, import_):
        seen.append(name)
        return find(name, import_)
    return note

assert wrap_imports(wrap)
import colorsys
import colorsys
assert seen == ["colorsys"], seen
try:
    import no_such_module
except ImportError as error:
    print("".join(traceback.format_exception(error)))
"""

EXITING = """
import atexit, os, sys
from aiogpu.worker.private_hooks import forget_exit_functions, run_exit_functions

atexit.register(print, "forgotten")
forget_exit_functions()
atexit.register(print, "called")
run_exit_functions()
print("then")
sys.stdout.flush()
os._exit(0)
"""


def output_of(program: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return ran.stdout


def test_imports_are_seen_once_and_tracebacks_leave_it_out() -> None:
    told = output_of(IMPORTING)
    assert "No module named 'no_such_module'" in told
    assert "note" not in told


def test_no_import_is_noted_where_python_has_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_hooks, "_FIND", "another_way")
    assert not private_hooks.wrap_imports(lambda find: find)


def test_exit_functions_are_called_or_forgotten() -> None:
    assert output_of(EXITING) == "called\nthen\n"


def test_the_variables_are_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOGPU_TEST_HOOK", "yes")
    assert private_hooks.variables()[b"AIOGPU_TEST_HOOK"] == b"yes"
    os.environ.pop("AIOGPU_TEST_HOOK")
    assert b"AIOGPU_TEST_HOOK" not in private_hooks.variables()


def test_the_environment_is_another_class_for_a_while() -> None:
    class Loud(os._Environ[str]):
        heard: list[str]

        def __getitem__(self, name: str) -> str:
            self.heard.append(name)
            return super().__getitem__(name)

    heard: list[str] = []
    environ = os.environ
    with private_hooks.another_environ(Loud, heard=heard):
        assert os.environ is environ
        os.environ.get("PATH")
    os.environ.get("PATH")
    assert heard == ["PATH"]
    assert not hasattr(environ, "heard")


def test_a_loop_is_taken_for_the_one_that_runs() -> None:
    loop = asyncio.new_event_loop()
    private_hooks.set_running_loop(loop)
    try:
        assert asyncio.get_running_loop() is loop
    finally:
        private_hooks.set_running_loop(None)
        loop.close()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_nothing_is_said_of_a_task_that_is_left() -> None:
    loop = asyncio.new_event_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))

    async def wait() -> None:
        await asyncio.Event().wait()

    for leave in (private_hooks.leave_pending, lambda _: None):
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0))
        leave(task)
        del task
        gc.collect()
    loop.close()
    assert len(told) == 1, "of the other one"


def test_pytorch_says_when_cuda_begins() -> None:
    torch = pytest.importorskip("torch")
    called: list[int] = []
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has begun in this process")
    private_hooks.on_cuda(torch.cuda, lambda: called.append(1))
    assert not called
    assert not private_hooks.is_fork_of_cuda(torch.cuda)
