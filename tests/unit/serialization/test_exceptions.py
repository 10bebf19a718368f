"""Exceptions that travel from a worker to the program, and retries."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import threading
import traceback
from dataclasses import dataclass

import pytest

from aiogpu.errors import (
    ActorDiedError,
    DeserializationError,
    NodeClosedError,
    ObjectMemoryError,
    SerializationError,
    TaskError,
    WorkerDiedError,
)
from aiogpu.serialization.exceptions import (
    DIED,
    RAISED,
    STOPPED,
    UNREADABLE,
    UNSENDABLE,
    ChunkOutcome,
    RemoteTraceback,
    error_of,
    pack_failure,
    pack_own_error,
    unpack_failure,
)
from aiogpu.serialization.serializer import (
    RETRY_ALL,
    RETRY_NONE,
    dump_result,
    dump_retried,
    is_retried,
    load_result,
    load_retried,
)
from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.messages import Failed
from tests.unit.serialization.payloads import Mute

NO_FRAME = "/no/such/folder/"


def raised(error: BaseException) -> BaseException:
    """Return the exception with a traceback, as the code of a task raises it."""
    try:
        raise error  # the user's own line
    except BaseException as caught:
        return caught


def travel(error: BaseException, kind: str = RAISED) -> Exception:
    """Pack an exception, send it as bytes, and unpack it."""
    failed = pack_failure(7, kind, raised(error), NO_FRAME)
    (arrived,) = FrameReader().feed(encode(failed))
    assert arrived == failed
    return unpack_failure(arrived, "work")


def arrives_as_text(error: BaseException, text: str = "") -> TaskError:
    arrived = travel(error)
    assert type(arrived) is TaskError
    assert text in str(arrived)
    assert type(arrived.__cause__) is RemoteTraceback
    assert "the user's own line" in str(arrived.__cause__)
    assert arrived.remote_traceback in str(arrived.__cause__)
    return arrived


class Quota(Exception):
    def __init__(self, limit):
        super().__init__(limit)
        self.limit = limit


class Pair(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} of {second}")


class Named(Exception):
    """An exception that makes its text from its argument."""

    def __init__(self, name):
        super().__init__(f"no {name}")
        self.name = name


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code):
        self.code = code


@dataclass(frozen=True)
class FrozenData(Exception):
    code: int


class Missing(OSError):
    def __init__(self, path):
        super().__init__(errno.ENOENT, "no such file", path)


class Undecodable(UnicodeDecodeError):
    def __init__(self, data):
        super().__init__("utf-8", data, 0, 1, "invalid")


class Unimportable(ImportError):
    def __init__(self, module):
        super().__init__(f"no {module}", name=module)


class Several(ExceptionGroup):
    def __new__(cls, *codes):
        return super().__new__(cls, "several", [Pair(code, 0) for code in codes])

    def __init__(self, *codes):
        self.codes = codes


# Exceptions that keep their type


class Local(Exception):
    """An exception that is pickled by value."""

    def __str__(self):
        return "local text"


Local.__qualname__ = "nowhere.Local"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("file \udcff.txt"),
        KeyError("k"),
        OSError(2, "No such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        Quota(3),
        concurrent.futures.CancelledError(),
        asyncio.QueueEmpty(),
        TaskError("inner", "mod.Kind", "trace"),
        MemoryError(),
        ModuleNotFoundError("m", name="m", path="p"),
    ],
)
def test_exception_arrives_with_its_own_type(error):
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
    assert type(arrived.__cause__) is RemoteTraceback


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (Pair("a", "b"), ()),
        (Named("x"), ("name",)),
        (Slotted(3), ("code",)),
        (FrozenData(3), ("code",)),
        (Missing("a.txt"), ("errno", "filename")),
        (Undecodable(b"\xff"), ("object", "start")),
        (Unimportable("m"), ("name",)),
    ],
)
def test_exception_with_its_own_constructor_arrives(error, attributes):
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)
    for name in attributes:
        assert getattr(arrived, name) == getattr(error, name)


def test_exception_group_arrives_with_its_exceptions():
    arrived = travel(Several(1, 2))
    assert type(arrived) is Several
    assert arrived.codes == (1, 2)
    assert [str(error) for error in arrived.exceptions] == ["1 of 0", "2 of 0"]
    arrived = travel(ExceptionGroup("two", [ValueError("a"), Quota(2)]))
    assert type(arrived) is ExceptionGroup
    assert [type(error) for error in arrived.exceptions] == [ValueError, Quota]
    assert "Quota: 2" in str(arrived.__cause__)


def test_remote_traceback_contains_notes_and_causes():
    error = ValueError("second")
    error.add_note("at step 3")
    error.__cause__ = KeyError("first")
    arrived = travel(error)
    assert arrived.__notes__ == ["at step 3"]
    assert type(arrived.__cause__) is RemoteTraceback
    for text in ("at step 3", "KeyError: 'first'", "direct cause"):
        assert text in str(arrived.__cause__)
    printed = "".join(traceback.format_exception(arrived))
    assert "the user's own line" in printed
    assert printed.rstrip().endswith("ValueError: second\nat step 3")


# Exceptions that arrive as text


class Stray(BaseException):
    pass


class StrayGroup(BaseExceptionGroup):
    pass


class Both(Exception, KeyboardInterrupt):
    pass


class Cancelled(RuntimeError, asyncio.CancelledError):
    pass


class End(StopIteration, ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StopIteration(3), "StopIteration: 3"),
        (StopAsyncIteration(), "StopAsyncIteration"),
        (SystemExit("\ud800"), "SystemExit: \ud800"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
        (Stray("no"), f"{__name__}.Stray: no"),
        (StrayGroup("two", [Stray("a")]), f"{__name__}.StrayGroup: two (1 sub-excep"),
        (Both("no"), f"{__name__}.Both: no"),
        (Cancelled("no"), f"{__name__}.Cancelled: no"),
        (End("no"), f"{__name__}.End: no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exception_that_would_disturb_a_loop_arrives_as_text(error, message):
    """Built-in exceptions are named without their module."""
    arrived = arrives_as_text(error)
    start = "work failed with an exception that cannot be raised here: "
    assert str(arrived).startswith(start + message)
    assert arrived.type_name == message.partition(":")[0]


class Changing(Exception):
    """An exception that unpickles as another object."""

    def __init__(self, make, *args):
        super().__init__(make, *args)
        self.made = make, args

    def __reduce__(self):
        return self.made


def leave(kind):
    raise kind


class Unready(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class InterruptingReducer(Exception):
    def __reduce__(self):
        raise KeyboardInterrupt


class Liar:
    """An object that claims to be an exception."""

    __class__ = ValueError


@pytest.mark.parametrize(
    "error",
    [
        Changing(leave, SystemExit),
        Changing(leave, KeyboardInterrupt),
        Changing(str, "no exception"),
        Changing(Liar),
        Changing(SystemExit, 3),
        Changing(asyncio.CancelledError),
        Changing(type, "Kind", (), {}),
        Unready("no"),
        InterruptingReducer("no"),
    ],
)
def test_exception_that_does_not_unpickle_as_one_arrives_as_text(error):
    arrived = arrives_as_text(error, str(error))
    assert arrived.type_name == f"{__name__}.{type(error).__name__}"


def test_exception_that_cannot_be_pickled_says_why():
    error = Quota({"lock": threading.Lock()})
    assert str(travel(error)) == (
        f"work failed with an exception that cannot be raised here: {__name__}.Quota: "
        f"{error} (it cannot be pickled: error.limit['lock'] (a lock): TypeError: "
        f"cannot pickle '_thread.lock' object)"
    )
    assert str(travel(Unready("no"))).endswith(
        "Unready: no (it cannot be pickled: error (a Unready): SystemExit: 3)"
    )


class Interrupting(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


@pytest.mark.parametrize("kind", [Mute, Interrupting])
def test_exception_without_a_text_still_arrives(kind):
    failed = pack_failure(7, RAISED, raised(kind("x")), NO_FRAME)
    assert failed.message.startswith("<its text is not available: ")
    assert "the user's own line" in failed.traceback
    assert type(unpack_failure(failed, "work")) is kind


def test_missing_traceback_is_mentioned():
    class Untraceable(Exception):
        @property
        def __traceback__(self):
            raise SystemExit(3)

    failed = pack_failure(7, RAISED, Untraceable("no"), NO_FRAME)
    assert failed.traceback == "<its traceback is not available: SystemExit>"
    assert type(unpack_failure(failed, "work")).__name__ == "Untraceable"


# Messages


@pytest.mark.parametrize(
    ("kind", "error", "arrives", "text"),
    [
        (
            *(STOPPED, ValueError("interrupted"), TaskError),
            "work failed with an exception that cannot be raised here: ValueError: int",
        ),
        (
            *(UNREADABLE, ModuleNotFoundError("no m"), DeserializationError),
            "work could not start: the worker cannot load its function or arguments: "
            "ModuleNotFoundError: no m",
        ),
        (
            *(UNSENDABLE, SerializationError("it is a lock"), SerializationError),
            "work ran, but it is a lock",
        ),
        (
            *(UNSENDABLE, SystemExit(6), SerializationError),
            "work ran, but its result cannot be pickled: SystemExit: 6.",
        ),
        (
            *(UNSENDABLE, KeyboardInterrupt(), SerializationError),
            "work ran, but its result cannot be pickled: KeyboardInterrupt.",
        ),
        (
            *(UNSENDABLE, ObjectMemoryError("it has no room"), ObjectMemoryError),
            "work ran, but it has no room",
        ),
    ],
)
def test_message_says_how_the_task_failed(kind, error, arrives, text):
    assert pack_failure(7, kind, error, NO_FRAME).payload is None
    arrived = travel(error, kind)
    assert type(arrived) is arrives
    assert str(arrived).startswith(text)
    assert "the user's own line" in str(arrived.__cause__)


def failed_constructor(error, kind=RAISED):
    failed = pack_failure(7, kind, error, "nothing")
    return failed._replace(kind=f"{DIED}:{kind}:Counter: a")


def test_constructor_error_is_the_cause_of_an_actors_death():
    died = unpack_failure(failed_constructor(KeyError("x")), "Counter.add")
    assert type(died) is ActorDiedError
    assert died.actor == "Counter: a"
    assert str(died) == "Counter: a is dead: its constructor raised KeyError: 'x'"
    assert type(died.__cause__) is KeyError
    assert type(died.__cause__.__cause__) is RemoteTraceback
    died = unpack_failure(
        failed_constructor(ImportError("no"), UNREADABLE), "Counter.add"
    )
    assert type(died.__cause__) is DeserializationError


def test_failure_can_be_rebuilt_for_another_task():
    failed = Failed(7, RAISED, "Kind", "why", "trace", b"x", True)
    assert failed.why == (RAISED, "Kind", "why", "trace", b"x")
    assert Failed(7, *failed.why) == failed._replace(is_retried=False)


def test_error_that_is_its_message_is_packed_once() -> None:
    """A node may tell a million tasks the same."""
    first, second = (pack_own_error(NodeClosedError("closed")) for _ in range(2))
    assert first is second
    arrived = unpack_failure(first, "add")
    assert (type(arrived), str(arrived)) == (NodeClosedError, "closed")


def test_error_of_the_node_keeps_its_cause() -> None:
    error = ActorDiedError("it is dead", "Counter")
    error.__cause__ = WorkerDiedError("killed", pid=3)
    arrived = unpack_failure(Failed(*pack_own_error(error)), "add")
    assert type(arrived) is ActorDiedError
    assert str(arrived) == "it is dead"
    assert type(arrived.__cause__) is WorkerDiedError
    assert str(arrived.__cause__) == str(error.__cause__)


@pytest.mark.parametrize("cause", [None, KeyboardInterrupt()])
def test_error_of_the_node_without_a_sendable_cause_has_a_remote_traceback(
    cause: BaseException | None,
) -> None:
    error = ActorDiedError("it is dead", "Counter")
    error.__cause__ = cause
    arrived = unpack_failure(pack_own_error(error), "add")
    assert str(arrived) == "it is dead"
    assert isinstance(arrived.__cause__, RemoteTraceback)


def test_error_of_an_outcome_is_an_exception() -> None:
    """Either a failure that was sent, or the exception object of this process."""
    own = LookupError("here")
    assert error_of(own, "task") is own
    raised = error_of(pack_failure(1, RAISED, ValueError("there"), ""), "task")
    assert isinstance(raised, ValueError)
    assert str(raised) == "there"


# Tracebacks


def worker_frame(file_name: str, function, depth: int = 1):
    """Call a function from frames of a file that does not exist."""
    source = f"def enter(function, depth):\n{' ' * 4}" + (
        "return enter(function, depth - 1) if depth > 1 else function()\n"
    )
    names: dict[str, object] = {}
    exec(compile(source, file_name, "exec"), names)
    return names["enter"](function, depth)


def user_code():
    raise ValueError("why")  # in the user's file


def test_traceback_starts_at_the_users_frames():
    def own():
        worker_frame("/site/aiogpu/worker/execute.py", user_code, depth=3)

    def callback():
        worker_frame("/home/user/aiogpu/worker/tool.py", user_code)

    def trace(function, skip):
        try:
            function()
        except ValueError as error:
            # The first frames belong to the test, not to the worker.
            error.__traceback__ = error.__traceback__.tb_next.tb_next.tb_next
            return pack_failure(7, RAISED, error, skip).traceback
        raise AssertionError

    text = trace(own, "/aiogpu/worker/")
    assert "execute.py" not in text
    assert "in the user's file" in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: why\n")
    assert trace(own, NO_FRAME).count("execute.py") == 3
    assert "tool.py" in trace(callback, "/site/")


# Chunks of a map, and retries


LOCK = threading.Lock()


def test_results_before_an_unpicklable_one_arrive():
    outcome = load_result(dump_result(ChunkOutcome([1, [2], LOCK, 4], 0.5, None)))
    assert (outcome.values, outcome.seconds) == ([1, [2]], 0.5)
    _, kind, _, message, *_ = outcome.failure
    assert kind == UNSENDABLE
    assert "cannot be pickled: result (a lock)" in message
    picklable = ChunkOutcome([1], 0.5, (LOCK,))
    with pytest.raises(SerializationError, match="lock"):
        dump_result(picklable)


@pytest.mark.parametrize(
    ("wanted", "error", "expected"),
    [
        (False, ValueError(), False),
        (True, ValueError(), True),
        ((OSError,), ConnectionError(), True),
        ((OSError, KeyError), KeyError(), True),
        ((OSError,), ValueError(), False),
        ((), ValueError(), False),
    ],
)
def test_wanted_exceptions_are_retried(wanted, error, expected):
    loaded = load_retried(dump_retried(wanted))
    assert loaded == wanted
    assert is_retried(loaded, error) is expected


def test_common_retry_options_are_short_and_an_unpicklable_class_is_named():
    assert dump_retried(False) == RETRY_NONE == b""
    assert dump_retried(True) == RETRY_ALL
    kind = type("Locked", (Exception,), {"lock": threading.Lock()})
    with pytest.raises(SerializationError, match="the option retry_exceptions"):
        dump_retried((kind,))
