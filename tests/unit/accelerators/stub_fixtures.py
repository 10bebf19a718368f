"""Fixtures of the NVML stub, in a separate module because workers import the stub."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.accelerators.stub_nvml import StubNvml, compile_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub, compiled once."""
    return compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(stub_library: Path, tmp_path: Path) -> StubNvml:
    """A stub with its own state and, at first, without GPUs."""
    return StubNvml(stub_library, tmp_path / "nvml.state")
