"""A worker says itself whether a failure is to be tried again."""

from __future__ import annotations

import pytest

from aiogpu.errors import TaskError
from aiogpu.serialization.serializer import Retried, dump_retried
from aiogpu.worker.invoke import RetryRules

UNLOADABLE = b"cno_such_module\nNoError\n."


def wants(retried: Retried, error: BaseException, *told: type[BaseException]) -> bool:
    return RetryRules().wants("train", dump_retried(retried), error, *told)


def test_by_the_error_or_by_what_is_told_of_it() -> None:
    assert wants((OSError,), ConnectionError())
    assert not wants((OSError,), KeyError())
    assert wants(True, KeyboardInterrupt())
    assert wants((TaskError,), StopIteration(), TaskError)
    assert wants((Exception,), SystemExit(), TaskError)
    assert not wants((OSError,), SystemExit(), TaskError)


class Deceiver(type):
    """A class of exceptions that cannot be asked for its instances."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise SystemExit("do not ask")


class Odd(Exception, metaclass=Deceiver):
    """One of them."""


@pytest.mark.parametrize(
    ("retried", "why"),
    [
        (UNLOADABLE, "ModuleNotFoundError: No module named"),
        (dump_retried((Odd,)), "SystemExit: do not ask"),
    ],
)
def test_what_cannot_be_asked_is_told_once(
    retried: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    retrying = RetryRules()
    for _ in range(3):
        assert not retrying.wants("train", retried, KeyError())
    told = capsys.readouterr().err
    assert told.count("train is not tried again") == 1
    assert why in told
    retrying.forget()
    assert not retrying.wants("train", retried, KeyError())
    assert "train is not tried again" in capsys.readouterr().err
