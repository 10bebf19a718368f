from __future__ import annotations

import pickle
from typing import get_args

import pytest

from aiogpu.errors import ProtocolError
from aiogpu.wire import messages
from aiogpu.wire.codec import from_fields
from aiogpu.wire.messages import (
    TAGS,
    Done,
    Exit,
    Failed,
    Forked,
    Hello,
    Message,
    Run,
)


def test_every_message_has_a_tag_of_its_own():
    assert set(TAGS) == set(get_args(Message))
    assert sorted(TAGS.values()) == list(range(1, len(TAGS) + 1))


def test_every_tuple_of_the_vocabulary_is_a_message():
    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and hasattr(kind, "_fields")
    }
    assert kinds == {*TAGS, messages.Setup}


@pytest.mark.parametrize("kind", TAGS)
def test_every_message_says_who_tells_whom(kind):
    assert kind is Hello or " to " in kind.__doc__.split(":")[0]


def test_fields_make_a_message():
    run = from_fields((TAGS[Run], 7, 3, b"args", True, 9, 0, 0))
    assert type(run) is Run
    assert run == Run(task=7, func=3, payload=b"args", is_last=True, number=9)


def test_a_message_without_fields_is_its_tag():
    assert type(from_fields((TAGS[Exit],))) is Exit


def test_an_optional_field_may_be_none_and_another_may_not():
    tag = TAGS[Failed]
    assert (
        from_fields((tag, 1, "k", "t", "m", "tb", None, False, -1, False)).payload
        is None
    )
    assert (
        from_fields((tag, 1, "k", "t", "m", "tb", b"p", True, -1, True)).payload == b"p"
    )
    with pytest.raises(ProtocolError, match=r"Failed does not take \(NoneType, "):
        from_fields((tag, None, "k", "t", "m", "tb", None, False, -1, False))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (None, "holds a NoneType, not a message"),
        ([1, 2], "holds a list, not a message"),
        ({}, "holds a dict, not a message"),
        ((), "holds a tuple, not a message"),
        (Forked(1, 2), "holds a Forked, not a message"),
        (("a",), "begins with a str, not with a tag"),
        ((True,), "begins with a bool, not with a tag"),
        ((1.0,), "begins with a float, not with a tag"),
        (({},), "begins with a dict, not with a tag"),
        ((0,), "the unknown tag 0"),
        ((len(TAGS) + 1,), f"the unknown tag {len(TAGS) + 1}"),
        ((TAGS[Exit], 1), r"Exit does not take \(int\)"),
        ((TAGS[Done], 1, "text"), r"Done does not take \(int, str\)"),
        ((TAGS[Done], True, b""), r"Done does not take \(bool, bytes\)"),
        ((TAGS[Done],), r"Done does not take \(\)"),
        ((TAGS[Done], *[1] * 50), r"Done does not take \(int(, int){7}\)"),
    ],
)
def test_a_refusal_says_what_is_wrong(fields, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        from_fields(fields)


def test_a_message_is_a_plain_tuple_to_other_code():
    task, payload, took = Done(4, b"x")
    assert (task, payload, took) == (4, b"x", 0)
    assert pickle.loads(pickle.dumps(Done(4, b"x"))) == Done(4, b"x")
