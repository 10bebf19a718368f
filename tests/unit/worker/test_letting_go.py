"""Errors that have been told keep nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from aiogpu.worker.invoke import let_go


class Thing:
    """What an actor's handle is."""

    error: BaseException | None = None


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def failing(thing: Thing) -> None:
    thing.error = ValueError("told")
    raise thing.error


def caught(thing: Thing) -> BaseException:
    try:
        failing(thing)
    except ValueError as error:
        return error
    raise AssertionError


def test_what_the_frames_held_is_freed() -> None:
    thing = Thing()
    error, watched = caught(thing), weakref.ref(thing)
    del thing
    assert watched() is not None
    let_go(error)
    assert watched() is None
    assert error.__traceback__ is not None, "who keeps the error still sees where"


@pytest.mark.parametrize("is_cause", [True, False])
def test_so_is_what_led_to_it(is_cause: bool) -> None:
    def fail_again(thing: Thing) -> None:
        try:
            failing(thing)
        except ValueError as error:
            raise KeyError from (error if is_cause else None)

    thing = Thing()
    watched = weakref.ref(thing)
    with pytest.raises(KeyError) as raised:
        fail_again(thing)
    del thing
    error = raised.value
    error.__context__.__context__ = error  # a circle is no reason to hang
    let_go(error)
    assert watched() is None


def test_who_has_caught_it_and_goes_on_is_left_alone() -> None:
    def patient() -> Iterator[object]:
        try:
            failing(Thing())
        except ValueError as error:
            yield error
            yield "goes on"

    going_on = patient()
    error = next(going_on)
    assert isinstance(error, ValueError)
    let_go(error)
    assert next(going_on) == "goes on"
    error.__traceback__ = None
