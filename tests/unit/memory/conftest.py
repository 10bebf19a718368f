"""Segments: none is left, neither as a descriptor nor as a mapping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.memory.held import held


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = held()
    yield
    assert held() == before
