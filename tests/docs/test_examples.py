"""Each example prints what the text beside it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.box import box

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVERS = {"08_serve", "23_workers"}
"""They print nothing of their own; `test_serve.py` has their tests."""
ANYWHERE = "14_anywhere"
"""It is the same on each engine."""
LIMIT = 120
"""Seconds, for what starts a Ray cluster; to end a hang."""
JOINING = "12_service"
"""It joins a node that is there."""
PROGRAMS = sorted(
    path for path in EXAMPLES.glob("[0-9]*.py") if path.stem not in SERVERS
)


def plain_environment() -> dict[str, str]:
    """This process's environment without what would change an example's output."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUDA_", "AIOGPU_"))
    }


STOPPED = "16_checkpoint"
"""It is stopped by a signal."""
ALONE = [path for path in PROGRAMS if path.stem not in (JOINING, STOPPED)]


def printed(program: Path, variables: dict[str, str], *arguments: str) -> str:
    """What it prints, process ids as N; it ends well and complains of nothing."""
    ran = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    return without_pids(ran.stdout)


def without_pids(text: str) -> str:
    return re.sub(r"\bpid([= ])\d+", r"pid\1N", text)


def expected(program: Path) -> str:
    return (EXAMPLES / "expected" / f"{program.stem[:2]}.txt").read_text()


@pytest.mark.parametrize("program", ALONE, ids=lambda path: path.stem)
def test_prints_what_is_expected(program: Path) -> None:
    assert printed(program, plain_environment()) == expected(program)


def test_the_picture_of_the_demo_is_drawn_by_itself() -> None:
    told = printed(EXAMPLES / "julia_set.py", plain_environment())
    *picture, verdict = told.splitlines()
    assert len(picture) == 24
    assert verdict == "equals the serial one: True"


def test_one_that_joins_finds_what_the_last_one_left() -> None:
    program = EXAMPLES / f"{JOINING}.py"
    with box() as here:
        here.run("start", "--head", "--num-gpus=1")
        first = printed(program, here.variables)
        again = printed(program, here.variables)
    assert first == expected(program)
    assert again == first.replace("so far: 3", "so far: 6")


@pytest.mark.parametrize("where", ["alone", "on a node"])
def test_one_that_is_stopped_goes_on_from_what_it_has_saved(
    where: str, tmp_path: Path
) -> None:
    program, state = EXAMPLES / f"{STOPPED}.py", str(tmp_path / "state.txt")
    with ExitStack() as stack:
        variables = plain_environment()
        if where == "on a node":
            here = stack.enter_context(box())
            here.run("start", "--head", "--num-gpus=1")
            variables = {**here.variables, "AIOGPU_ADDRESS": "auto"}
        command = [sys.executable, str(program), state, str(10**9)]
        with subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, text=True
        ) as stopped:
            assert stopped.stdout is not None
            first = stopped.stdout.readline()
            stopped.send_signal(signal.SIGTERM)
            told, _ = stopped.communicate(timeout=60)
        assert stopped.returncode == 128 + signal.SIGTERM
        again = printed(program, variables, state, "1")
    assert without_pids(first + told) + again == expected(program)


def test_the_tour_of_the_commands() -> None:
    """Its programs and commands are those of this environment."""
    program = EXAMPLES / "20_commands.sh"
    with box() as here:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            ["sh", str(program)],
            env={**here.variables, "PATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert here.node is None
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == (expected(program), "")


def test_one_file_on_a_node() -> None:
    program = EXAMPLES / f"{ANYWHERE}.py"
    with box() as here:
        here.run("start", "--head", "--num-gpus=1", "--num-cpus=2")
        on_node = printed(program, {**here.variables, "AIOGPU_ADDRESS": "auto"})
    assert on_node == expected(program)


@pytest.mark.ray
def test_the_port_of_a_ray_program_is_one_line(tmp_path: Path) -> None:
    """The example without an event loop, and the same on Ray itself."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiogpu[ray]'")
    program = EXAMPLES / "15_without_a_loop.py"
    source = program.read_text()
    assert source.count("import aiogpu.sync as ray") == 1
    before = tmp_path / "before.py"
    before.write_text(source.replace("import aiogpu.sync as ray", "import ray"))
    ran = subprocess.run(
        [sys.executable, str(before)],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == (expected(program), 0), ran.stderr


@pytest.mark.ray
def test_one_file_on_a_ray_cluster() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiogpu[ray]'")
    program = EXAMPLES / f"{ANYWHERE}.py"
    variables = {**plain_environment(), "AIOGPU_ADDRESS": "ray"}
    ran = subprocess.run(
        [sys.executable, str(program)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    # Ray itself tells of its start, to the other stream.
    assert (ran.stdout, ran.returncode) == (expected(program), 0), ran.stderr


def test_every_example_is_here() -> None:
    texts = {path.stem for path in (EXAMPLES / "expected").iterdir()}
    shown = [*PROGRAMS, *EXAMPLES.glob("*.sh")]
    assert {path.stem[:2] for path in shown} == texts
    assert len(shown) == len(texts)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_is_short_and_says_what_it_shows(program: Path) -> None:
    source = program.read_text()
    assert source.startswith('"""')
    call = "main()" if "aiogpu.sync" in source else "aiogpu.run(main())"
    assert f'if __name__ == "__main__":\n    {call}\n' in source
    assert source.count("\n") <= 60
