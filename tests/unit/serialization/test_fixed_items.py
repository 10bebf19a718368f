"""Items of a chunk are fixed when they are read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.references import add_reference
from aiogpu.serialization.serializer import dump_arguments, fix_item
from aiogpu.serialization.serializer import load_arguments as load


def sent(item: Any) -> Any:
    """The item as the function gets it."""
    payload = dump_arguments("f", (item,), {})
    if isinstance(payload, bytes):
        (args, _) = load(payload)
    else:
        args, _ = pickle.loads(payload.stream, buffers=payload.buffers)
    return args[0]


@pytest.mark.parametrize("item", [1, "a", None, (1, "a"), b"x"])
def test_items_that_cannot_change_are_passed_on(item: Any) -> None:
    assert fix_item("f", item) is item


def change(item: Any) -> None:
    if isinstance(item, dict):
        item["new"] = 0
    elif isinstance(item, np.ndarray):
        item[:] = 0
    elif isinstance(item, set):
        item.add(0)
    else:
        item.append(0)


ITEMS: dict[str, Any] = {
    "list": lambda: [1, 2],
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "nested": lambda: [[1], {"a": [2]}],
    "dict of lists": lambda: {"a": [1]},
    "array": lambda: np.arange(3),
    "large array": lambda: np.arange(100_000),
    "bytearray": lambda: bytearray(b"ab"),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_later_writes_do_not_change_an_item(kind: str) -> None:
    item, before = ITEMS[kind](), ITEMS[kind]()
    fixed = fix_item("f", item)
    change(item)
    arrived = sent(fixed)
    if isinstance(before, np.ndarray):
        assert (arrived == before).all()
    else:
        assert arrived == before


def test_object_with_large_buffers_is_copied_once() -> None:
    writable, constant = np.arange(50_000), b"x" * 400_000
    fixed = fix_item("f", {"w": writable, "c": pickle.PickleBuffer(constant)})
    writable[:] = 0
    assert repr(fixed).startswith("<PickledItem of ")
    arrived = sent(fixed)
    assert arrived["w"][-1] == 49_999
    assert bytes(arrived["c"]) == constant


def test_item_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SerializationError, match=r"arguments of f\.remote\(\)"):
        fix_item("f", [lambda: (yield), (i for i in ())])


class Refers:
    """Refers to a value, as a handle does."""

    def __reduce__(self) -> Any:
        add_reference(REFERENCE)
        return int, ()


REFERENCE: Any = object()


def test_references_of_an_item_are_those_of_its_chunk() -> None:
    fixed = fix_item("f", [[Refers()]])
    payload = dump_arguments("f", (fixed,), {})
    assert not isinstance(payload, bytes)
    assert payload.references == (REFERENCE,)
