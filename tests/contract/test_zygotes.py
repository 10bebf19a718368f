"""[B28] Zygotes: what they import, learn and carry over, and one an environment."""

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
from aiogpu.runtime.zygote import generations as zygote_generations
from aiogpu.runtime.zygote import process as zygote_process
from aiogpu.runtime.zygote.generations import ZygoteGenerations, Zygotes
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.wire.messages import Stale
from tests.contract import tasks
from tests.contract.node_here import node_here
from tests.contract.zygote_tasks import flags, load, numbers, threads, value_of
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import ROOT, environment, start

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def zygotes_of(session: aiogpu.types.Node) -> Zygotes:
    """All zygotes of a node."""
    zygotes = session._session._engine._supervisor._parts.driver.pool.zygotes  # type: ignore[attr-defined]
    assert isinstance(zygotes, Zygotes)
    return zygotes


async def next_generation(lineage: ZygoteGenerations, served: int) -> None:
    """Wait until another zygote serves than that of this number."""
    async with asyncio.timeout(60):
        while lineage.current.generation == served or lineage.current.ready is None:
            await asyncio.sleep(0)


async def learnt(lineage: ZygoteGenerations, module: str) -> None:
    """Wait until a zygote serves that was to import this module, too."""
    async with asyncio.timeout(60):
        while module not in lineage.current.learnt or lineage.current.ready is None:
            await asyncio.sleep(0)


def having(task: Any, **variables: str) -> Any:
    return task.options(runtime_env={"env_vars": variables})


# Environments


async def test_variables_that_python_reads_when_it_starts(tmp_path: Path) -> None:
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


async def test_variables_that_a_preloaded_module_has_read(
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


async def test_an_environment_in_which_nothing_can_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=2, preload=()) as session:
        broken = having(tasks.add, PYTHONHOME="/no/such/place")
        for _ in range(2):
            with pytest.raises(
                aiogpu.WorkerDiedError, match="no worker could be started for add"
            ):
                await broken.remote(1)
        assert await tasks.add.remote(1) == 2
        assert zygotes_of(session).plain.problem is None


async def test_a_module_that_cannot_be_imported_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moody_module.py").write_text(
        "import os\nif os.environ.get('MOOD'): raise ValueError('in a mood')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(num_cpus=2, preload=["moody_module"]):
        with pytest.raises(aiogpu.WorkerDiedError, match="in a mood"):
            await having(tasks.add, MOOD="bad").remote(1)
        assert await tasks.add.remote(1) == 2


async def test_there_are_only_so_many_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygote_generations, "MOST_OTHERS", 2)
    async with aiogpu.init(num_cpus=4, preload=()) as session:
        zygotes = zygotes_of(session)
        found = [
            await having(flags, PYTHONHASHSEED=str(seed)).remote() for seed in range(4)
        ]
        assert len({each["zygote"] for each in found}) == 4
        kept = {environment for environment in zygotes._environments if environment}
        assert kept == {(("PYTHONHASHSEED", seed),) for seed in "23"}
        assert await tasks.add.remote(1) == 2


async def test_an_environment_that_nobody_wants_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygote_generations, "UNUSED", 0.0)
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        zygotes = zygotes_of(session)
        isolated = flags.options(
            num_gpus=1, runtime_env={"env_vars": {"PYTHONHASHSEED": "1"}}
        )
        assert (await isolated.remote())["seed"] == "1"
        zygote = zygotes._zygotes[1]
        async with asyncio.timeout(60):
            while not zygote.is_over:
                await asyncio.sleep(0)
        assert set(zygotes._environments) == {()}
        assert (await isolated.remote())["seed"] == "1", "and started again"


async def test_an_environment_that_is_in_use_is_not_given_up(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_generations, "UNUSED", 0.01)
    isolated = tasks.gated.options(
        num_gpus=1, runtime_env={"env_vars": {"PYTHONHASHSEED": "1"}}
    )
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        zygotes = zygotes_of(session)
        running = isolated.remote(gate.path, "a")
        await gate.entered("a")
        (lineage,) = zygotes._others()
        wanted = lineage.used_at
        async with asyncio.timeout(60):
            while lineage.used_at == wanted:
                await asyncio.sleep(0)
        assert zygotes._others() == [lineage]
        assert lineage.current.takes_work
        gate.release("a")
        assert await running == "a"
        async with asyncio.timeout(60):
            while zygotes._others():
                await asyncio.sleep(0)


# Threads and randomness


