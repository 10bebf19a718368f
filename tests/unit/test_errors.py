"""The errors: each is one of aiogpu's and a built-in one, and arrives whole."""

from __future__ import annotations

import builtins
import linecache
import pickle

import cloudpickle
import pytest

from aiogpu import errors
from aiogpu.errors import AiogpuError, OutOfMemoryError, TaskError, WorkerDiedError
from aiogpu.serialization.exceptions import RemoteTraceback

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


def test_every_error_is_ours_and_a_builtin_and_upsets_no_loop():
    assert len(ERRORS) >= 15
    for kind in ERRORS:
        assert issubclass(kind, AiogpuError)
        assert builtins_of(kind), kind
        assert issubclass(kind, Exception)
        assert not issubclass(kind, StopIteration | StopAsyncIteration)
    assert not issubclass(RemoteTraceback, AiogpuError)
    assert issubclass(errors.AiogpuWarning, UserWarning), "shown by default"
    assert not issubclass(errors.AiogpuWarning, AiogpuError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OptionError", ValueError),
        ("TaskTimeoutError", TimeoutError),
        ("MisuseError", TypeError),
        ("PreloadError", ImportError),
        ("QueueEmptyError", LookupError),
        ("InternalError", AssertionError),
    ],
)
def test_the_builtin_is_the_one_a_reader_expects(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_pickling_with_its_notes(kind):
    assert kind.__doc__.split("\n")[0].endswith(".")
    error = kind("what went wrong")
    error.add_note("a note")
    for dumps in (pickle.dumps, cloudpickle.dumps):
        again = pickle.loads(dumps(error))
        assert type(again) is kind
        assert (str(again), again.args) == (str(error), error.args)
        assert again.__notes__ == ["a note"]


class OutOfMemory(TaskError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        TaskError("text", "mod.Kind", "Traceback ..."),
        OutOfMemory("text", "mod.Kind", "trace"),
        WorkerDiedError("text", 4711, None, 9, ("one", "two")),
        WorkerDiedError("text", 4711, exitcode=3, cause="exit"),
        OutOfMemoryError("text", pid=4711, asked=1, used=3, limit=2),
    ],
    ids=repr,
)
def test_attributes_survive_pickling(error):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
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


def test_a_remote_traceback_prints_as_a_block():
    assert str(RemoteTraceback("Traceback ...\n")) == '\n"""\nTraceback ...\n"""'


def test_a_remote_traceback_shows_the_lines_that_this_process_knows(monkeypatch):
    """A notebook's cells are no files: the worker has no source lines of them."""
    cell, other = "<cell 1>", "<cell 2>"
    lines = ["first\n", "    fails()  # here\n"]
    monkeypatch.setitem(linecache.cache, cell, (9, None, lines, cell))
    frames = [
        f'  File "{cell}", line 2, in f\n',
        f'  File "{other}", line 2, in g\n',
        f'  File "{cell}", line 9, in h\n',
        '  File "a.py", line 1, in k\n    known()\n    ^^^^^^^\n',
    ]
    text = "".join(["Traceback (most recent call last):\n", *frames, "ValueError: x\n"])
    frames[0] += "    fails()  # here\n"
    shown = "".join(
        ["Traceback (most recent call last):\n", *frames, "ValueError: x\n"]
    )
    assert str(RemoteTraceback(text)) == f'\n"""\n{shown}"""'
