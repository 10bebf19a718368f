"""Modules that hang, end the process or fail while a worker imports them are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import ActorDiedError, NodeStartError, WorkerDiedError
from tests.contract import preloaded_trouble, tasks
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

TROUBLE = "tests.contract.preloaded_trouble"
IMPORTS = f"importing the module {TROUBLE}"


def import_trouble(_value: object = None) -> None:
    import importlib

    importlib.import_module(TROUBLE)


class Imports:
    """Imports the module while it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        import importlib

        return importlib.import_module, (TROUBLE,)


class Actor:
    def __init__(self, _value: object = None) -> None:
        import_trouble()

    def ping(self) -> str:
        return "pong"


def holding(gate: Gate) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {"HOLD": gate.path}}}


@pytest.mark.needs("processes")
@pytest.mark.parametrize("place", ["code", "argument", "function", "actor"])
async def test_why_names_the_module_that_is_imported(
    address: str, place: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=0):
        handle: aiogpu.Handle[object]
        if place == "actor":
            actor = aiogpu.remote(Actor).options(**holding(gate)).remote()
            handle = actor.ping.remote()
        elif place == "function":
            named = aiogpu.remote(preloaded_trouble.os.path.exists)
            handle = named.options(**holding(gate)).remote(Imports())
        else:
            value = Imports() if place == "argument" else None
            task = aiogpu.remote(import_trouble)
            # The limit counts from the first line of the code.
            limit = 0.01 if place == "argument" else None
            task = task.options(run_timeout=limit, **holding(gate))
            handle = task.remote(value)
        await gate.entered("import")
        assert IMPORTS in str(await handle.why())
        gate.release("import")
        if place == "function":
            with pytest.raises(TypeError):
                await handle
        else:
            await handle
        after = tasks.gated.remote(gate.path, "after")
        await gate.entered("after")
        assert "importing" not in str(await after.why())
        gate.release("after")
        await after


@pytest.mark.needs("processes")
async def test_a_module_that_ends_its_worker_is_named(
    address: str, tmp_path: Path
) -> None:
    (tmp_path / "doom").touch()
    env = {"env_vars": {"DOOM": str(tmp_path / "doom")}}
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=0):
        task = aiogpu.remote(import_trouble).options(max_retries=0, runtime_env=env)
        with pytest.raises(WorkerDiedError, match=f"was {IMPORTS}"):
            await task.remote()


@pytest.mark.fresh
async def test_a_preloaded_module_that_ends_its_zygote_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doom").touch()
    monkeypatch.setenv("DOOM", str(tmp_path / "doom"))
    modules = ["json", TROUBLE, "shlex"]
    during = rf"ended with status -9 while it imported {TROUBLE} \(preload=\)"
    with pytest.raises(NodeStartError, match=during):
        await aiogpu.init(num_cpus=1, num_gpus=0, preload=modules)


async def test_a_failed_import_of_an_actor_is_no_error_of_its_constructor(
    address: str,
) -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return __import__, ("module_that_is_missing",)

    async with aiogpu.init(address=address, num_cpus=1, num_gpus=0):
        actor = aiogpu.remote(Actor).remote(Unreadable())
        with pytest.raises(ActorDiedError) as caught:
            await actor.ping.remote()
    assert "cannot load its class or arguments: ModuleNotFoundError" in str(
        caught.value
    )
    assert "constructor" not in str(caught.value)