async def test_threads_are_the_tasks_whole_cpus_unless_a_variable_says_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with aiogpu.init(num_cpus=8, num_gpus=1, preload=["numpy"]) as session:
        for cpus, count in ((1, 1), (3, 3), (0.5, 1), (2.5, 2)):
            text, counts = await threads.options(num_cpus=cpus).remote()
            assert text == str(count)
            assert set(counts.values()) == {count}
        isolated = threads.options(num_gpus=1, num_cpus=2)
        assert set((await isolated.remote())[1].values()) == {2}
        text, counts = await having(threads, OMP_NUM_THREADS="3").remote()
        assert (text, set(counts.values())) == ("3", {3})
        _, counts = await having(threads, OPENBLAS_NUM_THREADS="5").remote()
        assert counts["openblas"] == 5
        _, counts = await having(threads, OMP_DYNAMIC="false").remote()
        assert set(counts.values()) == {1}
        assert len(zygotes_of(session)._environments) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    async with aiogpu.init(num_cpus=8, preload=["numpy"]):
        for cpus in (1, 2):
            text, counts = await threads.options(num_cpus=cpus).remote()
            assert (text, set(counts.values())) == ("4", {4})


async def test_isolated_tasks_draw_different_numbers() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=["numpy"]):
        drawn = [await numbers.remote() for _ in range(3)]
        for column in zip(*drawn, strict=True):
            assert len(set(column)) == 3


async def test_a_workers_own_seed_is_not_touched() -> None:
    """The generators are seeded once in a worker's life, not for each task."""

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
import os, time
end = time.perf_counter() + 0.06
while time.perf_counter() < end:
    pass
value = {value!r}
"""


@pytest.fixture
def func(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages, in which `write` puts modules."""
    func = tmp_path / "site-packages"
    func.mkdir()
    monkeypatch.syspath_prepend(str(func))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return func


def write(path: Path, source: str = SLOW, value: object = 1) -> None:
    path.write_text(source.format(value=value) if source is SLOW else source)


