"""Programs under debuggers, agents and profilers, which run code at Python's start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract.node_here import Here
from tests.repo.source_folders import ROOT
from tests.support.program import environment, run_command

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.fresh]

TESTING_PAGE = ROOT / "docs/testing.md"

PROGRAM = """
import asyncio, sys
import aiogpu

@aiogpu.remote(num_gpus=1)
def state(word):
    import builtins, os, sys, threading
    names = sorted(thread.name for thread in threading.enumerate())
    seen = getattr(builtins, "seen", None)
    return word, sys.argv[1:], names, seen and (seen[0] == os.getpid(), seen[1])

async def main():
    async with aiogpu.init(OPTIONS):
        print(await state.remote("one"))
        print(await state.remote("two"))

if __name__ == "__main__":
    asyncio.run(main())
"""
OPTIONS = "num_cpus=1, num_gpus=1"
NOTES = """
import builtins, os
builtins.seen = os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")
"""
"""Start-up code that leaves a mark: its process, and the devices that it saw."""
STARTS_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True, name="agent").start()
"""
"""What an agent does, such as ddtrace, New Relic or an OpenTelemetry distribution."""
USERS = f"lib/python{sysconfig.get_python_version()}/site-packages"
"""Where a user's packages are, below PYTHONUSERBASE."""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "prog.py"
    path.write_text(PROGRAM.replace("OPTIONS", OPTIONS))
    return path


def write(path: Path, source: str) -> Path:
    """Write a module; return its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path.parent


def search_path(*first: Path) -> str:
    """A PYTHONPATH with these directories, the tests and all installed packages."""
    return os.pathsep.join([*map(str, first), *filter(None, sys.path)])


def lines_of(*command: str, **variables: str) -> list[str]:
    """Run a program with the arguments `a b`; return its lines of output."""
    ran = run_command(*command, "a", "b", env=environment(**variables))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return [line for line in ran.stdout.splitlines() if line.startswith("(")]


MEASURED = """
import asyncio
import aiogpu

@aiogpu.remote
def reused():
    return "reused"

@aiogpu.remote(num_gpus=1)
def fresh():
    return "fresh"

@aiogpu.remote
async def coroutine():
    return "coroutine"

@aiogpu.remote
class Actor:
    def method(self):
        return "method"

@aiogpu.remote
def never_called():
    return "never"

async def main():
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        await asyncio.gather(reused.remote(), fresh.remote(), coroutine.remote())
        async with Actor.remote() as actor:
            await actor.method.remote()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(find_spec("coverage") is None, reason="needs coverage")
def test_documented_settings_of_coverage_measure_tasks(tmp_path: Path) -> None:
    """Those of docs/testing.md, in processes of all kinds."""
    program = tmp_path / "measured.py"
    program.write_text(MEASURED)
    (settings,) = re.findall(r"```ini\n(.*?)```", TESTING_PAGE.read_text(), re.DOTALL)
    report = tmp_path / "report.json"
    (tmp_path / "rc").write_text(f"{settings}data_file = {tmp_path}/data\n")
    variables = environment(COVERAGE_RCFILE=str(tmp_path / "rc"))
    for command in (
        ["run", str(program)],
        ["combine"],
        ["json", "-o", str(report), f"--include={program}"],
    ):
        ran = run_command(sys.executable, "-m", "coverage", *command, env=variables)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ["", *MEASURED.splitlines()]
    (measured,) = json.loads(report.read_text())["files"].values()
    executed = [lines[number].strip() for number in measured["executed_lines"]]
    missing = [lines[number].strip() for number in measured["missing_lines"]]
    for name in ("reused", "fresh", "coroutine", "method"):
        assert f'return "{name}"' in executed
    assert missing == ['return "never"']


def states(threads: list[str], seen: object = None) -> list[str]:
    """The lines of the program, if its tasks find this state."""
    return [str((word, ["a", "b"], threads, seen)) for word in ("one", "two")]


