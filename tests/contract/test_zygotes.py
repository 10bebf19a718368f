"""Zygotes: their imports, what they learn, and one zygote per environment."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu.errors import NodeClosedError
from aiogpu.runtime.zygote import process as zygote_process
from aiogpu.runtime.zygote import zygotes as all_zygotes
from aiogpu.runtime.zygote.generations import ZygoteGenerations
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.runtime.zygote.zygotes import Zygotes
from aiogpu.types import Node
from aiogpu.wire.messages import Stale
from tests.contract import tasks
from tests.contract.node_here import node_here
from tests.contract.zygote_tasks import flags, load, numbers, threads, value_of
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import ROOT, environment, start
from tests.support.waits import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def zygotes_of(session: Node) -> Zygotes:
    zygotes = session._session._engine._supervisor._parts.driver.pool.zygotes  # type: ignore[attr-defined]
    assert isinstance(zygotes, Zygotes)
    return zygotes


async def next_generation(lineage: ZygoteGenerations, served: int) -> None:
    """Wait until a zygote of another number serves."""
    await until(lambda: lineage.current.generation != served and lineage.current.ready)


async def learnt(lineage: ZygoteGenerations, module: str) -> None:
    """Wait until a zygote serves that has learnt to import this module."""
    await until(lambda: module in lineage.current.modules and lineage.current.ready)


def having(task: Any, **variables: str) -> Any:
    return task.options(runtime_env={"env_vars": variables})


# Environments


async def test_variables_read_at_start_need_a_zygote(tmp_path: Path) -> None:
    async with aiogpu.init(num_cpus=4, preload=()) as session:
        zygotes = zygotes_of(session)
        plain = await flags.remote()
        seeded = await having(flags, PYTHONHASHSEED="7", PYTHONOPTIMIZE="2").remote()
        assert (plain["optimize"], seeded["optimize"]) == (sys.flags.optimize, 2)
        assert seeded["seed"] == "7"
        assert seeded["zygote"] != plain["zygote"]
        again = having(flags, PYTHONOPTIMIZE="2", PYTHONHASHSEED="7", OTHER="x")
        other = await again.remote()
        assert other["zygote"] == seeded["zygote"], "one for all that need the same"
        assert other["hash"] == seeded["hash"]
        assert len(zygotes._environments) == 2
        placed = await having(flags, PYTHONPATH=f"{tmp_path}{os.pathsep}/x").remote()
        assert placed["path"] == str(tmp_path)
        assert (await having(flags, OTHER="x").remote())["zygote"] == plain["zygote"]


READER = "import os\nvalue = os.environ.get('READ_AT_IMPORT', 'default')\n"


async def test_a_preloaded_module_sees_the_tasks_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reader_module.py").write_text(READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=["reader_module"]):
        assert await value_of.remote("reader_module") == "default"
        for value in ("a", "b"):
            task = having(value_of, READ_AT_IMPORT=value)
            assert await task.remote("reader_module") == value
        assert await having(load, OTHER="x").remote("reader_module") is True


async def test_a_broken_environment_raises(capfd: pytest.CaptureFixture[str]) -> None:
    async with aiogpu.init(num_cpus=2, preload=()) as session:
        broken = having(tasks.add, PYTHONHOME="/no/such/place")
        for _ in range(2):
            with pytest.raises(
                aiogpu.WorkerDiedError, match="no worker could be started for add"
            ):
                await broken.remote(1)
        assert await tasks.add.remote(1) == 2
        assert zygotes_of(session).plain.problem is None


async def test_a_preload_that_fails_in_an_environment_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nif os.environ.get('MOOD'): raise ValueError('in a mood')\n"
    (tmp_path / "moody_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(num_cpus=2, preload=["moody_module"]):
        with pytest.raises(aiogpu.WorkerDiedError, match="in a mood"):
            await having(tasks.add, MOOD="bad").remote(1)
        assert await tasks.add.remote(1) == 2


async def test_environments_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_zygotes, "MOST_OTHERS", 2)
    async with aiogpu.init(num_cpus=4, preload=()) as session:
        zygotes = zygotes_of(session)
        pids = {
            (await having(flags, PYTHONHASHSEED=seed).remote())["zygote"]
            for seed in "0123"
        }
        assert len(pids) == 4
        kept = {environment for environment in zygotes._environments if environment}
        assert kept == {(("PYTHONHASHSEED", seed),) for seed in "23"}
        assert await tasks.add.remote(1) == 2


async def test_an_unused_environment_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_zygotes, "UNUSED", 0.0)
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        zygotes = zygotes_of(session)
        isolated = having(flags.options(num_gpus=1), PYTHONHASHSEED="1")
        assert (await isolated.remote())["seed"] == "1"
        zygote = zygotes._zygotes[1]
        await until(lambda: zygote.is_over)
        assert set(zygotes._environments) == {()}
        assert (await isolated.remote())["seed"] == "1", "a zygote is started again"


async def test_an_environment_in_use_is_kept(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_zygotes, "UNUSED", 0.01)
    isolated = having(tasks.gated.options(num_gpus=1), PYTHONHASHSEED="1")
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        zygotes = zygotes_of(session)
        running = isolated.remote(gate.path, "a")
        await gate.entered("a")
        (lineage,) = zygotes._others()
        last_use = lineage.used_at
        await until(lambda: lineage.used_at != last_use)
        assert zygotes._others() == [lineage]
        assert lineage.current.takes_work
        gate.release("a")
        assert await running == "a"
        await until(lambda: not zygotes._others())


# Threads and randomness


async def test_thread_pools_match_num_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the task or of the program overrides the number."""

    async def pools(task: Any) -> tuple[str | None, set[int]]:
        text, counts = await task.remote()
        return text, set(counts.values())

    async with aiogpu.init(num_cpus=8, num_gpus=1, preload=["numpy"]) as session:
        for cpus, count in ((1, 1), (3, 3), (0.5, 1), (2.5, 2)):
            assert await pools(threads.options(num_cpus=cpus)) == (str(count), {count})
        _, counts = await pools(threads.options(num_gpus=1, num_cpus=2))
        assert counts == {2}
        assert await pools(having(threads, OMP_NUM_THREADS="3")) == ("3", {3})
        _, counts = await having(threads, OPENBLAS_NUM_THREADS="5").remote()
        assert counts["openblas"] == 5
        _, counts = await pools(having(threads, OMP_DYNAMIC="false"))
        assert counts == {1}
        assert len(zygotes_of(session)._environments) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    async with aiogpu.init(num_cpus=8, preload=["numpy"]):
        for cpus in (1, 2):
            assert await pools(threads.options(num_cpus=cpus)) == ("4", {4})


