"""No import is paid for twice: tasks wait for a zygote that imports for all.

Each import of the test's packages writes a line into a file, so the lines are counted
and no time is measured.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiogpu
from aiogpu.runtime.zygote.zygotes import Zygotes
from aiogpu.wire.messages import Imported
from tests.contract import dear_tasks, tasks
from tests.contract.raw_client import service
from tests.contract.test_zygotes import learnt, zygotes_of
from tests.support.gate import Gate
from tests.support.program import run
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

LOGGED = """
import os, time
with open({log!r}, "a") as file:
    file.write(__name__ + "\\n")
end = time.process_time() + {seconds}
while time.process_time() < end:
    pass
"""
LIBRARY = """
def double(number):
    return 2 * number
def late(number):
    import late_lib
    return 2 * number
"""


class Packages:
    """Installed packages whose imports are counted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "site-packages"
        self.directory.mkdir()
        self.log = directory / "imports"
        self.log.touch()
        self.write("dear_lib", LIBRARY)
        self.write("late_lib")

    def write(self, name: str, source: str = "", seconds: float = 0.3) -> None:
        logged = LOGGED.format(log=str(self.log), seconds=seconds)
        (self.directory / f"{name}.py").write_text(logged + source)

    @property
    def imports(self) -> Counter[str]:
        """How many processes have begun to import each module."""
        return Counter(self.log.read_text().split())


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    packages = Packages(tmp_path)
    monkeypatch.syspath_prepend(str(packages.directory))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return packages


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks wait until the first has told all that it imports."""
    monkeypatch.setattr("aiogpu.runtime.zygote.generations.HELD", 1000.0)


async def all_of(task: Any, count: int = 16) -> None:
    """Run tasks, eight at a time, and check their results."""
    results = await asyncio.gather(*(task.remote(i) for i in range(count)))
    assert results == [2 * i for i in range(count)]


async def use_actors(_: Any = None) -> None:
    actors = [dear_tasks.Uses.remote() for _ in range(8)]
    results = await asyncio.gather(*(a.double.remote(i) for i, a in enumerate(actors)))
    assert results == [2 * i for i in range(8)]


USES: dict[str, Callable[[], Awaitable[None]]] = {
    "tasks": lambda: all_of(dear_tasks.uses),
    "tasks on CPUs": lambda: all_of(dear_tasks.uses_on_cpu),
    "actors": use_actors,
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("use", USES)
async def test_a_wave_of_tasks_imports_once_and_for_a_learner(
    use: str, packages: Packages
) -> None:
    async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
        await USES[use]()
    assert packages.imports == {"dear_lib": 2}


@pytest.mark.usefixtures("patient")
async def test_used_workers_do_not_import_what_new_workers_have(
    packages: Packages, gate: Gate
) -> None:
    """They stay, as users keep models in them; workers with the module go first."""
    async with aiogpu.init(num_cpus=8, num_gpus=0, spare_workers=0):
        handles = [tasks.gated.remote(gate.path, name) for name in "abcdefgh"]
        await gate.entered(*"abcdefgh")
        used = [gate.pids[name] for name in "abcdefgh"]
        gate.release(*"abcdefgh")
        await asyncio.gather(*handles)
        for _ in range(2):
            await all_of(dear_tasks.uses_on_cpu)
            assert packages.imports == {"dear_lib": 2}
        assert any(os.path.exists(f"/proc/{pid}") for pid in used)


@pytest.mark.usefixtures("patient")
async def test_an_import_within_a_task_is_found_while_it_runs(
    packages: Packages,
) -> None:
    async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
        await all_of(dear_tasks.uses_late)
    assert packages.imports == {"dear_lib": 2, "late_lib": 2}


@pytest.mark.usefixtures("patient")
async def test_later_generations_import_only_what_is_new(packages: Packages) -> None:
    async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0) as session:
        await all_of(dear_tasks.uses)
        await learnt(zygotes_of(session).plain, "dear_lib")
        before = packages.imports
        await all_of(dear_tasks.uses_late)
    assert (packages.imports - before).keys() == {"late_lib"}


PROGRAM = """
    import asyncio, sys
    import aiogpu
    from aiogpu.runtime.zygote import generations
    generations.HELD = 1000.0  # as the fixture `patient`
    sys.path.insert(0, sys.argv[1])

    @aiogpu.remote(num_gpus=0.25)
    def uses(number):
        import dear_lib, {also}
        return dear_lib.late(number)

    async def main():
        async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
            numbers = await asyncio.gather(*(uses.remote(i) for i in range(16)))
            print(*numbers)
    aiogpu.run(main())
