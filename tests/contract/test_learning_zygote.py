"""[B28] The second isolated call of a function costs a fork, not an import."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

import aiogpu
from aiogpu.runtime.zygote import process as zygote_module
from tests.contract.zygote_tasks import load, value_of
from tests.contract.zygote_watch import learnt, next_generation, zygotes_of

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

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


async def test_of_a_users_module_the_installed_ones_are_learnt(
    func: Path, tmp_path: Path
) -> None:
    write(func / "slow_lib.py")
    write(tmp_path / "users_own.py", "import slow_lib\n" + SLOW.format(value=1))
    async with aiogpu.init(num_cpus=1, num_gpus=1) as session:
        plain = zygotes_of(session).plain
        assert await load.remote("users_own") is False
        await learnt(plain, "slow_lib")
        assert "users_own" not in plain.learning.modules
        assert await load.remote("users_own") is False
        assert await load.remote("slow_lib") is True


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
    "raises": (
        "import os\nif 'OPENBLAS_NUM_THREADS' in os.environ: raise ValueError('no')\n",
        "its import raises ValueError: no",
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
    monkeypatch.setattr(zygote_module, "CHECKS", 0.0)
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
    monkeypatch.setattr(zygote_module, "CHECKS", 0.0)
    path = tmp_path / "edited.py"
    write(path, value="old")
    os.utime(path, (1, 1))
    async with aiogpu.init(num_cpus=1, num_gpus=1, preload=["edited"]) as session:
        plain = zygotes_of(session).plain
        assert await value_of.remote("edited") == "old"
        path.write_text("value = (\n")
        os.utime(path, (2, 2))
        while "cannot be imported anew: SyntaxError" not in caplog.text:
            assert await value_of.remote("edited") == "old"
        path.write_text("value = 'mended'\n")
        os.utime(path, (3, 3))
        await load.remote("json")
        await next_generation(plain, 0)
        assert await value_of.remote("edited") == "mended"
