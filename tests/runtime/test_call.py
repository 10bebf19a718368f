"""What the driver keeps of a task."""

from __future__ import annotations

import pytest

from aiogpu.runtime.call import new_function_id, new_site_id
from tests.runtime import sites


@pytest.mark.parametrize(
    ("wanted", "error", "is_retried"),
    [
        (False, ValueError(), False),
        (True, ValueError(), True),
        ((OSError,), ConnectionError(), True),
        ((OSError, KeyError), KeyError(), True),
        ((OSError,), ValueError(), False),
        ((), ValueError(), False),
    ],
)
def test_which_exceptions_are_retried(
    wanted: bool | tuple[type[BaseException], ...], error: Exception, is_retried: bool
) -> None:
    assert sites.site(retry_exceptions=wanted).is_retried(error) is is_retried


def test_ids_are_never_given_twice() -> None:
    assert len({new_site_id() for _ in range(100)}) == 100
    assert len({new_function_id() for _ in range(100)}) == 100


def test_a_call_begins_unanswered() -> None:
    call = sites.call()
    assert (call.worker, call.answer, call.error) == (0, None, None)
