"""The pictures of the pages show the dashboard as it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.dashboard.draw_pictures import CHROMIUM, TEXTS, draw

pytest.importorskip("playwright.async_api", reason="needs aiogpu[browser]")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the command chromium"),
]


def test_the_pictures_show_what_the_pages_show(tmp_path: Path) -> None:
    read = asyncio.run(draw(tmp_path, is_read=True))
    assert read == TEXTS.read_text(), "run python -m tests.dashboard.draw_pictures"