DEBUGGERS = {
    "debugpy": ("-Xfrozen_modules=off", "-m", "debugpy", "--listen", "0"),
    "viztracer": ("-m", "viztracer", "--quiet", "-o", "WHERE/trace.json"),
    "coverage": ("-m", "coverage", "run", "--data-file=WHERE/data"),
    "pdb": ("-m", "pdb", "-c", "continue"),
    "cProfile": ("-m", "cProfile", "-o", "WHERE/profile"),
}


@pytest.mark.parametrize("debugger", DEBUGGERS)
def test_node_starts_under_a_debugger_and_profilers(
    debugger: str, program: Path
) -> None:
    pytest.importorskip(debugger)
    where = str(program.parent)
    options = [word.replace("WHERE", where) for word in DEBUGGERS[debugger]]
    ran = lines_of(sys.executable, *options, str(program))
    assert ran[:2] == states(["MainThread"])


AGENTS = {
    "ddtrace": ("ddtrace-run",),
    "opentelemetry.instrumentation": (
        *("opentelemetry-instrument", "--traces_exporter", "console"),
        *("--metrics_exporter", "none", "--logs_exporter", "none"),
    ),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_agents_run_in_each_worker(agent: str, program: Path) -> None:
    pytest.importorskip(agent)
    command, *options = AGENTS[agent]
    path = Path(sys.executable).with_name(command)
    assert path.exists(), f"{agent} has no command {command}"
    note = write(program.parent / "note" / "usercustomize.py", NOTES)
    ran = lines_of(
        *(str(path), *options, sys.executable, str(program)),
        PYTHONPATH=search_path(note),
    )
    assert len(ran) == 2
    for line, word in zip(ran, ("one", "two"), strict=True):
        said, arguments, threads, _ = eval(line)
        assert (said, arguments) == (word, ["a", "b"])
        # ddtrace's threads are native, and unknown to `threading`.
        assert len(threads) > 1 or agent == "ddtrace"


@pytest.mark.parametrize("module", ["sitecustomize", "usercustomize"])
def test_code_that_starts_threads_runs_in_each_worker(
    module: str, program: Path, tmp_path: Path
) -> None:
    """It runs after the assignment of devices, so it may use them."""
    source = STARTS_THREAD + NOTES
    directory = write(tmp_path / "base" / USERS / f"{module}.py", source)
    # A virtual environment has no user's packages; its own Python does.
    python, path = str(sys._base_executable), search_path()  # type: ignore[attr-defined]
    if module == "sitecustomize":
        python, path = sys.executable, search_path(directory)
    variables = {"PYTHONPATH": path, "PYTHONUSERBASE": str(tmp_path / "base")}
    ran = lines_of(python, str(program), **variables)
    assert ran == states(["MainThread", "agent"], (True, "0"))


def test_harmless_code_runs_once_before_the_forks(
    program: Path, tmp_path: Path
) -> None:
    directory = write(tmp_path / "site" / "sitecustomize.py", NOTES)
    ran = lines_of(sys.executable, str(program), PYTHONPATH=search_path(directory))
    assert ran == states(["MainThread"], (False, None))


async def test_code_at_the_start_of_a_program_that_joins(
    here: Here, program: Path, tmp_path: Path
) -> None:
    program.write_text(PROGRAM.replace("OPTIONS", f"address={here.path!r}"))
    directory = write(tmp_path / "site" / "sitecustomize.py", STARTS_THREAD + NOTES)
    path = search_path(directory)
    ran = await asyncio.to_thread(
        lines_of, sys.executable, str(program), PYTHONPATH=path
    )
    assert ran == states(["MainThread", "agent"], (True, "0"))


FINDER = """
import sys
from importlib.machinery import ModuleSpec
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "only_by_a_finder" else None
    def create_module(self, spec): return None
    def exec_module(self, module): module.value = 7
sys.meta_path.append(Finder())
"""
FINDS = """
import asyncio
import aiogpu

@aiogpu.remote
def find():
    import only_by_a_finder, sys
    return only_by_a_finder.value, sys.prefix

async def main():
    async with aiogpu.init(num_cpus=1):
        print(await find.remote())

asyncio.run(main())
"""


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    """A virtual environment without packages; those of the tests are on PYTHONPATH."""
    where = tmp_path / "virtual"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(where)], check=True
    )
    return where


