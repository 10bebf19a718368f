"""What a chunk of a map gives, where one of its results cannot be pickled."""

from __future__ import annotations

import threading

import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import UNSENDABLE, ChunkOutcome
from aiogpu.serialization.serializer import dump_result, load_result

LOCK = threading.Lock()


def test_the_results_before_it_arrive():
    outcome = load_result(dump_result(ChunkOutcome([1, [2], LOCK, 4], 0.5, None)))
    assert outcome.values == [1, [2]]
    assert outcome.seconds == 0.5
    _, kind, _, message, *_ = outcome.failure
    assert kind == UNSENDABLE
    assert "cannot be pickled: result (a lock)" in message


def test_what_is_not_to_blame_is_told_as_it_is():
    outcome = ChunkOutcome([1], 0.5, (LOCK,))
    assert outcome.before_unpicklable(dump_result) is outcome
    with pytest.raises(SerializationError, match="lock"):
        dump_result(outcome)
