"""Boxes for tests of the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.service.box import Box, box


@pytest.fixture
def here() -> Iterator[Box]:
    """A box without a node, before and after."""
    with box() as opened:
        yield opened
