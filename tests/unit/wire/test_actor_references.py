"""A payload lists the actors whose handles its pickle has, and keeps them alive."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from aiogpu.errors import MisuseError
from aiogpu.serialization.exceptions import RAISED, pack_failure, unpack_failure
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.references import (
    ActorReference,
    PickledValue,
    add_actor,
    add_handle,
    collect_references,
)
from aiogpu.serialization.serializer import dump_arguments


class Handle:
    """Stands for a handle to an actor; it is unpickled as the actor's id."""

    def __init__(self, actor: int) -> None:
        self.actor = actor

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        add_actor(self.actor, self)
        return int, (self.actor,)


class Value:
    """What a handle to a value stands for."""

    id = 7


class ValueHandle:
    """Stands for a handle to a value."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (add_handle("f", Value),)


def packed(outgoing: PickledValue) -> Payload:
    """The payload that a process would send."""
    contents = Contents(outgoing.stream, actors=outgoing.actors, values=outgoing.values)
    return Payload.of(contents, tuple(outgoing.references))


def test_arguments_list_actors_apart_from_values() -> None:
    pickled = dump_arguments("f", ([Handle(5)], [ValueHandle()]), {})
    assert isinstance(pickled, PickledValue)
    assert (pickled.actors, pickled.values) == ((5,), (7,))


def test_a_handle_that_nobody_sends_is_pickled_all_the_same() -> None:
    assert pickle.loads(pickle.dumps(Handle(5))) == 5


def test_a_function_may_hold_actors_and_no_values() -> None:
    with collect_references(are_actors=True) as found:
        pickle.dumps(Handle(5))
        with pytest.raises(MisuseError):
            pickle.dumps(ValueHandle())
    assert [reference.id for reference in found] == [5]


def test_an_error_keeps_the_actors_alive_whose_handles_it_has() -> None:
    error = ValueError(Handle(5))
    failed = pack_failure(1, RAISED, error, "", packed)
    payload: Any = failed.payload
    assert payload.contents.actors == (5,)
    assert unpack_failure(failed, "f").args == (5,)
    plain = pack_failure(1, RAISED, error, "")
    assert type(plain.payload) is bytes
    assert unpack_failure(plain, "f").args == (5,)


def test_arguments_that_are_not_needed_again_let_go_of_their_actors() -> None:
    other = object()
    payload = Payload.of(Contents(actors=(5,)), (ActorReference(5, None), other))
    payload.let_go_of_actors()
    assert payload.holds == (other,)
