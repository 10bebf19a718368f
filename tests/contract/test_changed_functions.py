"""Functions that change: an executor sees the change, `@remote` says that not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import pytest

from aiogpu import errors, sync

pytestmark = pytest.mark.usefixtures("no_leaks")

LIMIT = 1
TABLE: Final = {"limit": 1}


@pytest.fixture
def node(address: str) -> Iterator[None]:
    with sync.init(address=address, num_cpus=2):
        yield


@pytest.fixture(autouse=True)
def reset() -> None:
    global LIMIT
    LIMIT, TABLE["limit"] = 1, 1


def variable() -> tuple[Callable[[], int], Callable[[], None]]:
    limit = 1

    def change() -> None:
        nonlocal limit
        limit = 2

    return lambda: limit, change


def list_in_a_variable() -> tuple[Callable[[], int], Callable[[], None]]:
    limits = [1]
    return lambda: limits[-1], lambda: limits.append(2)


def global_name() -> tuple[Callable[[], int], Callable[[], None]]:
    def change() -> None:
        global LIMIT
        LIMIT = 2

    return lambda: LIMIT, change


def global_of_a_helper() -> tuple[Callable[[], int], Callable[[], None]]:
    def help_out() -> int:
        return (lambda: LIMIT)()

    def change() -> None:
        global LIMIT
        LIMIT = 2

    return lambda: math.floor(help_out()), change


def global_dict() -> tuple[Callable[[], int], Callable[[], None]]:
    return lambda: TABLE["limit"], lambda: TABLE.update(limit=2)


def default() -> tuple[Callable[[], int], Callable[[], None]]:
    def tell(limit: int = 1) -> int:
        return limit

    def change() -> None:
        tell.__defaults__ = (2,)

    return tell, change


def list_as_a_default() -> tuple[Callable[[], int], Callable[[], None]]:
    def tell(*, limits: list[int] = [1]) -> int:  # noqa: B006
        return limits[-1]

    return tell, lambda: tell.__kwdefaults__["limits"].append(2)


def attribute() -> tuple[Callable[[], int], Callable[[], None]]:
    def tell() -> int:
        return tell.limit  # type: ignore[attr-defined, no-any-return]

    tell.limit = 1  # type: ignore[attr-defined]
    return tell, lambda: setattr(tell, "limit", 2)


def code() -> tuple[Callable[[], int], Callable[[], None]]:
    def tell() -> int:
        return 1

    def tell_more() -> int:
        return 2

    def change() -> None:
        assert isinstance(tell, FunctionType)
        tell.__code__ = tell_more.__code__

    return tell, change


def class_of_the_program() -> tuple[Callable[[], int], Callable[[], None]]:
    class Settings:
        limit = 1

    return lambda: Settings.limit, lambda: setattr(Settings, "limit", 2)


KINDS: Final = {
    maker.__name__: maker
    for maker in (
        *(variable, list_in_a_variable, global_name, global_of_a_helper, global_dict),
        *(default, list_as_a_default, attribute, code, class_of_the_program),
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_executor_sees_what_has_changed(node: None, kind: str) -> None:
    function, change = KINDS[kind]()
    with sync.Executor() as executor:
        assert executor.submit(function).result(60) == 1
        change()
        later = [executor.submit(function), executor.submit(function)]
        assert sync.get(later) == [2, 2]
        assert list(executor.map(lambda _: function(), range(2))) == [2, 2]


@pytest.mark.parametrize("address", ["local"])
def test_an_executor_sees_an_actor_that_a_function_holds(node: None) -> None:
    @sync.remote
    class Teller:
        def __init__(self, word: str) -> None:
            self._word = word

        def tell(self) -> str:
            return self._word

    teller = Teller.options(num_cpus=0).remote("first")

    def ask() -> Any:
        return sync.get(teller.tell.remote())

    with sync.Executor() as executor:
        assert executor.submit(ask).result(60) == "first"
        assert executor.submit(ask).result(60) == "first"
        teller = Teller.options(num_cpus=0).remote("second")
        assert executor.submit(ask).result(60) == "second"


@pytest.mark.parametrize("address", ["local"])
def test_a_remote_function_warns_once_that_it_keeps_the_old_object(node: None) -> None:
    limit = 1000

    @sync.remote
    def tell() -> int:
        return limit

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert tell.remote().result(60) == 1000
        limit = int("1000")
        assert tell.remote().result(60) == 1000
        assert not warned  # an equal number
        limit = 2
        assert tell.remote().result(60) == 1000
        assert tell.remote().result(60) == 1000
    [warning] = warned
    assert issubclass(warning.category, errors.AiogpuWarning)
    assert str(warning.message).startswith(
        "tell.__closure__.limit has changed since the first .remote() of tell"
    )
    assert warning.filename == __file__
    assert sync.remote(tell.__wrapped__).remote().result(60) == 2


@pytest.mark.parametrize("address", ["local"])
def test_functions_of_modules_are_sent_by_name(node: None) -> None:
    """Also if two executors and a decorator send the same one."""
    with sync.Executor() as one, sync.Executor(num_cpus=1) as other:
        for executor in (one, other, one):
            assert executor.submit(math.factorial, 3).result(60) == 6
            # By name: in a worker the module has its own global.
            assert executor.submit(tell_limit).result(60) == 1
        global LIMIT
        LIMIT = 2
        assert other.submit(tell_limit).result(60) == 1
        assert sync.remote(tell_limit).remote().result(60) == 1


def tell_limit() -> int:
    return LIMIT