"""


@pytest.mark.parametrize("also", ["sys", "small_lib"])
def test_later_runs_of_a_program_import_once(
    also: str, packages: Packages, tmp_path: Path
) -> None:
    """Also what the zygote's import of another module brings at no cost of its own."""
    packages.write("small_lib", seconds=0.02)
    packages.write("dear_lib", f"import {also}\n{LIBRARY}")
    modules = {"dear_lib", "late_lib", also} - {"sys"}
    for count in (2, 3, 4, 5):
        out = run(
            PROGRAM.format(also=also),
            str(packages.directory),
            XDG_CACHE_HOME=str(tmp_path / "cache"),
            AIOGPU_IMPORT_CACHE="on",
        )
        assert out.split() == [str(2 * i) for i in range(16)]
        assert packages.imports == dict.fromkeys(modules, count)


OTHER_USE = """
    import asyncio, sys
    import aiogpu
    sys.path.insert(0, sys.argv[1])

    @aiogpu.remote(num_gpus=0.25)
    def uses_dear(number):
        import dear_lib
        return dear_lib.double(number)

    @aiogpu.remote(num_gpus=0.25)
    def uses_other(number):
        import other_lib
        return other_lib.double(number)

    async def main():
        uses = {"dear": uses_dear, "other": uses_other}[sys.argv[2]]
        async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
            numbers = await asyncio.gather(*(uses.remote(i) for i in range(24)))
            print(*numbers)
    aiogpu.run(main())
"""


def test_an_earlier_run_with_other_arguments_is_not_in_the_way(
    packages: Packages, tmp_path: Path
) -> None:
    packages.write("dear_lib", LIBRARY, seconds=1.5)
    packages.write("other_lib", LIBRARY)
    for argument in ("dear", "other", "dear", "other"):
        before = packages.imports["other_lib"]
        out = run(
            OTHER_USE,
            str(packages.directory),
            argument,
            XDG_CACHE_HOME=str(tmp_path / "cache"),
            AIOGPU_IMPORT_CACHE="on",
        )
        assert out.split() == [str(2 * i) for i in range(24)]
    # The zygote that gave way may have begun with it.
    assert packages.imports["other_lib"] - before <= 2


EARLY_PROGRAM = """
    import asyncio, pathlib, sys
    import aiogpu
    from tests.support.waits import until
    sys.path.insert(0, sys.argv[1])
    log = pathlib.Path(sys.argv[2])

    @aiogpu.remote
    def uses(number):
        import dear_lib
        return dear_lib.double(number)

    async def main():
        async with aiogpu.init(address=sys.argv[3]):
            await until(lambda: "dear_lib" in log.read_text())
    aiogpu.run(main())
"""


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_functions_of_a_script_are_prepared_before_a_call(
    is_shared: bool, packages: Packages
) -> None:
    with service() if is_shared else nullcontext() as shared:
        address = "local" if shared is None else shared.path
        run(EARLY_PROGRAM, str(packages.directory), str(packages.log), address)