async def test_isolated_tasks_draw_different_numbers() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=["numpy"]):
        drawn = [await numbers.remote() for _ in range(3)]
        for column in zip(*drawn, strict=True):
            assert len(set(column)) == 3


async def test_a_seed_lasts_for_the_workers_life() -> None:
    """A worker's generators are seeded once, not for each task."""

    @aiogpu.remote
    def seeded() -> float:
        import sys

        import numpy

        if not hasattr(sys, "seeded_by_test"):
            sys.seeded_by_test = True  # type: ignore[attr-defined]
            numpy.random.seed(7)
        return float(numpy.random.rand())

    async with aiogpu.init(num_cpus=1, preload=["numpy"]):
        import numpy

        expected = numpy.random.RandomState(7)
        for _ in range(3):
            assert await seeded.remote() == expected.rand()


# Learning


SLOW = """
import os, sys, time
end = time.perf_counter() + 0.06
while time.perf_counter() < end:
    pass
value = {value!r}
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory of installed packages, in which `write` puts modules."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return packages


def write(path: Path, source: str = SLOW, value: object = 1) -> None:
    path.write_text(source.format(value=value) if source is SLOW else source)


async def test_a_slow_import_is_learnt_for_the_next_call(packages: Path) -> None:
    write(packages / "slow_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        old = plain.current
        assert await load.remote("slow_lib") is False
        await learnt(plain, "slow_lib")
        assert plain.current.ready is not None
        assert "slow_lib" in plain.current.ready.modules
        assert await load.remote("slow_lib") is True
        # The old zygote ends with its last worker.
        await old.close()
        assert old.is_over


@pytest.mark.parametrize("preload", [(), ("json",)])
async def test_learning_can_be_switched_off(
    preload: tuple[str, ...], packages: Path
) -> None:
    write(packages / "slow_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload) as session:
        for _ in range(2):
            assert await load.remote("slow_lib") is False
        plain = zygotes_of(session).plain
        assert plain.learning.modules == []
        assert plain.current.generation == 0


async def test_preload_takes_names_and_auto(packages: Path) -> None:
    write(packages / "slow_lib.py")
    preload = ("json", "auto")
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload) as session:
        assert await load.remote("json") is True
        assert await load.remote("slow_lib") is False
        await learnt(zygotes_of(session).plain, "slow_lib")
        assert await load.remote("json") is True
        assert await load.remote("slow_lib") is True


async def test_each_generation_has_the_first_ones_surroundings(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may change its own environment meanwhile."""
    surroundings = "[os.getcwd(), os.environ['AIOGPU_TEST_A']]"
    write(packages / "slow_lib.py", SLOW.replace("{value!r}", surroundings))
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.chdir(tmp_path)
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        monkeypatch.setenv("AIOGPU_TEST_A", "after")
        monkeypatch.chdir("/")
        monkeypatch.setattr(sys, "path", list(sys.path[2:]))
        assert await value_of.remote("slow_lib") == [str(tmp_path), "before"]
        await learnt(zygotes_of(session).plain, "slow_lib")
        assert await load.remote("slow_lib") is True
        assert await value_of.remote("slow_lib") == [str(tmp_path), "before"]


