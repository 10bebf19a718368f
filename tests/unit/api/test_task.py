"""`@remote` as an object: what it takes, what it refuses, how it travels."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import cloudpickle
import pytest

import aiogpu
from aiogpu.api.actors.actor import RemoteClass
from aiogpu.api.node import node_of
from aiogpu.api.remote_function import Definition, FunctionName, RemoteFunction
from aiogpu.api.session import Session
from aiogpu.errors import MisuseError, OptionError
from aiogpu.serialization.serializer import load_function, load_retried
from tests.unit.api.paper_engine import PaperEngine

T = TypeVar("T")


@aiogpu.remote
def documented(x: int) -> int:
    """What it does."""
    return x + 1


def test_it_looks_like_its_function() -> None:
    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it does."
    assert documented.__module__ == __name__
    assert repr(documented) == f"<RemoteFunction {__name__}.documented>"
    assert documented.__wrapped__(1) == 2


def test_calling_it_directly_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"await documented\.remote"):
        documented(1)  # type: ignore[operator]


class Callable_:
    def __call__(self) -> str:
        return "called"

    def method(self) -> str:
        return "method"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: 1, "<lambda>"),
        (time.sleep, "sleep"),
        (functools.partial(int, "7"), "partial"),
        (Callable_(), "Callable_"),
        (Callable_().method, "method"),
    ],
)
def test_whatever_can_be_called_can_be_remote(function: Any, name: str) -> None:
    remote = aiogpu.remote(function)
    assert remote.__name__ == name
    assert callable(load_function(Definition(function).sent().payload))


class Box(Generic[T]):
    def open(self) -> int:
        return 5


async def test_a_class_with_its_parameter_is_that_class(
    inline_node: aiogpu.types.Node,
) -> None:
    """`list[int]` and the like are called as classes are, and are none."""
    boxes = aiogpu.remote(Box[int])
    assert isinstance(boxes, RemoteClass)
    assert aiogpu.remote(max_restarts=1)(Box[int])._options.max_restarts == 1
    assert await boxes.remote().open.remote() == 5


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("thing", "word"),
    [
        (documented, "already"),
        (5, "5"),
        ("f", "'f'"),
    ],
)
def test_what_cannot_be_remote(thing: Any, word: str) -> None:
    with pytest.raises(MisuseError, match=word):
        aiogpu.remote(thing)
    with pytest.raises(MisuseError, match=word):
        aiogpu.remote(num_cpus=1)(thing)


def test_a_function_and_options_at_once() -> None:
    with pytest.raises(MisuseError, match="not both"):
        aiogpu.remote(generator, num_gpus=1)  # type: ignore[call-overload]
    assert isinstance(aiogpu.remote()(len), RemoteFunction)


def test_options_make_another_and_share_the_pickled_function() -> None:
    other = documented.options(num_gpus=0.5, name="other")
    assert other is not documented
    assert other._definition is documented._definition
    assert documented._options.num_gpus == 0
    spec = other._options.spec("documented", 1)
    assert (spec.name, spec.max_calls) == ("other", 1)
    assert other.options(num_gpus=0)._options.spec("x", 1).max_calls == 0
    assert other.options(max_calls=0)._options.spec("x", 1).max_calls == 0
    with pytest.raises(OptionError, match="num_gpu "):
        documented.options(num_gpu=1)  # type: ignore[call-arg]


def test_a_function_of_a_module_goes_by_name() -> None:
    definition = documented._definition
    assert definition.reference() == FunctionName(__name__, "documented")
    assert load_function(definition.sent().payload) is documented.__wrapped__
    assert definition.sent() is definition.sent()


def test_what_has_no_name_to_import_goes_by_value() -> None:
    def nested() -> int:
        return 3

    definition = Definition(nested)
    assert definition.reference() is None
    copy = load_function(definition.sent().payload)
    assert copy is not nested
    assert copy() == 3


def test_a_redefinition_goes_by_value() -> None:
    first = documented._definition
    assert first.reference() is not None
    second = Definition(documented.__wrapped__)
    assert second.reference() is None, "the name means the first"


def test_a_module_that_is_sent_by_value() -> None:
    import tests.unit.api.paper_engine as module

    definition = Definition(module.func)
    assert definition.reference() == FunctionName("tests.unit.api.paper_engine", "func")
    cloudpickle.register_pickle_by_value(module)
    try:
        assert definition.reference() is None
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_it_travels_by_name_with_its_options() -> None:
    copy = pickle.loads(pickle.dumps(documented.options(num_gpus=0.25)))
    assert copy._definition is documented._definition
    assert copy._options.num_gpus == 2500


def test_it_travels_by_value_where_it_must() -> None:
    @aiogpu.remote(priority=3)
    def nested() -> int:
        return 4

    copy = pickle.loads(cloudpickle.dumps(nested))
    assert copy.__wrapped__() == 4
    assert copy._options.priority == 3


def test_one_that_calls_itself_can_be_pickled() -> None:
    @aiogpu.remote
    def countdown(n: int) -> object:
        return countdown if n == 0 else n

    copy = load_function(countdown._definition.sent().payload)
    assert isinstance(copy(0), RemoteFunction)


def test_one_that_takes_much_with_it_is_told_once() -> None:
    table = bytes(2 << 20)

    @aiogpu.remote
    def lookup(index: int) -> int:
        return table[index]

    with pytest.warns(
        aiogpu.errors.AiogpuWarning,
        match=r"of which 2\.0 MiB are lookup\.__closure__\.table",
    ) as caught:
        lookup._definition.sent()
    lookup.options(num_cpus=2)._definition.sent()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_class_that_takes_much_with_it_is_told() -> None:
    table = bytes(2 << 20)

    @aiogpu.remote
    class Lookup:
        def at(self, index: int) -> int:
            return table[index]

    with pytest.warns(
        aiogpu.errors.AiogpuWarning, match=r"are Lookup\.at\.__closure__\.table"
    ):
        Lookup._definition.sent()


@pytest.fixture
async def engine() -> AsyncIterator[PaperEngine]:
    """The running loop's node, of paper."""
    engine = PaperEngine()
    session = Session(engine, asyncio.get_running_loop())  # type: ignore[arg-type]
    session.start_opening()
    async with node_of(session):
        yield engine


