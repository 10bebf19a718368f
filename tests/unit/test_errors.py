from __future__ import annotations

import builtins
import pickle

import cloudpickle
import pytest

from aiogpu import errors
from aiogpu.errors import (
    AiogpuError,
    OutOfMemoryError,
    RemoteTraceback,
    TaskError,
    WorkerDiedError,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
]
ERRORS = [
    kind
    for kind in KINDS
    if kind not in (AiogpuError, RemoteTraceback)
    if not issubclass(kind, Warning)
]
PLAIN = (BaseException, Exception, object)


def builtins_of(kind: type) -> set[type]:
    return {
        base
        for base in kind.__mro__
        if vars(builtins).get(base.__name__) is base and base not in PLAIN
    }


def test_the_tree_is_found():
    assert len(ERRORS) >= 15
    assert TaskError in ERRORS


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_ours_and_a_builtin_too(kind):
    assert issubclass(kind, AiogpuError)
    assert builtins_of(kind)


@pytest.mark.parametrize("kind", ERRORS)
def test_no_error_upsets_a_loop(kind):
    assert issubclass(kind, Exception)
    assert not issubclass(kind, StopIteration | StopAsyncIteration)


def test_a_remote_traceback_is_a_cause_and_no_error_of_ours():
    assert not issubclass(RemoteTraceback, AiogpuError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OptionError", ValueError),
        ("TaskTimeoutError", TimeoutError),
        ("MisuseError", TypeError),
        ("PreloadError", ImportError),
        ("ProtocolError", ConnectionError),
        ("InternalError", AssertionError),
    ],
)
def test_the_builtin_is_the_one_a_reader_expects(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_what_it_is_for(kind):
    assert kind.__doc__
    assert kind.__doc__.split("\n")[0].endswith(".")
    assert kind.__module__ == "aiogpu.errors"


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_pickling(kind, dumps):
    error = kind("what went wrong")
    error.add_note("a note")
    again = pickle.loads(dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "error",
    [
        TaskError("text", "mod.Kind", "Traceback ..."),
        WorkerDiedError("text", 4711, None, 9, ("one", "two")),
        WorkerDiedError("text", 4711, exitcode=3, cause="exit"),
        OutOfMemoryError("text", pid=4711, asked=1, used=3, limit=2),
    ],
)
def test_attributes_survive_pickling(error, protocol):
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == "text"
    assert vars(again) == vars(error)


def test_attributes_have_defaults():
    assert vars(TaskError("text")) == {"type_name": "", "remote_traceback": ""}
    assert vars(WorkerDiedError("text")) == {
        "pid": 0,
        "exitcode": None,
        "signal": None,
        "last_output": (),
        "cause": "",
    }


def test_a_subclass_survives_pickling_too():
    again = pickle.loads(pickle.dumps(OutOfMemory("text", "mod.Kind", "trace")))
    assert type(again) is OutOfMemory
    assert again.type_name == "mod.Kind"


class OutOfMemory(TaskError):
    pass


def test_a_remote_traceback_prints_as_a_block():
    assert str(RemoteTraceback("Traceback ...\n")) == '\n"""\nTraceback ...\n"""'


def test_the_warning_is_one_that_users_see_by_default():
    assert issubclass(errors.AiogpuWarning, UserWarning)
    assert not issubclass(errors.AiogpuWarning, AiogpuError)