UNFIT = {
    "threads": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "it left 1 threads running (Thread-1 (wait))",
    ),
    "crashes": (
        "import os, signal\n"
        "if 'OPENBLAS_NUM_THREADS' in os.environ: os.kill(os.getpid(), 9)\n",
        "its import was ended by SIGKILL",
    ),
    "devices": (
        "import os\nos.environ.get('CUDA_VISIBLE_DEVICES')\n",
        "it reads CUDA_VISIBLE_DEVICES while it is imported",
    ),
}


@pytest.mark.parametrize("way", UNFIT)
async def test_an_unfit_module_is_left_out_and_named_once(
    way: str, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, reason = UNFIT[way]
    write(packages / "bad_lib.py", SLOW.format(value=1) + source)
    write(packages / "good_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        assert await load.remote("bad_lib") is False
        await until(lambda: "bad_lib" in plain.learning.left_out)
        assert await load.remote("good_lib") is False
        await learnt(zygotes_of(session).plain, "good_lib")
        assert await load.remote("good_lib") is True
        assert await load.remote("bad_lib") is False
    (warning,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    message = f"! bad_lib is not preloaded: {reason}; workers import it themselves"
    assert warning.getMessage() == message


@pytest.mark.parametrize("named", [True, False])
async def test_an_edited_module_is_reimported(
    named: bool, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_process, "CHECKS", 0.0)
    path = tmp_path / "edited.py" if named else packages / "edited.py"
    write(path, value="old")
    os.utime(path, (1, 1))
    preload = ("edited", "auto") if named else "auto"
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload) as session:
        plain = zygotes_of(session).plain
        assert await value_of.remote("edited") == "old"
        if not named:
            await learnt(plain, "edited")
        write(path, value="new")
        os.utime(path, (2, 2))
        async with asyncio.timeout(60):
            while await value_of.remote("edited") == "old":
                pass
        assert await value_of.remote("edited") == "new"
        assert await load.remote("edited") is True


async def test_a_broken_edit_keeps_the_old_module(
    tmp_path: Path,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(zygote_process, "CHECKS", 0.0)
    path = tmp_path / "edited.py"
    write(path, value="old")
    os.utime(path, (1, 1))
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=["edited"]) as session:
        plain = zygotes_of(session).plain
        assert await value_of.remote("edited") == "old"
        path.write_text("value = (\n")
        os.utime(path, (2, 2))
        async with asyncio.timeout(60):
            while "cannot be imported again: SyntaxError" not in caplog.text:
                assert await value_of.remote("edited") == "old"
        path.write_text("value = 'mended'\n")
        os.utime(path, (3, 3))
        await load.remote("json")
        await next_generation(plain, 0)
        assert await value_of.remote("edited") == "mended"


# Generations that die, and the end


def pid_of(zygote: Zygote) -> int:
    assert zygote._child is not None
    return zygote._child.pid


async def renew(session: Node) -> tuple[Zygote, Zygote]:
    """Start another generation; return the old zygote and the new one."""
    plain = zygotes_of(session).plain
    old = plain.current
    old._events.on_message(old, Stale("a module"))
    await next_generation(plain, old.generation)
    return old, plain.current


async def test_an_old_generation_ends_with_its_last_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=0.5)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        fresh = isolated.remote(gate.path, "fresh")
        await gate.entered("fresh")
        for name, zygote in (("fresh", new), ("running", old)):
            assert psutil.Process(gate.pids[name]).parents()[1].pid == pid_of(zygote)
        assert not old.is_over
        gate.release("running", "fresh")
        assert await asyncio.gather(running, fresh) == ["running", "fresh"]
        await until(lambda: old.is_over)
        assert old.status == 0
        assert repr(zygotes_of(session)).startswith("<Zygotes ")


async def test_an_old_generation_that_dies_harms_no_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=1)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        os.kill(pid_of(old), signal.SIGKILL)
        await until(lambda: old.is_over)
        gate.release("running")
        assert await running == "running"
        assert zygotes_of(session).plain.current is new
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_a_node_closes_while_zygotes_start(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old zygote has a worker, a new one imports, a third has other variables."""
    (tmp_path / "once_only.py").write_text(
        "import os, threading\n"
        "if os.path.exists(__file__ + '.seen'):\n"
        "    threading.Event().wait()\n"
        "open(__file__ + '.seen', 'w').close()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(num_cpus=2, preload=["once_only"]) as session:
        running = tasks.gated.remote(gate.path, "running")
        await gate.entered("running")
        plain = zygotes_of(session).plain
        plain.on_message(plain.current, Stale("once_only"))
        waiting = having(tasks.add, PYTHONHASHSEED="3").remote(1)
        environments = zygotes_of(session)._environments
        await until(lambda: plain._next is not None and len(environments) == 2)
    for handle in (running, waiting):
        with pytest.raises(NodeClosedError):
            await handle


MODULE = """
import atexit
import ctypes
import sys

# Like nanobind, `malloc_stats` prints when Python is finalised. Nanobind prints what
# Python has not freed: in a zygote, where all objects are frozen, everything.
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).malloc_stats)
atexit.register(print, "leaving in good order", file=sys.stderr)
"""
PROGRAM = """
    import aiogpu

    @aiogpu.remote
    def loaded():
        import sys
        return "talkative" in sys.modules

    async def main():
        async with aiogpu.init(num_cpus=1, preload=("talkative",)):
            print(await loaded.remote())

    aiogpu.run(main())
