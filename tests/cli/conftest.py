"""Boxes for tests of the service, and terminals whose screens are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.box import Box, box
from tests.cli.screens import Screen, screen


@pytest.fixture
def here() -> Iterator[Box]:
    """A box without a node, before and after."""
    with box() as opened:
        yield opened


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Screen]:
    """A shell in a terminal of tmux."""
    with screen(tmp_path) as found:
        yield found
