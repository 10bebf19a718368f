"""After which exceptions a task is tried again, there and back."""

from __future__ import annotations

import threading

import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.serializer import (
    ALL,
    NONE,
    dump_retried,
    is_one_of,
    load_retried,
)


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
def test_which_exceptions_are_retried(wanted, error, is_retried):
    there = load_retried(dump_retried(wanted))
    assert there == wanted
    assert is_one_of(there, error) is is_retried


def test_what_is_commonest_is_short():
    assert dump_retried(False) == NONE == b""
    assert dump_retried(True) == ALL
    assert len(ALL) == 1


def test_a_class_that_cannot_be_pickled_is_named():
    kind = type("Held", (Exception,), {"lock": threading.Lock()})
    with pytest.raises(SerializationError, match="the option retry_exceptions"):
        dump_retried((kind,))