async def test_what_one_call_imported_the_next_one_has(func: Path) -> None:
    write(func / "slow_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        old = plain.current
        assert await load.remote("slow_lib") is False
        await learnt(plain, "slow_lib")
        assert plain.current.ready is not None
        assert "slow_lib" in plain.current.ready.modules
        assert await load.remote("slow_lib") is True
        # The old one goes as soon as its last worker has.
        await old.close()
        assert old.is_over


@pytest.mark.parametrize("preload", [(), ("json",)])
async def test_learning_can_be_switched_off(
    preload: tuple[str, ...], func: Path
) -> None:
    write(func / "slow_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload) as session:
        for _ in range(2):
            assert await load.remote("slow_lib") is False
        plain = zygotes_of(session).plain
        assert plain.learning.modules == []
        assert plain.current.generation == 0


async def test_both_named_and_learnt(func: Path) -> None:
    write(func / "slow_lib.py")
    preload = ("json", "auto")
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload) as session:
        assert await load.remote("json") is True
        assert await load.remote("slow_lib") is False
        await learnt(zygotes_of(session).plain, "slow_lib")
        assert await load.remote("json") is True
        assert await load.remote("slow_lib") is True


async def test_a_generation_finds_what_the_first_one_found(
    func: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the program has done to its own environment meanwhile."""
    write(
        func / "slow_lib.py",
        "import os, sys\n"
        + SLOW.replace("{value!r}", "[os.getcwd(), os.environ['AIOGPU_TEST_A']]"),
    )
    monkeypatch.setenv("AIOGPU_TEST_A", "before")
    monkeypatch.chdir(tmp_path)
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        monkeypatch.setenv("AIOGPU_TEST_A", "after")
        monkeypatch.chdir("/")
        monkeypatch.setattr(sys, "path", list(sys.path[2:]))
        first = await value_of.remote("slow_lib")
        await learnt(zygotes_of(session).plain, "slow_lib")
        assert await load.remote("slow_lib") is True
        second = await value_of.remote("slow_lib")
        assert first == second == [str(tmp_path), "before"]


UNFIT = {
    "threads": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "it left 1 threads running",
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
async def test_what_is_unfit_is_left_out_and_named_once(
    way: str, func: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, reason = UNFIT[way]
    write(func / "bad_lib.py", SLOW.format(value=1) + source)
    write(func / "good_lib.py")
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        assert await load.remote("bad_lib") is False
        async with asyncio.timeout(60):
            while "bad_lib" not in plain.learning.left_out:
                await asyncio.sleep(0)
        assert await load.remote("good_lib") is False
        await learnt(zygotes_of(session).plain, "good_lib")
        assert await load.remote("good_lib") is True
        assert await load.remote("bad_lib") is False
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    (warning,) = warnings
    assert warning.getMessage() == (
        f"! bad_lib is not preloaded: {reason}; workers import it themselves"
    )


@pytest.mark.parametrize("named", [True, False])
async def test_an_edited_module_is_imported_anew(
    named: bool, func: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_process, "CHECKS", 0.0)
    path = tmp_path / "edited.py" if named else func / "edited.py"
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
                await asyncio.sleep(0)
        assert await value_of.remote("edited") == "new"
        assert await load.remote("edited") is True


async def test_an_edit_that_spoils_a_named_module(
    tmp_path: Path,
    func: Path,
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


async def renew(session: aiogpu.types.Node) -> tuple[Zygote, Zygote]:
    """Have another generation serve; gives the old one and the new one."""
    plain = zygotes_of(session).plain
    old = plain.current
    old._events.on_message(old, Stale("a module"))
    await next_generation(plain, old.generation)
    return old, plain.current


async def end_of(zygote: Zygote) -> None:
    async with asyncio.timeout(60):
        while not zygote.is_over:
            await asyncio.sleep(0)


async def test_an_old_generation_ends_with_its_last_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=0.5)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        fresh = isolated.remote(gate.path, "fresh")
        await gate.entered("fresh")
        assert _zygote_above(gate.pids["fresh"]) == pid_of(new)
        assert _zygote_above(gate.pids["running"]) == pid_of(old)
        assert not old.is_over
        gate.release("running", "fresh")
        assert await asyncio.gather(running, fresh) == ["running", "fresh"]
        await end_of(old)
        assert old.status == 0
        assert repr(zygotes_of(session)).startswith("<Zygotes ")


def _zygote_above(worker: int) -> int:
    return psutil.Process(worker).parents()[1].pid


async def test_an_old_generation_that_dies_harms_no_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=1)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        os.kill(pid_of(old), signal.SIGKILL)
        await end_of(old)
        gate.release("running")
        assert await running == "running"
        assert zygotes_of(session).plain.current is new
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_closing_while_everything_is_under_way(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old generation with a worker, one that imports, and another environment."""
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
        waiting = tasks.add.options(
            runtime_env={"env_vars": {"PYTHONHASHSEED": "3"}}
        ).remote(1)
        async with asyncio.timeout(60):
            while plain._next is None or len(zygotes_of(session)._environments) < 2:
                await asyncio.sleep(0)
    for handle in (running, waiting):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await handle


MODULE = """
import atexit
import ctypes
import sys

# Stands for nanobind, which prints what Python has not freed when it is finalised:
# in a zygote, whose objects are frozen, all of it. `malloc_stats` prints as well.
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
    """Wait until two workers stand ready and nothing runs; gives their pids.

    Nothing is learnt to import here: a zygote that is replaced takes its spares with
    it, and has others only after the next task, which is not what is asked for.
    """
    async with asyncio.timeout(30):
        while True:
            workers = (await aiogpu.status()).workers
            if len(workers) == 2 and all(each.state == "idle" for each in workers):
                return {each.pid for each in workers}
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("has_joined", "variables"), [(False, {"X": "1"}), (True, {}), (True, {"X": "1"})]
)
async def test_tasks_find_a_process_that_stands_ready(
    has_joined: bool, variables: dict[str, str], runtime_directory: Path
) -> None:
    """Also those with variables of their own, and of programs that have joined."""
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


# A module that begins its program when it is imported, which workers do as well

ENDINGS = {
    "init": """
async def main():
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        await work.remote()
aiogpu.run(main())
""",
    "a preload": """
async def main():
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=["unguarded"]):
        pass
asyncio.run(main())
""",
    "a first call": """
async def main():
    await work.remote()
asyncio.run(main())
""",
    "a call with an argument of its own": """
from elsewhere import take

async def main():
    await take.remote(Own())
asyncio.run(main())
""",
    "an actor with an argument of its own": """
from elsewhere import Taker

async def main():
    await Taker.remote(Own())
asyncio.run(main())
""",
    "the same in a thread": """
from elsewhere import Taker

async def main():
    await Taker.options(max_concurrency=2).remote().take.remote(Own())
asyncio.run(main())
""",
    "a task that imports it": """
from elsewhere import look

async def main():
    await look.remote()
asyncio.run(main())
""",
}
BEGINNING = """
import asyncio, aiogpu

@aiogpu.remote
def work():
    return 1

class Own:
    pass
"""
ELSEWHERE = """
import aiogpu

@aiogpu.remote
def take(given):
    return 1

@aiogpu.remote
class Taker:
    def __init__(self, given=None):
        pass

    def take(self, given):
        return 1

    def look(self):
        import unguarded

@aiogpu.remote
def look():
    import unguarded
"""


def imported(module: str, place: Path, run: Path) -> str:
    """What an interpreter says at its end that imports a module."""
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
def test_it_is_told_of_main_and_begins_no_further_worker(
    ending: str, tmp_path: Path, runtime_directory: Path
) -> None:
    """Each worker would start another one, which imports the module, without end."""
    said = imported(BEGINNING + ENDINGS[ending], tmp_path, runtime_directory)
    assert "a worker imports unguarded for " in said
    assert "the module starts the program again" in said
    assert "under `if __name__ == '__main__':`" in said


def test_a_guarded_one_may_call_others_as_it_likes(
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
    """A number that is found where it is unpickled, by a task of its own."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __reduce__(self) -> tuple[object, ...]:
        return doubled, (self.x,)


async def test_what_is_unpickled_may_start_tasks_where_nothing_is_imported() -> None:
    given: Any = Lazy(3)
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        assert await double.remote(given) == 12
