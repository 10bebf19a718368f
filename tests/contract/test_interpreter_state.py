"""What workers' interpreters have of the program's: arguments, options, hash seed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

import aiogpu
from tests.contract.node_here import Here, node_here
from tests.support.program import environment, run_command

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.fresh]

PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=0)
size = parser.parse_known_args()[0].size
"""
"""A module that parses the program's arguments when it is imported."""
ARGUMENTS = """
import asyncio, multiprocessing, os, sys
import aiogpu

@aiogpu.remote
def size():
    import parses
    return parses.size, sys.argv[1:]

@aiogpu.remote
def processes():
    with open(f"/proc/{os.getppid()}/stat") as stat:
        zygote = int(stat.read().rpartition(")")[2].split()[1])
    return zygote, os.getpid(), "AIOGPU_PROGRAM_ARGUMENTS" in os.environ

@aiogpu.remote
async def parent():
    return await size.remote()

async def main():
    async with aiogpu.init(OPTIONS):
        print(ascii(await size.remote()))
        print(ascii(await parent.remote()))
        print(*await processes.remote())

def run():
    asyncio.run(main())

if __name__ == "__main__":
    HOW
"""


def write(directory: Path, options: str, how: str = "run()") -> str:
    """Write the program and its module; return the program's path."""
    (directory / "parses.py").write_text(PARSES)
    path = directory / "prog.py"
    path.write_text(ARGUMENTS.replace("OPTIONS", options).replace("HOW", how))
    return str(path)


def lines_of(*command: str, **variables: str) -> list[str]:
    """Run a program of this interpreter; return its lines of output."""
    ran = run_command(sys.executable, *command, env=environment(**variables))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


SPAWN = (
    "spawned = multiprocessing.get_context('spawn').Process(target=run)\n"
    "    spawned.start(); spawned.join()"
)


@pytest.mark.parametrize("how", ["run()", SPAWN], ids=["started", "spawned"])
@pytest.mark.parametrize("preload", ["()", "('parses',)"])
def test_modules_parse_the_programs_arguments(
    how: str, preload: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"num_cpus=2, preload={preload}", how)
    expected = str((5, ["--size", "5"]))
    assert lines_of(path, "--size", "5")[:2] == [expected, expected]


@pytest.mark.parametrize("preload", ["()", "('parses',)"])
async def test_modules_parse_the_arguments_of_a_program_that_joins(
    preload: str, runtime_directory: Path, tmp_path: Path
) -> None:
    """Programs that differ in arguments share a zygote, but no worker.

    They share no zygote that has imported their own modules.
    """
    zygotes, workers = set(), set()
    async with node_here(runtime_directory, learns=False) as here:
        path = write(tmp_path, f"address={here.path!r}, preload={preload}")
        for word in (5, 6, 7):
            arguments = ["--size", str(word), "ünï\udcff"]
            said = await asyncio.to_thread(lines_of, path, *arguments)
            assert said[:2] == [ascii((word, arguments))] * 2
            zygote, worker, *is_a_variable = said[2].split()
            assert is_a_variable == ["False"]
            zygotes.add(zygote)
            workers.add(worker)
    assert len(zygotes) == (1 if preload == "()" else 3)
    assert len(workers) == 3


