"""A worker's environment: bound to tasks, restored after them; library threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.current import Context
from aiogpu.wire.messages import Bind
from aiogpu.worker import environment as environ
from aiogpu.worker import private_hooks
from aiogpu.worker.environment import TaskStateReset, Threads
from tests.support.program import run


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    monkeypatch.setattr(environ, "_recorded", {})
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.setenv("AIOGPU_TEST_B", "before")


@pytest.mark.usefixtures("own_environment")
def test_bound_variables_are_restored_after_a_task() -> None:
    environ.bind(Bind({"AIOGPU_TEST_A": "bound"}, {}))
    os.environ["AIOGPU_TEST_A"] = os.environ["AIOGPU_TEST_B"] = "changed"
    environ.restore()
    assert os.environ["AIOGPU_TEST_A"] == "bound"
    del os.environ["AIOGPU_TEST_A"]
    environ.restore()
    assert os.environ["AIOGPU_TEST_A"] == "bound"
    assert os.environ["AIOGPU_TEST_B"] == "changed", "a variable of the user"


def test_loaded_random_generators_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for renew in environ.seeds():
        renew()
    assert seeded == []
    assert "torch" not in sys.modules
    numpy_random = SimpleNamespace(seed=lambda seed: seeded.append(bytes(seed).hex()))
    torch = SimpleNamespace(
        default_generator=SimpleNamespace(seed=lambda: seeded.append("torch"))
    )
    monkeypatch.setitem(sys.modules, "numpy.random", numpy_random)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    for renew in 2 * environ.seeds():
        renew()
    first, last, second, again = seeded
    assert last == again == "torch"
    assert first != second
    assert len(first) == len(second) == 32


@pytest.mark.usefixtures("own_environment")
def test_binding_pins_a_worker_to_its_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    try:
        environ.bind(Bind({}, {}, cpus=(first,)))
        assert os.sched_getaffinity(0) == {first}
        assert capsys.readouterr().err == ""
        environ.bind(Bind({}, {}, cpus=(4095,)))
        assert os.sched_getaffinity(0) == {first}
        assert "could not be pinned to CPUs (4095,)" in capsys.readouterr().err
        environ.bind(Bind({}, {}))
        assert os.sched_getaffinity(0) == {first}, "no CPUs were bound"
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def mask() -> Iterator[int]:
    mask = os.umask(0o027)
    yield 0o027
    os.umask(mask)


def test_directory_and_umask_are_restored_after_a_task(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task_state = TaskStateReset()
    task_state.record()
    os.chdir("/")
    os.umask(0)
    task_state.restore()
    assert Path.cwd() == tmp_path
    assert os.umask(mask) == mask


@pytest.mark.usefixtures("mask")
def test_reset_without_a_saved_state_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zygote, which rehearses tasks, never calls `record`."""
    task_state = TaskStateReset()
    monkeypatch.chdir(tmp_path)
    task_state.restore()
    assert Path.cwd() == tmp_path


OWN = "OMP_NUM_THREADS"


class Library:
    """A library as threadpoolctl describes it."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self.internal_api = self.filepath = name
        self.num_threads = num_threads
        self.sets: list[int] = []

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count
        self.sets.append(count)


class Machine:
    """The loaded libraries, and the number of scans for them."""

    def __init__(self) -> None:
        self.libraries: list[Library] = []
        self.scans = 0

    def scan(self) -> Any:
        self.scans += 1
        return SimpleNamespace(lib_controllers=list(self.libraries))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, context: Context) -> Machine:
    """A process without loaded libraries and without variables for threads."""
    machine = Machine()
    monkeypatch.setattr(environ, "_recorded", {})
    monkeypatch.setattr(environ, "_given", set())
    for name in (OWN, *environ.OF_LIBRARY.values()):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in environ.NUMERIC:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = ModuleType("threadpoolctl")
    module.ThreadpoolController = machine.scan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "threadpoolctl", module)
    return machine


def test_library_imported_by_a_task_gets_the_number_of_threads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    threads.adapt(2.0)
    monkeypatch.setitem(sys.modules, "numpy", ModuleType("numpy"))
    openblas = Library("openblas", 2)
    machine.libraries = [openblas]
    threads.adapt(3.0)
    assert (openblas.sets, machine.scans) == ([3], 1)


def test_torch_sets_its_threads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets: list[int] = []
    torch = SimpleNamespace(
        get_num_threads=lambda: sets[-1] if sets else 1, set_num_threads=sets.append
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    threads = Threads()
    for cpus in (1.0, 2.0, 1.0):
        threads.adapt(cpus)
    assert sets == [2, 1]


BLAS = "OPENBLAS_NUM_THREADS"


@pytest.mark.parametrize(
    ("program", "task", "omp", "blas"),
    [
        ({}, {}, "2", 2),
        ({}, {OWN: "5"}, "5", 5),
        ({}, {BLAS: "5"}, "2", 5),
        ({OWN: "3"}, {}, "3", 3),
        ({OWN: "3"}, {BLAS: "5"}, "3", 5),
        ({BLAS: "3"}, {BLAS: "5"}, "2", 5),
        ({BLAS: "3"}, {OWN: "5"}, "5", 3),
    ],
)
def test_thread_variables_of_the_task_override_those_of_the_program(
    program: dict[str, str],
    task: dict[str, str],
    omp: str,
    blas: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zygote starts with one thread; then the worker gets one CPU, then two."""
    for name, value in program.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "numpy", ModuleType("numpy"))
    openblas = Library("openblas")
    machine.libraries = [openblas]
    threads = Threads()
    threads.scan()
    threads.begin_with_one()
    environ.bind(Bind(task, {}))
    threads.adapt(1.0)
    given = {**program, **task}
    assert os.environ[OWN] == given.get(OWN, "1")
    assert openblas.num_threads == int(given.get(BLAS, given.get(OWN, "1")))
    threads.adapt(2.0)
    assert (os.environ[OWN], openblas.num_threads) == (omp, blas)


def test_imports_stay_unwrapped_without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_hooks, "_FIND", "another_way")
    assert not private_hooks.wrap_imports(lambda find: find)


SETS_FLAGS = """
    import subprocess, sys
    from aiogpu.worker.private_hooks import set_interpreter_flag
    before = list(sys.flags)
    for name in ("isolated", "ignore_environment", "safe_path", "no_site"):
        kind = type(getattr(sys.flags, name))
        for value in (True, False, True, True):
            set_interpreter_flag(name, value)
            assert getattr(sys.flags, name) == value
            assert type(getattr(sys.flags, name)) is kind, name
    assert "-I" in subprocess._args_from_interpreter_flags()
    set_interpreter_flag("isolated", False)
    set_interpreter_flag("ignore_environment", False)
    set_interpreter_flag("safe_path", False)
    set_interpreter_flag("no_site", False)
    assert list(sys.flags) == before
"""


def test_flags_of_the_interpreter_are_set() -> None:
    run(SETS_FLAGS)