async def test_a_fresh_worker_reports_only_its_own_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those that its zygote has made, and no import that serves the reports."""
    reported: list[str] = []

    def note(_zygotes: object, _zygote: object, imported: Imported) -> None:
        reported.extend(imported.names)

    monkeypatch.setattr(Zygotes, "note_imports", note)
    async with aiogpu.init(num_cpus=2, num_gpus=1, spare_workers=0) as session:
        generations = zygotes_of(session).plain
        generations.learning.want(["numpy"])
        generations.renew()
        await until(lambda: "numpy" in generations.current.modules)
        task = aiogpu.remote(num_gpus=0.25)(np.linalg.norm)
        assert await asyncio.gather(*map(task.remote, [[3, 4]] * 4)) == [5.0] * 4
    assert reported == []


async def test_a_fork_of_a_task_imports_and_reports_nothing(
    packages: Packages,
) -> None:
    """A process that `multiprocessing` forks has no connection to the driver."""
    packages.write("forking_lib", "import os\nCHILD = os.fork()\n", seconds=0)
    async with aiogpu.init(num_cpus=2, spare_workers=0):
        assert await dear_tasks.imports_in_forks.remote() == [0, 0]
    assert packages.imports["dear_lib"] >= 1
    assert packages.imports["forking_lib"] == 1


async def test_tasks_that_need_nothing_do_not_wait(
    packages: Packages, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    waiting = f"""
import os, threading
while not os.path.exists({str(gate)!r}):
    threading.Event().wait(0.01)
"""
    packages.write("dear_lib", waiting)
    async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
        running = [dear_tasks.waits_for.remote(str(gate)) for _ in range(4)]
        await until(lambda: packages.imports["dear_lib"] == 2)
        await all_of(dear_tasks.uses_nothing)
        why = await running[1].why()
        assert why is not None
        assert why.imports.startswith("dear_lib (")
        assert "is forked once a zygote has imported dear_lib (" in str(why)
        (reason,) = {
            task.reason for task in (await aiogpu.status()).tasks if task.reason
        }
        assert reason.startswith("waits for the zygote with dear_lib (")
        assert not any(handle.done() for handle in running)
        gate.touch()
        assert len(set(await asyncio.gather(*running))) == 4
    assert packages.imports == {"dear_lib": 2}


UNFIT = {
    "raises": "if 'zygote' in open('/proc/self/comm').read(): 1 / 0",
    "crashes": (
        "import os, signal\n"
        "if 'zygote' in open('/proc/self/comm').read(): os.kill(os.getpid(), 11)"
    ),
    "threads": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
}


@pytest.mark.parametrize("way", UNFIT)
async def test_tasks_run_if_no_zygote_can_import(way: str, packages: Packages) -> None:
    packages.write("dear_lib", f"{UNFIT[way]}\n{LIBRARY}", seconds=0.06)
    async with aiogpu.init(num_cpus=8, num_gpus=2, spare_workers=0):
        await all_of(dear_tasks.uses, 10)
    assert packages.imports == {"dear_lib": 11}


async def test_waiting_tasks_can_be_cancelled(
    packages: Packages, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    waiting = f"""
import os, threading
while not os.path.exists({str(gate)!r}):
    threading.Event().wait(0.01)
"""
    packages.write("dear_lib", waiting)
    async with aiogpu.init(num_cpus=8, num_gpus=1, spare_workers=0):
        running = [dear_tasks.waits_for.remote(str(gate)) for _ in range(4)]
        await until(lambda: packages.imports["dear_lib"] == 2)
        for handle in running:
            handle.cancel()
        await asyncio.wait(running)
        assert all(handle.cancelled() for handle in running)
        await all_of(dear_tasks.uses_nothing, 4)


async def test_costly_imports_are_named_once(
    packages: Packages, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("aiogpu.runtime.zygote.zygotes.MUCH", 0.2)
    async with aiogpu.init(num_cpus=8, num_gpus=2):
        await all_of(dear_tasks.uses)
    (message,) = [r.getMessage() for r in caplog.records if "importing" in r.msg]
    # A busy machine may find other modules dear as well.
    assert "init(preload=('dear_lib', " in message