"""


@pytest.mark.fresh
def test_a_zygote_does_not_finalise_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(MODULE)
    program = start(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + dedent(PROGRAM)
    )
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, "True\n"), err
    assert "system bytes" not in err
    assert "leaving in good order" in err


# Spares


async def ready() -> set[int]:
    """Wait until two workers are idle; return their pids.

    The node must not learn imports: a zygote that is replaced takes its spares with
    it, and its successor has spares only after the next task.
    """
    async with asyncio.timeout(30):
        while True:
            workers = (await aiogpu.status()).workers
            if [worker.state for worker in workers] == ["idle"] * 2:
                return {worker.pid for worker in workers}
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("has_joined", "variables"), [(False, {"X": "1"}), (True, {}), (True, {"X": "1"})]
)
async def test_isolated_tasks_find_a_spare_worker(
    has_joined: bool, variables: dict[str, str], runtime_directory: Path
) -> None:
    """So do tasks with their own variables, and tasks of programs that have joined."""
    isolated = having(tasks.pid.options(max_calls=1), **variables)
    async with AsyncExitStack() as stack:
        if has_joined:
            node = node_here(runtime_directory, learns=False)
            here = await stack.enter_async_context(node)
            await stack.enter_async_context(here.join())
        else:
            opening = aiogpu.init(num_cpus=2, num_gpus=0, spare_workers=2, preload=[])
            await stack.enter_async_context(opening)
        for _ in range(2):
            await isolated.remote()
            spares = await ready()
            assert await isolated.remote() in spares


# A module that starts its program when a worker imports it

ENDINGS = {
    "init": "async with aiogpu.init(num_cpus=1, num_gpus=0): await work.remote()",
    "a preload": "await aiogpu.init(num_cpus=1, num_gpus=0, preload=['unguarded'])",
    "a first call": "await work.remote()",
    "a call with an argument of its own": "await elsewhere.take.remote(Own())",
    "an actor with an argument of its own": "await elsewhere.Taker.remote(Own())",
    "the same in a thread": "await elsewhere.Taker.options(max_concurrency=2)"
    ".remote().take.remote(Own())",
    "a task that imports it": "await elsewhere.look.remote()",
}
BEGINNING = """
import asyncio, aiogpu, elsewhere

