"""A worker's environment, restored after tasks, and what is used of others for it."""

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


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    monkeypatch.setattr(environ, "_found", {})
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.setenv("AIOGPU_TEST_B", "before")


@pytest.mark.usefixtures("own_environment")
def test_what_a_task_changes_is_restored_where_it_was_bound() -> None:
    environ.bind(Bind({"AIOGPU_TEST_A": "bound"}, {}))
    for change in ("changed", None):
        if change is None:
            del os.environ["AIOGPU_TEST_A"]
        else:
            os.environ["AIOGPU_TEST_A"] = os.environ["AIOGPU_TEST_B"] = change
        environ.restore()
        assert os.environ["AIOGPU_TEST_A"] == "bound"
    assert os.environ["AIOGPU_TEST_B"] == "changed", "the user's own"


def test_generators_are_seeded_where_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_pinning(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert os.sched_getaffinity(0) == {first}, "nothing is said of CPUs"
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def mask() -> Iterator[int]:
    mask = os.umask(0o027)
    yield 0o027
    os.umask(mask)


def test_directory_and_mask_are_put_back(
    mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called = []
    task_state = TaskStateReset(lambda: called.append("handler"))
    task_state.find()
    os.chdir("/")
    os.umask(0)
    task_state.restore()
    assert Path.cwd() == tmp_path
    assert os.umask(mask) == mask
    assert called == ["handler"]


@pytest.mark.usefixtures("mask")
def test_one_that_has_found_nothing_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the zygote, where tasks are rehearsed."""
    task_state = TaskStateReset(lambda: None)
    monkeypatch.chdir(tmp_path)
    task_state.restore()
    assert Path.cwd() == tmp_path


OWN = "OMP_NUM_THREADS"


class Library:
    """A library as threadpoolctl shows it."""

    def __init__(self, name: str) -> None:
        self.internal_api = self.filepath = name
        self.num_threads = 1
        self.sets: list[int] = []

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count
        self.sets.append(count)


class Machine:
    """The libraries that are loaded, and how often they were looked for."""

    def __init__(self) -> None:
        self.libraries: list[Library] = []
        self.scans = 0

    def scan(self) -> Any:
        self.scans += 1
        return SimpleNamespace(lib_controllers=list(self.libraries))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, context: Context) -> Machine:
    """No library is loaded, no variable set, and nothing is left behind."""
    machine = Machine()
    monkeypatch.setattr(environ, "_found", {})
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


def load(monkeypatch: pytest.MonkeyPatch, name: str, module: object = None) -> None:
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def test_a_library_that_a_task_has_imported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    threads.adapt(2.0)
    load(monkeypatch, "numpy")
    openblas = Library("openblas")
    openblas.num_threads = 2
    machine.libraries = [openblas]
    threads.adapt(3.0)
    assert (openblas.sets, machine.scans) == ([3], 1)


def test_torch_has_a_setter_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets: list[int] = []
    torch = SimpleNamespace(
        get_num_threads=lambda: sets[-1] if sets else 1, set_num_threads=sets.append
    )
    load(monkeypatch, "torch", torch)
    threads = Threads()
    for cpus in (1.0, 2.0, 1.0):
        threads.adapt(cpus)
    assert sets == [2, 1]


BLAS = "OPENBLAS_NUM_THREADS"


@pytest.mark.parametrize(
    ("programs", "tasks", "omp", "blas"),
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
def test_variables_of_the_task_go_before_those_of_the_program(
    programs: dict[str, str],
    tasks: dict[str, str],
    omp: str,
    blas: int,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the zygote's start on, first with one CPU and then with two."""
    for name, value in programs.items():
        monkeypatch.setenv(name, value)
    load(monkeypatch, "numpy")
    openblas = Library("openblas")
    machine.libraries = [openblas]
    threads = Threads()
    threads.scan()
    threads.begin_with_one()
    environ.bind(Bind(tasks, {}))
    threads.adapt(1.0)
    given = {**programs, **tasks}
    assert os.environ[OWN] == given.get(OWN, "1")
    assert openblas.num_threads == int(given.get(BLAS, given.get(OWN, "1")))
    threads.adapt(2.0)
    assert (os.environ[OWN], openblas.num_threads) == (omp, blas)


def test_no_import_is_noted_where_python_has_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_hooks, "_FIND", "another_way")
    assert not private_hooks.wrap_imports(lambda find: find)
