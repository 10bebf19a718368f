"""Sandboxes for nodes, and terminals with a readable screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.sandbox import Sandbox, open_sandbox
from tests.cli.tmux_screen import Screen, open_screen


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A sandbox without a node, before and after."""
    with open_sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Screen]:
    """A shell in a terminal of tmux."""
    with open_screen(tmp_path) as screen:
        yield screen
