"""A module that begins its program when it is imported, which workers do as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.faults.remains import gone_within
from tests.support.program import ROOT, environment

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
    "an actor": """
@aiogpu.remote
class Actor:
    pass

async def main():
    await Actor.remote()
asyncio.run(main())
""",
    "a call in an actor's module": """
@aiogpu.remote
class Actor:
    pass

async def main():
    await Actor.remote()
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
    "a method with an argument of its own": """
from elsewhere import Taker

async def main():
    await Taker.remote().take.remote(Own())
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
    "a method that imports it": """
from elsewhere import Taker

async def main():
    await Taker.remote().look.remote()
asyncio.run(main())
""",
    "a task that imports it, and init": """
from elsewhere import look

async def main():
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        await look.remote()
aiogpu.run(main())
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
    gone_within(5.0, str(run))
    return ended.stderr.rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_is_told_of_main_and_begins_no_further_worker(
    ending: str, tmp_path: Path, runtime_directory: Path
) -> None:
    """Each worker would start another one, which imports the module, without end."""
    said = imported(BEGINNING + ENDINGS[ending], tmp_path, runtime_directory)
    assert "a worker imports unguarded for " in said
    assert "the module begins the program once more" in said
    assert "write `if __name__ == '__main__':` above" in said


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