FLAGS = """
import asyncio, os, sys
import aiogpu

def state():
    python = {k: v for k, v in os.environ.items() if k.startswith("PYTHON")}
    is_customized = "sitecustomize" in sys.modules
    return tuple(sys.flags), sys.warnoptions, sys._xoptions, python, is_customized

async def main():
    async with aiogpu.init(num_cpus=1):
        assert await aiogpu.remote(state).remote() == state(), "differs"
        print(sys.flags)

asyncio.run(main())
"""
OPTIONS = {
    "-I": "isolated=1",
    "-E": "ignore_environment=1",
    "-S": "no_site=1",
    "-s": "no_user_site=1",
    "-P": "safe_path=True",
    "-bb": "bytes_warning=2",
    "-B": "dont_write_bytecode=1",
    "-OO": "optimize=2",
    "-q": "quiet=1",
    "-Xdev": "dev_mode=True",
    "-Xutf8=0": "utf8_mode=0",
    "-Xint_max_str_digits=0": "int_max_str_digits=0",
    "-Xmine=1": "sys.flags",
    "-Werror::UserWarning": "sys.flags",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_workers_have_the_options_of_the_program(option: str, tmp_path: Path) -> None:
    path = tmp_path / "prog.py"
    path.write_text(FLAGS)
    (tmp_path / "sitecustomize.py").write_text("")
    variables = {"PYTHONHASHSEED": "7", "PYTHONNODEBUGRANGES": "1"}
    paths = [str(tmp_path), *filter(None, sys.path)]  # all, because of -S
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    (said,) = lines_of(option, str(path), **variables)
    assert OPTIONS[option] in said


WORDS = [*("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")]


@aiogpu.remote(max_calls=1)
def order(words: list[str]) -> tuple[list[str], int, str | None]:
    """The order of a set of words, the process id of the zygote, and a variable."""
    with open(f"/proc/{os.getppid()}/stat") as stat:
        zygote = int(stat.read().rpartition(")")[2].split()[1])
    return list(set(words)), zygote, os.environ.get("PYTHONHASHSEED")


JOINS = """
import asyncio, sys
import aiogpu
from tests.contract.test_interpreter_state import WORDS, order

async def main():
    async with aiogpu.init(OPTIONS):
        words, _, variable = await order.remote(WORDS)
        print(*words)
        print(variable, words == list(set(WORDS)))

asyncio.run(main())
"""


async def test_all_processes_of_a_node_hash_text_alike(tmp_path: Path) -> None:
    """Also a later generation of the zygote, and a zygote for variables."""
    edited = tmp_path / "edited_later.py"
    edited.write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        async with aiogpu.init(num_cpus=2, preload=["edited_later"]):
            words, zygote, variable = await order.remote(WORDS)
            assert variable is None
            variables = {"env_vars": {"MALLOC_ARENA_MAX": "2"}}
            alike, other, _ = await order.options(runtime_env=variables).remote(WORDS)
            assert (alike, other == zygote) == (words, False)
            edited.write_text("changed = True")
            next_zygote = zygote
            async with asyncio.timeout(60):
                while next_zygote == zygote:
                    alike, next_zygote, _ = await order.remote(WORDS)
                    assert alike == words
    finally:
        sys.path.remove(str(tmp_path))


async def test_other_programs_of_a_node_hash_text_alike(
    here: Here, tmp_path: Path
) -> None:
    path = tmp_path / "prog.py"
    path.write_text(JOINS.replace("OPTIONS", f"address={here.path!r}"))
    async with here.join():
        words, _, _ = await order.remote(WORDS)
    for options in ((), ("-I",), ("-Xdev",)):
        path.write_text(
            f"import sys; sys.path[:] = {sys.path!r}\n"
            + JOINS.replace("OPTIONS", f"address={here.path!r}")
        )
        said, ending = await asyncio.to_thread(lines_of, *options, str(path))
        assert said.split() == words
        assert ending.startswith("None ")


@pytest.mark.parametrize("seed", ["0", "7", "4294967295"])
def test_the_users_hash_seed_makes_the_program_and_workers_alike(
    seed: str, tmp_path: Path
) -> None:
    path = tmp_path / "prog.py"
    path.write_text(JOINS.replace("OPTIONS", "num_cpus=1"))
    _, ending = lines_of(str(path), PYTHONHASHSEED=seed)
    assert ending == f"{seed} True"


def test_nodes_have_different_hash_seeds(tmp_path: Path) -> None:
    """Otherwise strangers could choose words that collide."""
    path = tmp_path / "prog.py"
    path.write_text(JOINS.replace("OPTIONS", "num_cpus=1"))
    said = {lines_of(str(path), PYTHONHASHSEED="random")[0] for _ in range(3)}
    assert len(said) > 1
