"""A stream that is cancelled before its loop has begun with it."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest

from aiogpu.worker.coroutines import Coroutines


class Interrupted(Coroutines):
    """Where the signal lands before the first step."""

    def __init__(self) -> None: ...

    def run(self, coroutine: Any, task_id: int) -> Any:
        raise KeyboardInterrupt


def test_it_leaves_nothing_that_was_never_awaited() -> None:
    flow: Any = type("Flow", (), {"task": 1})()
    items: Any = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            Interrupted().send_items(items, flow)
        gc.collect()
    assert not told