async def test_all_calls_share_one_site(engine: PaperEngine) -> None:
    @aiogpu.remote(num_gpus=0.5, runtime_env={"env_vars": {"A": "1"}})
    async def nested(x: int) -> int:
        return x

    assert nested._func is None
    handle = nested.remote(1)
    func = nested._func
    assert func is not None
    nested.remote(2).cancel()
    assert nested._func is func
    assert (handle.task_name, func.spec.name) == ("nested", "nested")
    assert func.resources == {"CPU": 1.0, "GPU": 0.5}
    assert (func.environ, func.is_coroutine) == ({"A": "1"}, True)
    handle.cancel()


async def test_options_have_a_site_of_their_own_and_one_function(
    engine: PaperEngine,
) -> None:
    @aiogpu.remote
    def nested() -> None: ...

    other = nested.options(name="other", retry_exceptions=[OSError])
    handles = [nested.remote(), other.remote()]
    assert [handle.task_name for handle in handles] == ["nested", "other"]
    one, two = nested._func, other._func
    assert one is not None
    assert two is not None
    assert one.id != two.id
    assert one.function is two.function
    assert (load_retried(one.retried), load_retried(two.retried)) == (False, (OSError,))
    for handle in handles:
        handle.cancel()


async def test_one_that_cannot_be_pickled_yet_may_be_called_later(
    engine: PaperEngine,
) -> None:
    """[B39]"""
    held: dict[str, object] = {"lock": threading.Lock()}

    @aiogpu.remote
    def nested(*_: object) -> object:
        return held

    for _ in range(2):
        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"the function nested.*lock"
        ):
            nested.remote()
    held.clear()
    nested.remote().cancel()
    with pytest.raises(
        aiogpu.errors.SerializationError, match=r"arguments of nested\.remote"
    ):
        nested.remote(threading.Lock())
    nested.remote().cancel()


def test_without_a_loop_it_stays_usable() -> None:
    @aiogpu.remote
    def nested() -> None: ...

    with pytest.raises(aiogpu.NoLoopError):
        nested.remote()

    async def main() -> None:
        engine = PaperEngine()
        session = Session(engine, asyncio.get_running_loop())  # type: ignore[arg-type]
        session.start_opening()
        async with node_of(session):
            nested.remote().cancel()
        assert "submit nested" in engine.story

    asyncio.run(main())


def test_globals_of_main_go_as_they_are_at_the_first_call() -> None:
    source = "def scaled(number): return SCALE * number"
    program: dict[str, Any] = {"__name__": "__main__", "SCALE": 2}
    exec(source, program)
    definition = Definition(program["scaled"])
    assert load_function(definition.sent().payload)(1) == 2
    program["SCALE"] = 5
    assert load_function(definition.sent().payload)(1) == 2
    exec(source, program)
    assert load_function(Definition(program["scaled"]).sent().payload)(1) == 5


def test_what_is_defined_in_main_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setattr(documented.__wrapped__, "__module__", name)
        assert Definition(documented.__wrapped__).reference() is None


@pytest.mark.parametrize(
    ("function", "is_coroutine"),
    [
        (documented.__wrapped__, False),
        (len, False),
        (asyncio.sleep, True),
        (functools.partial(asyncio.sleep, 1), True),
    ],
)
def test_a_coroutine_is_known_as_one(function: Any, is_coroutine: bool) -> None:
    assert Definition(function).is_coroutine is is_coroutine
