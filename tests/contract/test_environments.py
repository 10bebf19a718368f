"""[B28] Variables, threads and randomness, as they are found inside a task."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import aiogpu
from aiogpu.runtime.zygote import config as surroundings_module
from aiogpu.runtime.zygote import generations as zygotes_module
from tests.contract import tasks
from tests.contract.zygote_tasks import flags, load, numbers, threads, value_of
from tests.contract.zygote_watch import learnt, zygotes_of
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def having(task: Any, **variables: str) -> Any:
    return task.options(runtime_env={"env_vars": variables})


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


async def test_variables_that_the_linker_reads() -> None:
    async with aiogpu.init(num_cpus=2, preload=()):
        look = having(tasks.environment, LD_LIBRARY_PATH="/x", MALLOC_ARENA_MAX="1")
        found = await look.remote("LD_LIBRARY_PATH", "MALLOC_ARENA_MAX")
        assert found == {"LD_LIBRARY_PATH": "/x", "MALLOC_ARENA_MAX": "1"}


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
    monkeypatch.setattr(zygotes_module, "MOST_OTHERS", 2)
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
    monkeypatch.setattr(zygotes_module, "UNUSED", 0.0)
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
    monkeypatch.setattr(zygotes_module, "UNUSED", 0.01)
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


async def test_an_interpreter_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiogpu.init(num_cpus=2, preload=()) as session:
        assert repr(zygotes_of(session)) == "<Zygotes 1 for 1 environments>"
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(aiogpu.WorkerDiedError, match="/no/such/python"):
            await having(tasks.add, PYTHONHASHSEED="1").remote(1)
        assert await tasks.add.remote(1) == 2


async def test_a_directory_that_we_may_not_enter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then zygotes start where the program is at that moment, as any child would."""

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    paper = SimpleNamespace(**{**vars(os), "open": refuse})
    monkeypatch.setattr(surroundings_module, "os", paper)
    async with aiogpu.init(num_cpus=1, preload=()):
        directory, _ = await tasks.surroundings.remote()
        assert directory == os.getcwd()


@pytest.mark.parametrize("preload", [("numpy",), ()], ids=["preloaded", "imported"])
async def test_threads_are_the_tasks_whole_cpus(preload: tuple[str, ...]) -> None:
    async with aiogpu.init(num_cpus=8, num_gpus=1, preload=preload):
        for cpus, count in ((1, 1), (3, 3), (0.5, 1), (2.5, 2)):
            text, counts = await threads.options(num_cpus=cpus).remote()
            assert text == str(count)
            assert set(counts.values()) == {count}
        isolated = threads.options(num_gpus=1, num_cpus=2)
        assert set((await isolated.remote())[1].values()) == {2}


async def test_threads_are_what_a_variable_says() -> None:
    async with aiogpu.init(num_cpus=8, preload=["numpy"]) as session:
        text, counts = await having(threads, OMP_NUM_THREADS="3").remote()
        assert (text, set(counts.values())) == ("3", {3})
        _, counts = await having(threads, OPENBLAS_NUM_THREADS="5").remote()
        assert counts["openblas"] == 5
        _, counts = await having(threads, OMP_DYNAMIC="false").remote()
        assert set(counts.values()) == {1}
        assert len(zygotes_of(session)._environments) == 2


async def test_threads_are_what_the_program_was_started_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_torch_threads_and_numbers() -> None:
    pytest.importorskip("torch", reason="the CPU build of torch is not installed")
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=["torch"]):
        for cpus in (1, 2):
            _, counts = await threads.options(num_cpus=cpus, num_gpus=1).remote()
            assert counts["torch"] == cpus
            assert set(counts.values()) == {cpus}
        drawn = [await numbers.remote() for _ in range(3)]
        for column in zip(*drawn, strict=True):
            assert len(column) == len(set(column)) == 3


async def test_torch_is_learnt() -> None:
    pytest.importorskip("torch", reason="the CPU build of torch is not installed")
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        assert await load.remote("torch") is False
        await learnt(zygotes_of(session).plain, "torch")
        assert await load.remote("torch") is True


async def test_numpy_is_learnt() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        first = await load.remote("numpy")
        if plain.learning.modules == []:
            # A fast machine: it is not dear, but a second worker pays it too.
            assert await load.remote("numpy") is False
        await learnt(zygotes_of(session).plain, "numpy")
        assert first is False
        assert await load.remote("numpy") is True
