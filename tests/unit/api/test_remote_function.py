"""`@remote`: decorated objects, refusals, pickling, and checks of arguments."""

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
from types import FunctionType
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
    """A docstring."""
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


def test_remote_function_has_the_name_of_its_function() -> None:
    assert documented.__name__ == "documented"
    assert documented.__doc__ == "A docstring."
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
def test_callables_can_be_remote(function: Any, name: str, is_coroutine: bool) -> None:
    definition = Definition(function)
    assert aiogpu.remote(function).__name__ == name
    assert callable(load_function(definition.pickled().payload))
    assert definition.is_coroutine is is_coroutine


async def test_generic_alias_is_a_remote_class(inline_node: aiogpu.types.Node) -> None:
    """Generic aliases like `list[int]` are callable, but they are no classes."""
    boxes = aiogpu.remote(Box[int])
    assert isinstance(boxes, RemoteClass)
    assert aiogpu.remote(max_restarts=1)(Box[int])._options.max_restarts == 1
    assert await boxes.remote().open.remote() == 5


@pytest.mark.parametrize(
    ("thing", "message"), [(documented, "already"), (5, "5"), ("f", "'f'")]
)
def test_other_objects_cannot_be_remote(thing: Any, message: str) -> None:
    for decorate in (aiogpu.remote, aiogpu.remote(num_cpus=1)):
        with pytest.raises(MisuseError, match=message):
            decorate(thing)
    with pytest.raises(MisuseError, match="not both"):
        aiogpu.remote(len, num_gpus=1)  # type: ignore[call-overload]
    assert isinstance(aiogpu.remote()(len), RemoteFunction)


# Functions are pickled by name if they can be imported, else by value.


def test_function_of_a_module_is_sent_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = documented._definition
    assert definition.reference() == FunctionName(__name__, "documented")
    assert load_function(definition.pickled().payload) is documented.__wrapped__
    assert definition.pickled() is definition.pickled()
    assert Definition(documented.__wrapped__).reference() == definition.reference()
    with monkeypatch.context() as reloaded:
        function = FunctionType(documented.__wrapped__.__code__, globals())
        reloaded.setattr(sys.modules[__name__], "documented", function)
        assert Definition(function).reference() is None, "workers may have the other"
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setattr(documented.__wrapped__, "__module__", name)
        assert Definition(documented.__wrapped__).reference() is None


def test_function_with_a_large_closure_is_warned_of_once() -> None:
    table = bytes(2 << 20)

    @aiogpu.remote
    def lookup(index: int) -> int:
        return table[index]

    @aiogpu.remote
    class Lookup:
        def at(self, index: int) -> int:
            return table[index]

    message = r"of which 2\.0 MiB are lookup\.__closure__\.table"
    with pytest.warns(AiogpuWarning, match=message) as caught:
        lookup._definition.pickled()
    lookup.options(num_cpus=2)._definition.pickled()
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(AiogpuWarning, match=r"are Lookup\.at\.__closure__\.table"):
        Lookup._definition.pickled()


# Pickling of remote functions and classes.


@pytest.mark.parametrize("thing", [documented, Counter], ids=["function", "class"])
def test_object_of_a_module_is_pickled_by_name_with_its_options(thing: Any) -> None:
    stream = pickle.dumps(thing)
    assert len(stream) < 700, "only the name is pickled"
    for copied in (pickle.loads(stream), pickle.loads(ForkingPickler.dumps(thing))):
        assert type(copied) is type(thing)
        assert copied.__wrapped__ is thing.__wrapped__
    with_options = thing.options(num_gpus=0.25, name="one")
    copied = pickle.loads(pickle.dumps(with_options))
    assert copied._options == with_options._options
    assert copied._definition is thing._definition
    assert vars(copied).get("_interface") is vars(thing).get("_interface")


def test_plain_class_becomes_remote_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may keep the plain class under its own name."""
    remote = aiogpu.remote(Plain)
    monkeypatch.setattr(sys.modules[__name__], "Plain", remote)
    stream = pickle.dumps(remote)
    monkeypatch.undo()
    copied = pickle.loads(stream)
    assert type(copied) is type(remote)
    assert copied.__wrapped__ is Plain


def local_things() -> list[Any]:
    @aiogpu.remote(priority=3)
    def inner() -> int:
        return 4

    @aiogpu.remote
    class Inner: ...

    return [inner, Inner, inner.options(num_cpus=2), Inner.options(num_cpus=2)]


@pytest.mark.parametrize("thing", local_things(), ids=repr)
def test_local_object_is_pickled_by_value_but_not_by_plain_pickle(thing: Any) -> None:
    """Plain pickle and multiprocessing look it up by name, and find none."""
    with pytest.raises((pickle.PicklingError, AttributeError), match=thing.__name__):
        ForkingPickler.dumps(thing)
    pickled = pickle.loads(cloudpickle.dumps(thing))
    for copied in (pickled, copy.copy(thing), copy.deepcopy(thing)):
        assert type(copied) is type(thing)
        assert copied.__name__ == thing.__name__
        assert copied._options == thing._options
    assert isinstance(thing, RemoteClass) or pickled.__wrapped__() == 4


# Calls.


async def test_unpicklable_function_can_be_called_later(engine: FakeEngine) -> None:
    state: dict[str, object] = {"lock": threading.Lock()}

    @aiogpu.remote
    def nested(*_: object) -> object:
        return state

    for _ in range(2):
        with pytest.raises(SerializationError, match=r"the function nested.*lock"):
            nested.remote()
    state.clear()
    nested.remote().cancel()
    with pytest.raises(SerializationError, match=r"arguments of nested\.remote"):
        nested.remote(threading.Lock())
    nested.remote().cancel()


# Arguments: aiogpu refuses the same calls as Python.

NAMES = "abcde"
KINDS = inspect.Parameter


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Draw a signature of a few parameters, with defaults where they are allowed."""
    kinds = sorted(
        draw(st.lists(st.sampled_from([*inspect._ParameterKind]), max_size=len(NAMES)))
    )
    parameters: list[inspect.Parameter] = []
    has_default = False
    for name, kind in zip(NAMES, kinds, strict=False):
        is_star = kind in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)
        if is_star and any(parameter.kind == kind for parameter in parameters):
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
    is_pickled=st.booleans(),
)
def test_arguments_are_checked_like_python_does(
    signature: inspect.Signature,
    args: tuple[None, ...],
    kwargs: dict[str, None],
    is_pickled: bool,
) -> None:
    parameters = Parameters("f", signature)
    if is_pickled:
        parameters = pickle.loads(pickle.dumps(parameters))
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(MisuseError, match=r"f\(.*was called with wrong arguments"):
            parameters.check(args, dict(kwargs))
    else:
        parameters.check(args, dict(kwargs))


def test_signatures_of_methods_lack_self_and_missing_ones_allow_all() -> None:
    def method(self: object, a: int) -> None: ...

    def all_by_position(*args: int) -> None: ...

    def none() -> None: ...

    functions: list[Callable[..., None]] = [method, all_by_position, none]
    texts = [str(without_self(s)) for s in map(signature_of, functions) if s]
    assert texts == ["(a: 'int') -> 'None'", "(*args: 'int') -> 'None'", "() -> 'None'"]
    parameters = Parameters("update", signature_of(dict.update))
    for checker in (parameters, pickle.loads(pickle.dumps(parameters))):
        checker.check((1, 2, 3), {"a": 1})
