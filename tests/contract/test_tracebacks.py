"""Tracebacks of tasks' errors lead to the user's lines, not through aiogpu."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import sync
from tests.contract.sync_tasks import fail, get_failed
from tests.support.waits import LIMIT

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

PACKAGE = Path(aiogpu.__file__).parent


@pytest.fixture
def node(address: str) -> Iterator[Any]:
    with sync.init(address=address, num_cpus=2) as node:
        yield node


def check(error: BaseException) -> None:
    """Check that no frame is aiogpu's, and that the task's own lines are there."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[0] == __file__
    assert not [name for name in files if Path(name).is_relative_to(PACKAGE)]
    text = "".join(traceback.format_exception(error))
    assert "raise LookupError(word)" in text


@pytest.mark.parametrize(
    "wait",
    [
        lambda handle: handle.result(LIMIT),
        sync.get,
        lambda handle: sync.get([handle]),
    ],
)
def test_an_error_is_raised_at_the_line_that_waits(
    node: Any, wait: Callable[[Any], Any]
) -> None:
    handle = fail.remote("here")
    for _ in range(3):
        with pytest.raises(LookupError) as raised:
            wait(handle)
        check(raised.value)


async def test_an_error_is_raised_at_the_await(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        handle = aiogpu.remote(fail.__wrapped__).remote("here")
        for _ in range(3):
            with pytest.raises(LookupError) as raised:
                await handle
            check(raised.value)
        with pytest.raises(LookupError) as raised:
            handle.result()
        check(raised.value)


def test_an_error_is_raised_at_the_line_of_a_task_that_waits(node: Any) -> None:
    assert sync.get(get_failed.remote()) == [["get_failed"]] * 3


def test_an_error_of_the_call_itself_keeps_its_frames(node: Any) -> None:
    with pytest.raises(aiogpu.errors.MisuseError) as raised:
        sync.get(3)  # type: ignore[call-overload]
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames][-1] == "checked_handles"
