"""`docs/gpu-memory.md` shows a program that runs, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import aiogpu
from aiogpu.runtime.devices import binding as gpu_limits
from aiogpu.runtime.devices import binding as mps
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "gpu-memory.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_names_what_there_is() -> None:
    error = aiogpu.GpuOutOfMemoryError("")
    for name in vars(error):
        assert f"| `{name}` |" in PAGE
    told = (
        *(gpu_limits.JAX_FRACTION, gpu_limits.JAX_FRACTION_TOO),
        *(gpu_limits.JAX_PREALLOCATES, gpu_limits.CUPY_LIMIT),
        *(gpu_limits.TENSORFLOW_GROWS, mps.THREADS, mps.MEMORY, mps.PIPES, mps.DEFAULT),
    )
    assert [name for name in told if name not in PAGE] == []
    assert len(PAGE.splitlines()) <= 200


def test_the_program_prints_what_stands_below_it(tmp_path: Path) -> None:
    program, output = FENCE.findall(PAGE)
    assert (program[0], output[0]) == ("python run", "text")
    assert printed_by(program[1], tmp_path) == output[1]
