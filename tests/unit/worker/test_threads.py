"""Thread counts: set by the libraries' setters, by whose word, and when."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.current import Context
from aiogpu.wire.messages import Bind
from aiogpu.worker import environment as environ
from aiogpu.worker import environment as threads_module
from aiogpu.worker.environment import Threads

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
    for name in (OWN, *threads_module.OF_LIBRARY.values()):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in threads_module.NUMERIC:
        monkeypatch.delitem(sys.modules, name, raising=False)
    door = ModuleType("threadpoolctl")
    door.ThreadpoolController = machine.scan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "threadpoolctl", door)
    return machine


def load(monkeypatch: pytest.MonkeyPatch, name: str, module: object = None) -> None:
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpus", "count"), [(0.0, 1), (0.5, 1), (1.0, 1), (1.9, 1), (2.0, 2), (8.0, 8)]
)
def test_whole_cpus_are_threads(cpus: float, count: int, machine: Machine) -> None:
    Threads().adapt(cpus)
    assert os.environ[OWN] == str(count)
    assert machine.scans == 0, "no library is loaded that could have threads"


def test_a_task_with_other_cpus_changes_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, "numpy")
    openblas = Library("openblas")
    machine.libraries = [openblas]
    threads = Threads()
    threads.scan()
    for cpus in (1.0, 2.0, 2.0, 2.5, 4.0, 1.0):
        threads.adapt(cpus)
        assert os.environ[OWN] == str(int(cpus))
    assert openblas.sets == [2, 4, 1], "and no setter is called in vain"
    assert machine.scans == 1


def test_the_programs_or_the_tasks_word_goes_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN, "3")
    load(monkeypatch, "numpy")
    openblas = Library("openblas")
    machine.libraries = [openblas]
    threads = Threads()
    for cpus in (1.0, 8.0):
        threads.adapt(cpus)
    assert (os.environ[OWN], openblas.sets) == ("3", [3])
    assert environ._found == {}, "it is none of ours"


def test_a_librarys_own_variable_goes_before(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    load(monkeypatch, "numpy")
    openblas, openmp = Library("openblas"), Library("openmp")
    machine.libraries = [openblas, openmp]
    Threads().adapt(2.0)
    assert (openblas.sets, openmp.sets) == ([5], [2])


@pytest.mark.parametrize(
    ("text", "count"), [("4,2", 4), (" 6 ", 6), ("", 2), ("many", 2), ("0", 2)]
)
def test_odd_values(
    text: str, count: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN, text)
    load(monkeypatch, "numpy")
    openmp = Library("openmp")
    machine.libraries = [openmp]
    Threads().adapt(2.0)
    assert openmp.num_threads == count


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


def test_tasks_find_the_variable_unchanged(machine: Machine) -> None:
    Threads().adapt(2.0)
    os.environ[OWN] = "9"
    environ.restore()
    assert os.environ[OWN] == "2"


BLAS = "OPENBLAS_NUM_THREADS"


@pytest.mark.parametrize(
    ("programs", "tasks", "omp", "blas"),
    [
        ({}, {}, "2", 2),
        ({}, {OWN: "5"}, "5", 5),
        ({}, {OWN: "1"}, "1", 1),
        ({}, {BLAS: "5"}, "2", 5),
        ({OWN: "3"}, {}, "3", 3),
        ({OWN: "3"}, {OWN: "5"}, "5", 5),
        ({OWN: "3"}, {BLAS: "5"}, "3", 5),
        ({BLAS: "3"}, {}, "2", 3),
        ({BLAS: "3"}, {BLAS: "5"}, "2", 5),
        ({BLAS: "3"}, {OWN: "5"}, "5", 3),
    ],
)
def test_who_has_the_last_word(
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


def test_what_most_tasks_have_costs_nothing(machine: Machine) -> None:
    threads = Threads()
    threads.begin_with_one()
    assert os.environ[OWN] == "1"
    threads.adapt(1.0)
    assert machine.scans == 0


def test_a_library_that_has_more_in_the_zygote(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, "numpy")
    openblas = Library("openblas")
    openblas.num_threads = 2
    machine.libraries = [openblas]
    threads = Threads()
    threads.scan()
    threads.begin_with_one()
    threads.adapt(1.0)
    assert openblas.sets == [1]
