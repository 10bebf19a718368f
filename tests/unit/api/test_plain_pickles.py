"""Remote functions and classes under plain pickle: by name, as Python's own are."""

from __future__ import annotations

import copy
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import aiogpu
from aiogpu.errors import SerializationError


@aiogpu.remote
def double(x: int) -> int:
    return 2 * x


@aiogpu.remote
class Counter:
    def add(self) -> int:
        return 1


class Plain:
    pass


def again(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("thing", [double, Counter], ids=["function", "class"])
def test_what_is_in_a_module_goes_by_its_name(thing: Any) -> None:
    stream = pickle.dumps(thing)
    assert len(stream) < 700, "what it is made of stays at home"
    for found in (pickle.loads(stream), pickle.loads(ForkingPickler.dumps(thing))):
        assert type(found) is type(thing)
        assert found.__wrapped__ is thing.__wrapped__


def test_options_go_with_it() -> None:
    found = again(Counter.options(num_cpus=3, name="one"))
    assert found._options == Counter.options(num_cpus=3, name="one")._options
    assert found._interface is Counter._interface


def test_a_class_that_is_plain_where_it_comes_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who decorates by a call may keep the remote one under another name."""
    remote = aiogpu.remote(Plain)
    monkeypatch.setattr(sys.modules[__name__], "Plain", remote)
    stream = pickle.dumps(remote)
    monkeypatch.undo()
    found = pickle.loads(stream)
    assert type(found) is type(remote)
    assert found.__wrapped__ is Plain


def nameless() -> list[Any]:
    @aiogpu.remote
    def inner() -> None: ...

    @aiogpu.remote
    class Inner: ...

    return [inner, Inner, inner.options(num_cpus=2), Inner.options(num_cpus=2)]


@pytest.mark.parametrize("thing", nameless(), ids=repr)
def test_multiprocessing_is_told_what_to_do_with_what_has_no_name(thing: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        ForkingPickler.dumps(thing)
    said = str(caught.value)
    assert said.startswith(f"{thing!r} cannot be sent by multiprocessing, ")
    assert f"`{thing.__name__}.remote(...)` runs in a worker" in said
    assert f"`remote_one = aiogpu.remote({thing.__name__})`" in said


@pytest.mark.parametrize("thing", nameless(), ids=repr)
def test_who_takes_what_has_no_name_takes_it_still(thing: Any) -> None:
    for found in (
        pickle.loads(cloudpickle.dumps(thing)),
        copy.copy(thing),
        copy.deepcopy(thing),
    ):
        assert type(found) is type(thing)
        assert found.__name__ == thing.__name__
        assert found._options == thing._options


def test_of_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("__main__")
    source = "import aiogpu\n@aiogpu.remote\ndef work(): pass\n"
    exec(source, vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(SerializationError, match=r"^<RemoteFunction __main__\.work>"):
        ForkingPickler.dumps(program.work)