@aiogpu.remote
def work():
    return 1

class Own:
    pass
"""
ELSEWHERE = """
import aiogpu

@aiogpu.remote
def take(argument):
    return 1

@aiogpu.remote
class Taker:
    def __init__(self, argument=None):
        pass

    def take(self, argument):
        return 1

@aiogpu.remote
def look():
    import unguarded
"""


def imported(module: str, place: Path, run: Path) -> str:
    """Import a module in another interpreter; return the last line of its errors."""
    (place / "unguarded.py").write_text(module)
    (place / "elsewhere.py").write_text(ELSEWHERE)
    path = os.pathsep.join([str(ROOT), str(place)])
    ended = subprocess.run(
        [sys.executable, "-c", "import unguarded"],
        env=environment(PYTHONPATH=path, XDG_RUNTIME_DIR=str(run)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    wait_until_gone(5.0, str(run))
    return ended.stderr.rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_unguarded_module_is_named(
    ending: str, tmp_path: Path, runtime_directory: Path
) -> None:
    """Otherwise each worker would start another one that imports the module."""
    library = "aiogpu" if ending == "init" else "asyncio"
    main = f"async def main():\n    {ENDINGS[ending]}\n{library}.run(main())\n"
    error = imported(BEGINNING + main, tmp_path, runtime_directory)
    assert "a worker imports unguarded for " in error
    assert "the module starts the program again" in error
    assert "under `if __name__ == '__main__':`" in error


def test_guarded_modules_may_call_tasks(
    tmp_path: Path, runtime_directory: Path
) -> None:
    guarded = BEGINNING + "if __name__ == '__main__':\n    asyncio.run(work.remote())\n"
    assert imported(guarded, tmp_path, runtime_directory) == ""


@aiogpu.remote
def double(x: int) -> int:
    return 2 * x


def doubled(x: int) -> int:
    return aiogpu.get(double.remote(x))


class Lazy:
    """Becomes a number when it is unpickled, by a task of its own."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __reduce__(self) -> tuple[object, ...]:
        return doubled, (self.x,)


async def test_unpickling_may_start_tasks() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        assert await double.remote(Lazy(3)) == 12  # type: ignore[arg-type]
