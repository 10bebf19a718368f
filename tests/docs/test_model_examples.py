"""The examples with real models do what they say, where their packages are installed.

`pip install --group examples` brings the packages.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import wave
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.sandbox import open_sandbox
from tests.docs.test_serve import running_server
from tests.support.program import ROOT, clean_environment, run_command

MODELS = ROOT / "examples/models"
pytestmark = pytest.mark.either_loop


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip a test unless these modules are installed; import none of them here."""
    missing = [name for name in modules if find_spec(name) is None]
    reason = f"not installed: {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run_example(name: str, *arguments: str) -> str:
    """Run an example to its end; return what it prints."""
    command = sys.executable, str(MODELS / f"{name}.py"), *arguments
    ran = run_command(*command, env=clean_environment())
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    "path", sorted(MODELS.glob("*.py")), ids=lambda path: path.stem
)
def test_an_example_is_short_and_documented(path: Path) -> None:
    source = path.read_text()
    assert source.startswith('"""')
    assert source.count("\n") <= 100


@needs("torch", "silero_vad")
def test_recordings_are_searched_for_speech(tmp_path: Path) -> None:
    lines = run_example("infer").splitlines()
    found = [re.fullmatch(r"\d\d\.wav (\d\.\d) s of speech", line) for line in lines]
    assert len(found) == 12
    for number, match in enumerate(found):
        assert match
        assert abs(float(match[1]) - (1 + number % 3)) <= 0.3
    with wave.open(str(tmp_path / "stereo.wav"), "wb") as file:
        file.setparams((2, 2, 44_100, 0, "NONE", "not compressed"))
    assert run_example("infer", str(tmp_path)) == (
        "stereo.wav stereo.wav is not 16-bit mono of 16 kHz\n"
    )


@needs("torch", "optuna", "sklearn")
def test_a_sweep_finds_good_parameters_and_stops_bad_ones() -> None:
    printed = run_example("sweep", "10")
    (best,) = re.findall(r"^the best: ([\d.]+)% with \{'rate'", printed, re.MULTILINE)
    assert float(best) > 90
    assert "stopped" in printed


@needs("torch", "sklearn")
def test_ranks_train_one_model() -> None:
    lines = run_example("train_ddp", "2").splitlines()
    assert len(lines) == 2
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    first, second = (re.findall(r"accuracy ([\d.]+)%", line)[0] for line in lines)
    assert first == second, "all ranks have the same weights"
    assert float(first) > 88


@needs("torch", "sklearn")
def test_test_processes_share_a_gpu() -> None:
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-gpus=1")
        options = "-n2", "-paiogpu.testing.gpus", "--gpus=0.5", "-pno:cacheprovider"
        command = (
            sys.executable,
            "-m",
            "pytest",
            *options,
            str(MODELS / "test_share.py"),
        )
        ran = run_command(*command, env=sandbox.variables, cwd=sandbox.directory)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout


@needs("torch", "silero_vad", "fastapi", "uvicorn")
async def test_the_server_finds_speech_in_batches(tmp_path: Path) -> None:
    said = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys, numpy as np; from voice import voice\n"
            "sys.stdout.buffer.write((voice(2) * 32767).astype('<i2').tobytes())",
        ],
        cwd=MODELS,
        capture_output=True,
        check=True,
    ).stdout
    async with running_server(tmp_path, str(MODELS / "serve.py")) as server:
        spoken, silent = await asyncio.gather(
            server.client.post("/speech", content=said),
            server.client.post("/speech", content=bytes(len(said) // 2)),
        )
        assert spoken.json()["seconds_of_speech"] > 1.5
        assert silent.json()["seconds_of_speech"] == 0
        assert len(spoken.json()["windows"]) == 2 * len(silent.json()["windows"]) - 1
        bad = await server.client.post("/speech", content=b"odd")
        assert bad.status_code == 422
        calls = [server.client.post("/speech", content=said) for _ in range(16)]
        answers = await asyncio.gather(*calls)
        assert len({answer.text for answer in answers}) == 1
        models = await server.health()
        assert [model["gpus"] for model in models] == [[0], [0]]
        batches = [model["batches"] for model in models]
        assert sum(int(str(count)) for count in batches) < 18, "calls share batches"
        assert await server.end() in (0, -15)
