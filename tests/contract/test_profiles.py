"""`profiled(f)`: the code of each task runs under a profiler, which leaves a file."""

from __future__ import annotations

import asyncio
import cProfile
import gzip
import json
import logging
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import sync
from aiogpu.errors import MisuseError, OptionError
from aiogpu.profiling import profiled
from tests.contract import profile_tasks as tasks
from tests.contract.actor_classes import Counter
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]


def calls_of_square(path: Path) -> int:
    """How often the profiled code called `square`."""
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
    return sum(entry[1] for (_, _, name), entry in stats.items() if name == "square")


def names(directory: Path) -> list[str]:
    """The names of the files, without the numbers of their tasks."""
    return sorted(path.name.rpartition("-")[0] for path in directory.iterdir())


async def test_each_kind_of_function_leaves_a_profile_of_its_code(
    address: str, tmp_path: Path
) -> None:
    def under(function: Any) -> Any:
        return profiled(function, directory=str(tmp_path / function.__name__))

    def calls(function: Any) -> int:
        (path,) = (tmp_path / function.__name__).iterdir()
        assert path.name.startswith(f"{function.__name__}-")
        return calls_of_square(path)

    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        assert await under(tasks.plain).remote(3) == 9
        assert await under(tasks.coroutine).remote(3) == 9
        for function in (tasks.generator, tasks.async_generator):
            assert [n async for n in under(function).remote(3)] == [0, 1, 4]
        with pytest.raises(ZeroDivisionError):
            await under(tasks.fails).remote(3)
    assert [calls(f) for f in (tasks.plain, tasks.coroutine, tasks.fails)] == [1, 1, 1]
    assert [calls(f) for f in (tasks.generator, tasks.async_generator)] == [3, 3]


async def test_torchs_profiler_leaves_a_trace_of_operators(
    address: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    async with aiogpu.init(address=address, num_cpus=1):
        multiply = profiled(tasks.multiply, "torch", str(tmp_path))
        assert await multiply.options(name="a b/c").remote() == 512
    (path,) = tmp_path.glob("*.json.gz")
    assert path.name.startswith("a_b_c-")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


async def test_no_file_is_overwritten(node: aiogpu.Node, tmp_path: Path) -> None:
    """A chunk is one task; each of its calls has a file."""
    function = profiled(tasks.coroutine, directory=str(tmp_path))
    assert [n async for n in function.map([1, 2, 3], chunk=3)] == [1, 4, 9]
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert [calls_of_square(path) for path in files] == [1, 1, 1]
    first = min(files, key=lambda path: len(path.name)).stem
    assert {path.stem for path in files} == {first, f"{first}-2", f"{first}-3"}


async def test_the_task_logs_the_path_in_the_programs_directory(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        async with aiogpu.init(address=address, num_cpus=1):
            assert await profiled(tasks.coroutine).remote(2) == 4
    (path,) = (tmp_path / "profiles").iterdir()
    if address != "ray":  # whose workers log in their own way
        number = path.stem.partition("-")[2]
        assert f"profile of coroutine (task {number}): {path}" in caplog.messages


async def test_a_cancelled_task_leaves_a_profile(tmp_path: Path, gate: Gate) -> None:
    function = profiled(tasks.waits, directory=str(tmp_path / "profiles"))
    async with aiogpu.init(num_cpus=1, cancel_grace=60):
        handle = function.remote(gate.path)
        await gate.entered("waits")
        handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle
    assert names(tmp_path / "profiles") == ["waits"]


async def test_a_profiled_function_is_traced_as_well(tmp_path: Path) -> None:
    traced = pytest.importorskip("aiogpu.opentelemetry").traced
    function = traced(profiled(tasks.coroutine, directory=str(tmp_path)))
    async with aiogpu.init(num_cpus=1):
        assert await function.remote(3) == 9
    assert names(tmp_path) == ["coroutine"]
    with pytest.raises(MisuseError, match=r"traced\(profiled\(f\)\) for both"):
        profiled(traced(tasks.coroutine))


def test_functions_without_an_event_loop_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with sync.init(num_cpus=1):
        function = profiled(tasks.blocking, directory="here")
        assert function.remote(3).result() == 9
    (path,) = (tmp_path / "here").iterdir()
    assert calls_of_square(path) == 1


async def test_what_cannot_be_profiled_is_refused(
    tmp_path: Path, node: aiogpu.Node
) -> None:
    for function in (tasks.square, tasks.decorated, Counter, len):
        with pytest.raises(MisuseError, match=r"profiled\(\) was given"):
            profiled(function)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("aiogpu run .* nsys profile", lambda: profiled(tasks.plain, "nsys")),
        ("'cprofile' or 'torch'", lambda: profiled(tasks.plain, "perf")),
        ("path of a directory", lambda: profiled(tasks.plain, directory="")),
    ]
    for words, call in refused:
        with pytest.raises(OptionError, match=words):
            call()
    (tmp_path / "file").touch()
    function = profiled(tasks.coroutine, directory=str(tmp_path / "file" / "inner"))
    with pytest.raises(MisuseError, match="profile of coroutine cannot be written"):
        await function.remote(2)


@pytest.mark.parametrize("tool", ["cprofile", "torch"])
async def test_a_second_profiler_in_the_process_is_refused(
    tool: str, tmp_path: Path
) -> None:
    """On an inline node, which has the process of the program."""
    if tool == "torch":
        profiler = pytest.importorskip("torch").profiler.profile()
    else:
        profiler = cProfile.Profile()
    function = profiled(tasks.coroutine, tool, str(tmp_path))
    async with aiogpu.init(address="inline", num_cpus=2):
        with profiler, pytest.raises(MisuseError, match="another profiler is active"):
            await function.remote(2)
        assert await function.remote(3) == 9
    assert names(tmp_path) == ["coroutine"]


async def test_torch_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    async with aiogpu.init(address="inline", num_cpus=1):
        with pytest.raises(MisuseError, match="Install torch in the environment"):
            await profiled(tasks.coroutine, "torch", str(tmp_path)).remote(2)


async def test_a_profile_that_cannot_be_saved_costs_no_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    function = profiled(tasks.removes_directory, directory=str(tmp_path / "gone"))
    async with aiogpu.init(num_cpus=1):
        assert await function.remote(str(tmp_path / "gone")) == 9
    (said,) = [text for text in caplog.messages if "profile of" in text]
    assert "profile of removes_directory (task 1) is not written: [Errno 2]" in said
