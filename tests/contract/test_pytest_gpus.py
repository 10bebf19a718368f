"""`pytest --gpus 0.25`: each test process has a lease before it imports a test."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import aiogpu
from tests.contract.raw_client import Service, service
from tests.support.program import run_command
from tests.support.waits import until, until_free
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import StubGpu, StubNvml

__all__ = ["nvml", "stub_library"]
pytestmark = pytest.mark.usefixtures("service_forker")

CONFTEST = """
import os
pytest_plugins = ["aiogpu.testing.gpus"]
AT_ONCE = os.environ.get("CUDA_VISIBLE_DEVICES")
"""
TESTS = """
import os
import pathlib
import pytest
from conftest import AT_ONCE

SEEN = os.environ["CUDA_VISIBLE_DEVICES"]
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    if WORKER:
        assert AT_ONCE == SEEN, "set before the conftest is imported"
    with open("log", "a") as log:
        print(WORKER, SEEN, file=log)
"""
CRASHING = """
import os
import pathlib

def test_it():
    with open("log", "a") as log:
        print("x", os.environ["CUDA_VISIBLE_DEVICES"], file=log)
    if not os.path.exists("crashed"):
        pathlib.Path("crashed").touch()
        os._exit(1)

def test_another():
    with open("log", "a") as log:
        print("x", os.environ["CUDA_VISIBLE_DEVICES"], file=log)
"""
WAITING = """
import os
import signal

def test_it():
    with open("log", "a") as log:
        print("x", os.environ["CUDA_VISIBLE_DEVICES"], file=log)
    signal.pause()
"""
PLUGINS = ("-pno:cacheprovider", "-pno:hypothesispytest", "-pno:asyncio")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose tests write the worker and its GPUs into `log`."""
    place = tmp_path / "project"
    place.mkdir()
    write(place, conftest=CONFTEST, test_it=TESTS)
    (place / "pytest.ini").write_text("[pytest]\n")
    (place / "log").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("AIOGPU_ADDRESS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    return place


def write(project: Path, **sources: str) -> None:
    for name, source in sources.items():
        (project / f"{name}.py").write_text(source)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *PLUGINS, *arguments]


def run_tests(
    project: Path, environ: Mapping[str, str], *arguments: str
) -> tuple[int, str]:
    """Run the project's tests; return the exit code and the output."""
    ran = run_command(*command(*arguments), cwd=project, env=environ)
    return ran.returncode, ran.stdout + ran.stderr


def seen(project: Path) -> Counter[str]:
    """How many processes have seen which GPU."""
    lines = {tuple(line.split()) for line in (project / "log").read_text().splitlines()}
    return Counter(gpu for _, gpu in lines)


def gpus(count: int) -> list[StubGpu]:
    return [StubGpu(f"GPU-{n}", pci=f"00000000:{n + 1:02}:00.0") for n in range(count)]


def test_workers_share_the_gpus_of_the_machine(project: Path, nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    code, output = run_tests(project, nvml.environ, "-n4", "--gpus=0.5", "-v")
    assert code == 0, output
    assert seen(project) == {"0": 2, "1": 2}
    assert "GPUs (0.5 each): 0 0 1 1" in output


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_run_without_xdist_has_a_lease(
    project: Path, nvml: StubNvml, mode: str
) -> None:
    nvml.write(gpus(1))
    (project / "pytest.ini").write_text("[pytest]\ngpus = 1\npythonpath = .\n")
    arguments = ("-pno:xdist", f"--import-mode={mode}")
    code, output = run_tests(project, nvml.environ, *arguments)
    assert code == 0, output
    assert seen(project) == {"0": 1}


REFUSED = {
    "0": "--gpus 0: give a part of a GPU, such as 0.25, or whole GPUs.",
    "1.5": "--gpus 1.5: give a part of a GPU, such as 0.25, or whole GPUs.",
    "half": "--gpus half: give a part of a GPU, such as 0.25, or whole GPUs.",
    "1": "3 pytest processes ask for 1 of a GPU each; this machine has 2, room for 2. "
    "Use -n 2, or --gpus 0.5.",
    "0.6": "3 pytest processes ask for 0.6 of a GPU each; this machine has 2, room for "
    "2. Use -n 2, or --gpus 0.5.",
    "4": "3 pytest processes ask for 4 of a GPU each; this machine has 2, room for 0. "
    "Use --gpus 0.5.",
}


@pytest.mark.parametrize("share", REFUSED)
def test_a_wrong_or_too_large_share_is_refused(
    project: Path, nvml: StubNvml, share: str
) -> None:
    nvml.write(gpus(2))
    code, output = run_tests(project, nvml.environ, "-n3", f"--gpus={share}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert REFUSED[share] in output
    assert "Traceback" not in output


def test_a_machine_without_a_gpu_is_named(project: Path, nvml: StubNvml) -> None:
    _, output = run_tests(project, nvml.environ, "-pno:xdist", "--gpus=1")
    assert "this machine has no GPU. Leave --gpus out, or declare logical" in output


def test_a_worker_in_place_of_a_crashed_one_has_its_lease(
    project: Path, nvml: StubNvml
) -> None:
    nvml.write(gpus(2))
    write(project, test_it=CRASHING)
    _, output = run_tests(project, nvml.environ, "-n1", "--gpus=1")
    assert "1 failed, 1 passed" in output
    assert seen(project) == {"0": 1}


def joined(running: Service, nvml: StubNvml) -> dict[str, str]:
    return {**nvml.environ, "AIOGPU_ADDRESS": running.path}


async def test_leases_of_a_shared_node_are_given_back(
    project: Path, nvml: StubNvml
) -> None:
    with service(num_gpus=2) as running:
        environ = joined(running, nvml)
        async with aiogpu.init(address=running.path):
            held = await aiogpu.lease(num_gpus=1, name="mine")
            arguments = ("-n2", "--gpus=0.5")
            testing = asyncio.to_thread(run_tests, project, environ, *arguments)
            code, output = await testing
            assert code == 0, output
            assert seen(project) == {"1": 2}, "the other GPU is held"
            await held.release()
            await until_free()


async def test_leases_are_free_after_a_kill(project: Path, nvml: StubNvml) -> None:
    write(project, test_it=WAITING)
    with service(num_gpus=1) as running:
        async with aiogpu.init(address=running.path):
            with subprocess.Popen(
                command("-n2", "--gpus=0.5"),
                cwd=project,
                env=joined(running, nvml),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as ran:
                await until(lambda: seen(project))
                assert (await aiogpu.available_resources())["GPU"] == 0
                ran.send_signal(signal.SIGKILL)
            await until_free()
