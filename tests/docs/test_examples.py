"""Each example prints the expected text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.sandbox import open_sandbox
from tests.support.program import (
    clean_environment,
    output_of,
    run_command,
    without_pids,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVERS = {"08_serve", "23_workers"}
"""Servers print nothing; `test_serve.py` has their tests."""
ANY_ENGINE = "14_anywhere"
"""Prints the same on each engine."""
JOINING = "12_service"
"""Joins a running node."""
PROGRAMS = sorted(
    path for path in EXAMPLES.glob("[0-9]*.py") if path.stem not in SERVERS
)


STOPPED = "16_checkpoint"
"""Is stopped by a signal."""
QUEUES = ("24_celery", "25_taskiq")
"""Workers of job queues, which join a running node."""
ALONE = [path for path in PROGRAMS if path.stem not in (JOINING, STOPPED, *QUEUES)]


def expected(program: Path) -> str:
    return (EXAMPLES / "expected" / f"{program.stem[:2]}.txt").read_text()


@pytest.mark.parametrize("program", ALONE, ids=lambda path: path.stem)
def test_an_example_prints_the_expected_text(program: Path) -> None:
    assert output_of(program) == expected(program)


@pytest.mark.parametrize("name", QUEUES)
def test_a_queue_worker_runs_jobs_on_a_shared_node(name: str) -> None:
    program = EXAMPLES / f"{name}.py"
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-gpus=1", "--num-cpus=4")
        assert output_of(program, variables=sandbox.variables) == expected(program)
        sandbox.run("stop")


def test_the_julia_set_runs_as_a_program() -> None:
    output = output_of(EXAMPLES / "julia_set.py")
    *picture, verdict = output.splitlines()
    assert len(picture) == 24
    assert verdict == "equals the serial one: True"


def test_an_example_that_joins_finds_the_actor_of_the_previous_run() -> None:
    program = EXAMPLES / f"{JOINING}.py"
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-gpus=1")
        first = output_of(program, variables=sandbox.variables)
        again = output_of(program, variables=sandbox.variables)
    assert first == expected(program)
    assert again == first.replace("so far: 3", "so far: 6")


@pytest.mark.parametrize("where", ["alone", "on a node"])
def test_a_stopped_example_continues_from_its_checkpoint(
    where: str, tmp_path: Path
) -> None:
    program, state = EXAMPLES / f"{STOPPED}.py", str(tmp_path / "state.txt")
    with ExitStack() as stack:
        variables = clean_environment()
        if where == "on a node":
            sandbox = stack.enter_context(open_sandbox())
            sandbox.run("start", "--head", "--num-gpus=1")
            variables = {**sandbox.variables, "AIOGPU_ADDRESS": "auto"}
        command = [sys.executable, str(program), state, str(10**9)]
        with subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, text=True
        ) as stopped:
            assert stopped.stdout is not None
            first = stopped.stdout.readline()
            stopped.send_signal(signal.SIGTERM)
            output, _ = stopped.communicate(timeout=60)
        assert stopped.returncode == 128 + signal.SIGTERM
        again = output_of(program, state, "1", variables=variables)
    assert without_pids(first + output) + again == expected(program)


def test_the_tour_of_the_commands_prints_the_expected_text() -> None:
    """The programs and commands are those of this environment."""
    program = EXAMPLES / "20_commands.sh"
    with open_sandbox() as sandbox:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**sandbox.variables, "PATH": path}
        ran = run_command("sh", str(program), env=environ)
        assert sandbox.node is None
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == (expected(program), "")


def test_an_example_prints_the_same_on_a_service() -> None:
    program = EXAMPLES / f"{ANY_ENGINE}.py"
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-gpus=1", "--num-cpus=2")
        variables = {**sandbox.variables, "AIOGPU_ADDRESS": "auto"}
        on_node = output_of(program, variables=variables)
    assert on_node == expected(program)


@pytest.mark.ray
def test_porting_a_ray_program_changes_one_line(tmp_path: Path) -> None:
    """The example without an event loop, and the same on Ray itself."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiogpu[ray]'")
    program = EXAMPLES / "15_without_a_loop.py"
    source = program.read_text()
    assert source.count("import aiogpu.sync as ray") == 1
    before = tmp_path / "before.py"
    before.write_text(source.replace("import aiogpu.sync as ray", "import ray"))
    ran = run_command(sys.executable, str(before), env=clean_environment())
    assert (ran.stdout, ran.returncode) == (expected(program), 0), ran.stderr


@pytest.mark.ray
def test_an_example_prints_the_same_on_a_ray_cluster() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'aiogpu[ray]'")
    program = EXAMPLES / f"{ANY_ENGINE}.py"
    variables = clean_environment(AIOGPU_ADDRESS="ray")
    ran = run_command(sys.executable, str(program), env=variables)
    # Ray itself writes about its start to stderr.
    assert (ran.stdout, ran.returncode) == (expected(program), 0), ran.stderr


def test_every_example_has_an_expected_text() -> None:
    texts = {path.stem for path in (EXAMPLES / "expected").iterdir()}
    printed = [*PROGRAMS, *EXAMPLES.glob("*.sh")]
    assert {path.stem[:2] for path in printed} == texts
    assert len(printed) == len(texts)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_is_short_and_documented(program: Path) -> None:
    source = program.read_text()
    assert source.startswith('"""')
    call = "main()" if "aiogpu.sync" in source else "aiogpu.run(main())"
    assert f'if __name__ == "__main__":\n    {call}\n' in source
    assert source.count("\n") <= 60
