"""After which exceptions a task is tried again, there and back."""

from __future__ import annotations

import threading

import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.serializer import (
    RETRY_ALL,
    RETRY_NONE,
    dump_retried,
    is_retried,
    load_retried,
)


@pytest.mark.parametrize(
    ("wanted", "error", "expected"),
    [
        (False, ValueError(), False),
        (True, ValueError(), True),
        ((OSError,), ConnectionError(), True),
        ((OSError, KeyError), KeyError(), True),
        ((OSError,), ValueError(), False),
        ((), ValueError(), False),
    ],
)
def test_which_exceptions_are_retried(wanted, error, expected):
    there = load_retried(dump_retried(wanted))
    assert there == wanted
    assert is_retried(there, error) is expected


def test_what_is_commonest_is_short():
    assert dump_retried(False) == RETRY_NONE == b""
    assert dump_retried(True) == RETRY_ALL
    assert len(RETRY_ALL) == 1


def test_a_class_that_cannot_be_pickled_is_named():
    kind = type("Held", (Exception,), {"lock": threading.Lock()})
    with pytest.raises(SerializationError, match="the option retry_exceptions"):
        dump_retried((kind,))