@pytest.mark.parametrize("has_agent", [False, True])
def test_tasks_import_what_a_finder_of_a_pth_file_finds(
    has_agent: bool, virtual: Path
) -> None:
    """Editable installations are found so."""
    write(virtual / USERS / "the_finder.py", FINDER)
    write(virtual / USERS / "editable.pth", "import the_finder\n")
    if has_agent:
        write(virtual / USERS / "sitecustomize.py", STARTS_THREAD)
    program = write(virtual / "finds.py", FINDS) / "finds.py"
    ran = lines_of(f"{virtual}/bin/python", str(program), PYTHONPATH=search_path())
    assert ran == [str((7, str(virtual)))]


@pytest.mark.parametrize("by", ["a .pth file", "LD_PRELOAD", "a script"])
def test_error_names_what_prevents_a_start(by: str, virtual: Path) -> None:
    python, variables = f"{virtual}/bin/python", {"PYTHONPATH": search_path()}
    program = FINDS
    if by == "a .pth file":
        culprit = write(virtual / USERS / "agent.py", STARTS_THREAD) / "agent.pth"
        culprit.write_text("import agent\n")
        says = (
            "a bare interpreter cannot be forked here: it left 1 threads running "
            f"(agent). That is done by {culprit}: remove it, or turn it off."
        )
    elif by == "LD_PRELOAD":
        library = build_preloaded(virtual)
        variables["LD_PRELOAD"] = str(library)
        says = f"LD_PRELOAD={library} may do that: unset it."
    else:
        fake = virtual / "fake-python"
        fake.write_text("#!/bin/sh\necho profiler: unknown option; exit 1\n")
        fake.chmod(0o755)
        program = f"import sys; sys.executable = {str(fake)!r}\n{FINDS}"
        says = f"sys.executable is {str(fake)!r}, a script, perhaps of a profiler"
    path = write(virtual / "finds.py", program) / "finds.py"
    ran = run_command(python, str(path), env=environment(**variables))
    assert ran.returncode == 1
    assert says in ran.stderr


def build_preloaded(directory: Path) -> Path:
    """Build a library that starts a thread when it is loaded."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    source, library = directory / "preloaded.c", directory / "preloaded.so"
    source.write_text(
        "#include <pthread.h>\n#include <unistd.h>\n"
        "static void *run(void *none) { for (;;) pause(); }\n"
        "__attribute__((constructor)) static void start(void) {\n"
        "    pthread_t thread; pthread_create(&thread, 0, run, 0); }\n"
    )
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run([*command, "-lpthread"], check=True)
    return library


TRACED = """
import asyncio, sys, threading
import aiogpu

@aiogpu.remote
def task():
    breakpoint()
    return sys.gettrace(), threading.gettrace() if hasattr(threading, "gettrace") else 0

async def main():
    async with aiogpu.init(num_cpus=1):
        print(await task.remote())

lines = []
def trace(frame, event, argument):
    lines.append(frame.f_lineno)
    return trace
sys.settrace(trace)
threading.settrace(trace)
asyncio.run(main())
assert lines
"""


def test_a_traced_program_has_untraced_workers(tmp_path: Path) -> None:
    """A `breakpoint()` in a task does what the variable says."""
    path = write(tmp_path / "traced.py", TRACED) / "traced.py"
    ran = lines_of(sys.executable, str(path), PYTHONBREAKPOINT="0")
    assert ran == [str((None, None))]


@pytest.mark.skipif(find_spec("coverage") is None, reason="needs coverage")
def test_coverage_at_the_start_of_processes(program: Path, tmp_path: Path) -> None:
    """`coverage` has a .pth file that measures each process of a program."""
    settings = tmp_path / "coveragerc"
    settings.write_text(f"[run]\nparallel = true\ndata_file = {tmp_path}/data\n")
    ran = lines_of(sys.executable, str(program), COVERAGE_PROCESS_START=str(settings))
    assert ran == states(["MainThread"])
    assert list(tmp_path.glob("data.*"))
