"""Fixtures of the tests of the core."""

import pytest

from aiogpu.core.queue import ready


@pytest.fixture(params=[ready.FEW, 0], ids=["few groups", "many groups"])
def few(request, monkeypatch) -> None:
    """Run a story twice: the second time as if it had many different requests."""
    monkeypatch.setattr(ready, "FEW", request.param)
