"""The names of programs that have left a service, in lists and reasons."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.sandbox import Sandbox
from tests.support.program import run_command

SOURCE = """
import os
import aiogpu

@aiogpu.remote(num_cpus=0)
def done():
    pass

@aiogpu.remote(num_gpus=1)
def held():
    pass

async def main():
    async with aiogpu.init(address="auto"):
        await done.remote()
        async with aiogpu.placement([{"GPU": 1}], name="both") as placement:
            evicted = held.options(placement=placement, cancel_grace=0).remote()
        print(os.getpid())

if __name__ == "__main__":
    aiogpu.run(main())
"""


@pytest.mark.parametrize("way", ["script", "module", "package"])
def test_lists_name_a_program_that_has_left(
    sandbox: Sandbox, tmp_path: Path, way: str
) -> None:
    package = tmp_path / "jobs_7"
    package.mkdir()
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(SOURCE)
    sandbox.run("start", "--head", "--num-cpus=1", "--num-gpus=2")
    words, program = {
        "script": ([str(package / "train.py")], "train.py"),
        "module": (["-m", "jobs_7.train"], "jobs_7.train"),
        "package": (["-m", "jobs_7"], "jobs_7"),
    }[way]
    ran = run_command(sys.executable, *words, cwd=tmp_path, env=sandbox.variables)
    assert ran.returncode == 0, ran.stderr
    pid = ran.stdout.strip()
    listed, _ = sandbox.run("list", "tasks", "--state", "finished")
    (done,) = (line for line in listed.splitlines() if "done" in line)
    assert re.search(rf" {re.escape(program)} {pid}\b", done), listed
    why, _ = sandbox.run("why", "held")
    assert "both, the placement of held, was removed" in why
