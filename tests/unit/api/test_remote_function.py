"""`@remote` as an object: what it takes and refuses, its calls, how it is pickled."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

import cloudpickle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu.api.actors.actor import RemoteClass
from aiogpu.api.remote_function import (
    Definition,
    FunctionName,
    Parameters,
    RemoteFunction,
    signature_of,
    without_self,
)
from aiogpu.errors import AiogpuWarning, MisuseError, SerializationError
from aiogpu.serialization.serializer import load_function
from tests.unit.api.fakes import FakeEngine

T = TypeVar("T")


@aiogpu.remote
def documented(x: int) -> int:
    """What it does."""
    return x + 1


@aiogpu.remote
class Counter:
    def add(self) -> int:
        return 1


class Plain:
    def __call__(self) -> str:
        return "called"

    def method(self) -> str:
        return "method"


class Box(Generic[T]):
    def open(self) -> int:
        return 5


# What is decorated.


def test_it_looks_like_its_function() -> None:
    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it does."
    assert documented.__module__ == __name__
    assert repr(documented) == f"<RemoteFunction {__name__}.documented>"
    assert documented.__wrapped__(1) == 2
    with pytest.raises(TypeError, match=r"await documented\.remote"):
        documented(1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "name", "is_coroutine"),
    [
        (lambda: 1, "<lambda>", False),
        (time.sleep, "sleep", False),
        (asyncio.sleep, "sleep", True),
        (functools.partial(int, "7"), "partial", False),
        (functools.partial(asyncio.sleep, 1), "partial", True),
        (Plain(), "Plain", False),
        (Plain().method, "method", False),
    ],
)
def test_whatever_can_be_called_can_be_remote(
    function: Any, name: str, is_coroutine: bool
) -> None:
    definition = Definition(function)
    assert aiogpu.remote(function).__name__ == name
    assert callable(load_function(definition.pickled().payload))
    assert definition.is_coroutine is is_coroutine


async def test_a_class_with_its_parameter_is_that_class(
    inline_node: aiogpu.types.Node,
) -> None:
    """`list[int]` and the like are called as classes are, and are none."""
    boxes = aiogpu.remote(Box[int])
    assert isinstance(boxes, RemoteClass)
    assert aiogpu.remote(max_restarts=1)(Box[int])._options.max_restarts == 1
    assert await boxes.remote().open.remote() == 5


@pytest.mark.parametrize(
    ("thing", "word"), [(documented, "already"), (5, "5"), ("f", "'f'")]
)
def test_what_cannot_be_remote(thing: Any, word: str) -> None:
    for decorate in (aiogpu.remote, aiogpu.remote(num_cpus=1)):
        with pytest.raises(MisuseError, match=word):
            decorate(thing)
    with pytest.raises(MisuseError, match="not both"):
        aiogpu.remote(len, num_gpus=1)  # type: ignore[call-overload]
    assert isinstance(aiogpu.remote()(len), RemoteFunction)


# How the function is sent: by name if it can be imported, by value otherwise.


def test_a_function_of_a_module_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = documented._definition
    assert definition.reference() == FunctionName(__name__, "documented")
    assert load_function(definition.pickled().payload) is documented.__wrapped__
    assert definition.pickled() is definition.pickled()
    again = Definition(documented.__wrapped__)
    assert again.reference() is None, "the name means the first"
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setattr(documented.__wrapped__, "__module__", name)
        assert Definition(documented.__wrapped__).reference() is None


def test_one_that_takes_much_with_it_is_told_once() -> None:
    table = bytes(2 << 20)

    @aiogpu.remote
    def lookup(index: int) -> int:
        return table[index]

    @aiogpu.remote
    class Lookup:
        def at(self, index: int) -> int:
            return table[index]

    told = r"of which 2\.0 MiB are lookup\.__closure__\.table"
    with pytest.warns(AiogpuWarning, match=told) as caught:
        lookup._definition.pickled()
    lookup.options(num_cpus=2)._definition.pickled()
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(AiogpuWarning, match=r"are Lookup\.at\.__closure__\.table"):
        Lookup._definition.pickled()


# How the remote function or class itself is pickled.


@pytest.mark.parametrize("thing", [documented, Counter], ids=["function", "class"])
def test_what_is_in_a_module_goes_by_its_name_with_its_options(thing: Any) -> None:
    stream = pickle.dumps(thing)
    assert len(stream) < 700, "what it is made of is not sent"
    for found in (pickle.loads(stream), pickle.loads(ForkingPickler.dumps(thing))):
        assert type(found) is type(thing)
        assert found.__wrapped__ is thing.__wrapped__
    with_options = thing.options(num_gpus=0.25, name="one")
    found = pickle.loads(pickle.dumps(with_options))
    assert found._options == with_options._options
    assert found._definition is thing._definition
    assert vars(found).get("_interface") is vars(thing).get("_interface")


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
    @aiogpu.remote(priority=3)
    def inner() -> int:
        return 4

    @aiogpu.remote
    class Inner: ...

    return [inner, Inner, inner.options(num_cpus=2), Inner.options(num_cpus=2)]


@pytest.mark.parametrize("thing", nameless(), ids=repr)
def test_what_has_no_name_goes_by_value_but_not_by_plain_pickle(thing: Any) -> None:
    """Multiprocessing is told what to do."""
    with pytest.raises(SerializationError) as caught:
        ForkingPickler.dumps(thing)
    said = str(caught.value)
    assert said.startswith(f"multiprocessing cannot send {thing!r}: ")
    assert f"`{thing.__name__}.remote(...)` runs in a worker" in said
    assert f"`remote_version = aiogpu.remote({thing.__name__})`" in said
    sent = pickle.loads(cloudpickle.dumps(thing))
    for found in (sent, copy.copy(thing), copy.deepcopy(thing)):
        assert type(found) is type(thing)
        assert found.__name__ == thing.__name__
        assert found._options == thing._options
    assert isinstance(thing, RemoteClass) or sent.__wrapped__() == 4


# Its calls.


async def test_one_that_cannot_be_pickled_yet_may_be_called_later(
    engine: FakeEngine,
) -> None:
    """[B39]"""
    held: dict[str, object] = {"lock": threading.Lock()}

    @aiogpu.remote
    def nested(*_: object) -> object:
        return held

    for _ in range(2):
        with pytest.raises(SerializationError, match=r"the function nested.*lock"):
            nested.remote()
    held.clear()
    nested.remote().cancel()
    with pytest.raises(SerializationError, match=r"arguments of nested\.remote"):
        nested.remote(threading.Lock())
    nested.remote().cancel()


# Its parameters: what is refused before it is sent is what Python would refuse.

NAMES = "abcde"
KINDS = inspect.Parameter


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Any signature of a few parameters, defaults in any place where they may be."""
    kinds = sorted(
        draw(st.lists(st.sampled_from([*inspect._ParameterKind]), max_size=len(NAMES)))
    )
    parameters: list[inspect.Parameter] = []
    has_default = False
    for name, kind in zip(NAMES, kinds, strict=False):
        is_star = kind in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)
        if is_star and any(one.kind == kind for one in parameters):
            continue
        default: Any = KINDS.empty
        if not is_star and (draw(st.booleans()) or has_default):
            if kind != KINDS.KEYWORD_ONLY or draw(st.booleans()):
                default = None
            has_default |= kind != KINDS.KEYWORD_ONLY
        parameters.append(KINDS(name, kind, default=default))
    return inspect.Signature(parameters)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(
    signature=signatures(),
    args=st.lists(st.none(), max_size=6).map(tuple),
    kwargs=st.dictionaries(st.sampled_from([*NAMES, "z"]), st.none(), max_size=3),
    has_travelled=st.booleans(),
)
def test_its_verdict_is_pythons(
    signature: inspect.Signature,
    args: tuple[None, ...],
    kwargs: dict[str, None],
    has_travelled: bool,
) -> None:
    parameters = Parameters("f", signature)
    if has_travelled:
        parameters = pickle.loads(pickle.dumps(parameters))
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(MisuseError, match=r"f\(.*was called with wrong arguments"):
            parameters.check(args, dict(kwargs))
    else:
        parameters.check(args, dict(kwargs))


def test_signatures_of_methods_and_of_what_has_none() -> None:
    def method(self: object, a: int) -> None: ...

    def all_by_position(*args: int) -> None: ...

    def none() -> None: ...

    functions: list[Callable[..., None]] = [method, all_by_position, none]
    found = [signature_of(one) for one in functions]
    texts = [str(without_self(one)) for one in found if one is not None]
    assert texts == ["(a: 'int') -> 'None'", "(*args: 'int') -> 'None'", "() -> 'None'"]
    parameters = Parameters("update", signature_of(dict.update))
    for each in (parameters, pickle.loads(pickle.dumps(parameters))):
        each.check((1, 2, 3), {"a": 1})
