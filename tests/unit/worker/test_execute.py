"""One task, chunk or stream at a time: how it may end, and what is answered."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from aiogpu.errors import (
    GpuOutOfMemoryError,
    NodeClosedError,
    SerializationError,
    TaskError,
)
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    UNREADABLE,
    UNSENDABLE,
    ChunkOutcome,
    unpack_failure,
)
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.serializer import (
    Retried,
    dump_arguments,
    dump_function,
    dump_reference,
    dump_result,
    dump_retried,
    load_function,
    load_result,
)
from aiogpu.wire.messages import Define, Demand, Done, Exit, Failed, Items, Message, Run
from aiogpu.worker import chunk
from aiogpu.worker.actors import ThreadWindow
from aiogpu.worker.chunk import CHUNKED, Chunk, Sent, method_of
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor, MainThreadWindow
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import (
    RetryRules,
    StreamSender,
    UnsendableError,
    let_go,
    send_all,
    send_all_async,
)
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.conftest import DriverEnd, Unmoved


class Runner:
    """An executor with one function."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.interrupts = executor.interrupts

    def define(
        self,
        payload: bytes,
        func: int = 1,
        function: int = 1,
        retried: Retried = False,
    ) -> None:
        resources = {"GPU": 0.5, "CPU": float(func)}
        known = Define(
            func, function, "train", resources, payload, dump_retried(retried)
        )
        self.executor.define(known)

    def knows(self, function: Callable[..., object]) -> None:
        self.define(dump_function("train", function))

    def run(self, *args: object, func: int = 1) -> Done | Failed:
        answer = self.executor.run(
            Run(7, func, dump_arguments("train", args, {}), False)
        )
        assert self.interrupts.entered == 0
        return answer

    def fail(self, *args: object) -> Failed:
        answer = self.run(*args)
        assert isinstance(answer, Failed)
        assert answer.task == 7
        return answer


@pytest.fixture
def runner(executor: Executor) -> Runner:
    return Runner(executor)


def value(answer: Done | Failed) -> Any:
    assert isinstance(answer, Done), answer
    return load_result(answer.payload)


@pytest.mark.usefixtures("context")
def test_a_function_is_loaded_once_and_shared_by_its_sites(runner: Runner) -> None:
    runner.define(dump_reference("os", "getpid"), 1, 9)
    runner.define(b"", 2, 9)
    first = runner.executor._functions
    assert first == {}, "not before it is needed"
    value(runner.run())
    (loaded,) = runner.executor._functions.values()
    assert value(runner.run(func=2)) == os.getpid()
    assert runner.executor._functions == {9: loaded}


def seen_while_loading() -> Callable[[], list[bool]]:
    """A function that tells who was loading when it was unpickled."""
    seen: list[bool] = []
    for look in (lambda: seen.append(current.is_loading),) * 2:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        look()
    return lambda: [*seen, current.is_loading]


class Unloaded:
    """A function that is not there before it is unpickled."""

    def __call__(self) -> None:
        raise AssertionError

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        return seen_while_loading, ()


@pytest.mark.usefixtures("context")
def test_only_the_thread_that_loads_a_function_is_loading(runner: Runner) -> None:
    runner.knows(Unloaded())
    assert value(runner.run()) == [False, True, False, True, False]


def is_loading() -> bool:
    return current.is_loading


class Seen:
    """An argument that tells whether it is loading while it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        return is_loading, ()


class Broken:
    """An argument that cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return int, ("none",)


@pytest.mark.usefixtures("context")
def test_who_unpickles_arguments_is_loading_until_the_call(runner: Runner) -> None:
    runner.knows(lambda *given: [*given, current.is_loading])
    assert value(runner.run(Seen())) == [True, False]
    assert type(runner.run(Broken())) is Failed
    assert value(runner.run()) == [False]
    parcel = Payload.of(Contents(dump_arguments("train", (Seen(),), {})))  # type: ignore[arg-type]
    answer = runner.executor.run(Run(7, 1, parcel, False))
    assert value(answer) == [True, False]


def fresh_object() -> str:
    return "fresh"


def no_object() -> str:
    raise LookupError


async def fresh_later() -> str:
    return "fresh"


def no_value() -> object:
    """Returns what cannot be pickled."""
    return threading.Lock()


@pytest.mark.usefixtures("context")
def test_arguments_that_cannot_be_read(runner: Runner) -> None:
    runner.knows(fresh_object)
    answer = runner.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.payload) == (UNREADABLE, None)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"garbage", "UnpicklingError"),
        (dump_reference("json", "no_such_function"), "AttributeError"),
    ],
)
def test_a_function_that_cannot_be_read(
    payload: bytes, error: str, runner: Runner
) -> None:
    runner.define(payload)
    for _ in range(2):
        failed = runner.fail()
        assert failed.kind == UNREADABLE
        assert error in failed.type_name


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", [SystemExit, StopIteration])
def test_what_must_not_travel_goes_as_text(
    kind: type[BaseException], runner: Runner
) -> None:
    def broken() -> None:
        raise kind("why")

    runner.knows(broken)
    failed = runner.fail()
    assert (failed.kind, failed.type_name) == (RAISED, kind.__name__)
    assert failed.payload is None


@pytest.mark.usefixtures("context")
def test_a_task_that_was_cancelled_before_it_began(
    runner: Runner, page: ControlPage
) -> None:
    page.ask(3, 7)
    runner.knows(fresh_object)
    assert runner.fail().kind == STOPPED
    assert page.heard(3) == 7
    page.ask(3, 8)
    assert value(runner.run()) == "fresh"


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("first", [True, False], ids=["before", "at_the_step"])
@pytest.mark.parametrize(
    ("task", "stride"),
    [
        (fresh_object, 1),
        (no_object, 2),
        (no_value, 41),
        (fresh_later, 37),
        pytest.param(no_value, 1, marks=pytest.mark.slow),
        pytest.param(fresh_later, 1, marks=pytest.mark.slow),
    ],
)
def test_a_cancel_at_any_step_ends_the_task_and_no_more(
    task: Callable[[], object],
    stride: int,
    first: bool,
    runner: Runner,
    page: ControlPage,
) -> None:
    """Handle the signal at each bytecode of the worker and of the task in turn."""
    runner.knows(task)
    ended = runner.run()  # all is loaded
    ends = {STOPPED, ended.kind if isinstance(ended, Failed) else "done"}
    left = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                page.ask(3, 7)
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, frame)  # what it raises is raised there
        return trace

    before = sys.gettrace()
    step = 0
    while left <= 0:
        left = step = step + stride
        page.ask(3, 7 if first else 0)
        page.hear(3, 0)
        sys.settrace(trace)
        try:
            answer = runner.run()
        finally:
            sys.settrace(before)
        end = answer.kind if isinstance(answer, Failed) else "done"
        assert end in ({STOPPED} if first else ends), step
    assert step > 100, "steps were traced"


@pytest.mark.usefixtures("context")
def test_a_task_that_is_interrupted(runner: Runner, page: ControlPage) -> None:
    steps = []

    def task() -> None:
        page.ask(3, 7)
        signal.raise_signal(signal.SIGINT)
        steps.append("never")

    runner.define(b"")
    runner.executor._functions[1] = task
    assert runner.fail().kind == STOPPED
    assert (steps, page.heard(3)) == ([], 7)


@pytest.mark.usefixtures("context")
def test_a_coroutine_that_is_interrupted_while_its_loop_is_made(
    runner: Runner, page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No half of a loop is left, and no coroutine that complains."""

    async def never() -> None:
        raise AssertionError

    def make() -> asyncio.AbstractEventLoop:
        made = new_event_loop()
        page.ask(3, 7)
        signal.raise_signal(signal.SIGINT)
        begun.append(made)
        return made

    begun: list[asyncio.AbstractEventLoop] = []
    new_event_loop = asyncio.new_event_loop
    monkeypatch.setattr(asyncio, "new_event_loop", make)
    runner.knows(never)
    assert runner.fail().kind == STOPPED
    gc.collect()
    (made,) = begun
    made.close()


@pytest.mark.usefixtures("context")
def test_a_task_that_hides_its_interrupt(runner: Runner, page: ControlPage) -> None:
    def task() -> None:
        page.ask(3, 7)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("instead") from None

    runner.define(b"")
    runner.executor._functions[1] = task
    failed = runner.fail()
    assert (failed.kind, failed.type_name) == (STOPPED, "ValueError")
    page.ask(3, 0)
    runner.executor._functions[1] = fresh_object
    assert value(runner.run()) == "fresh"


@pytest.mark.usefixtures("context")
def test_the_answer_says_that_device_memory_ran_out(
    runner: Runner, context: Context
) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    runner.knows(fail)
    assert (
        runner.fail("CUDA out of memory").peak == -1
    )  # without a device that means nothing
    context.accelerators = {"GPU": (0,)}
    assert runner.fail("CUDA error: invalid argument").peak == -1
    failed = runner.fail("CUDA out of memory")
    assert (failed.type_name, failed.peak) == ("RuntimeError", 0)


@pytest.mark.usefixtures("context")
def test_who_was_to_stop_has_not_run_out(
    runner: Runner,
    page: ControlPage,
    channel: Channel,
    driver: DriverEnd,
    context: Context,
) -> None:
    def task() -> None:
        page.ask(3, 7)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("CUDA out of memory") from None

    runner.define(b"")
    runner.executor._functions[1] = task
    context.accelerators = {"GPU": (0,)}
    failed = runner.fail()
    assert (failed.kind, failed.message) == (STOPPED, "CUDA out of memory")
    channel.close()
    assert driver.rest() == []


@pytest.mark.usefixtures("context")
def test_whether_it_is_tried_again_is_said(runner: Runner) -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind

    runner.knows(fail)
    assert not runner.fail(OSError).is_retried
    runner.define(b"", retried=(OSError,))
    assert runner.fail(ConnectionError).is_retried
    assert not runner.fail(KeyError).is_retried
    runner.define(b"", retried=True)
    assert runner.fail(SystemExit).is_retried
    unreadable = runner.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(unreadable, Failed)
    assert not unreadable.is_retried, "it would be no better the next time"


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("kind", [GpuOutOfMemoryError, MemoryError, RuntimeError])
def test_the_public_error_of_device_memory_counts_for_retries(
    runner: Runner, context: Context, kind: type[Exception]
) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    runner.knows(fail)
    runner.define(b"", retried=(kind,))
    context.accelerators = {"GPU": (0,)}
    assert runner.fail("CUDA out of memory").is_retried
    assert runner.fail("another").is_retried is (kind is RuntimeError)


TOO_LONG = bytes(9)


class FakeChannel:
    """Carries no payload that is `TOO_LONG`."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_closed = False

    def send(self, message: Message) -> None:
        self.send_all([message])

    def send_all(self, messages: list[Message]) -> None:
        if any(getattr(one, "payload", None) == TOO_LONG for one in messages):
            raise SerializationError("too long")
        self.sent += messages


class Silent:
    """Has printed nothing."""

    def end_lines(self) -> None: ...


class ForkEnded(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def executor_on(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> Callable[[FakeChannel], Executor]:
    def end_fork(_code: int) -> Any:
        raise ForkEnded

    def make(channel: FakeChannel) -> Executor:
        quiet: Any = Silent()
        paper: Any = channel
        return Executor(paper, interrupts, Unmoved(), Imports(), quiet, quiet)

    monkeypatch.setattr(os, "_exit", end_fork)
    return make


@pytest.mark.usefixtures("context")
def test_a_result_that_is_too_long_is_the_calls_failure(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    executor_on(channel).answer(Done(1, TOO_LONG))
    (failed,) = channel.sent
    assert isinstance(failed, Failed)
    assert (failed.task, failed.kind) == (1, UNSENDABLE)
    assert "too long" in failed.message


@pytest.mark.usefixtures("context")
def test_it_spoils_none_of_those_that_go_with_it(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    executor_on(channel).answer_all([Done(1, b"a"), Done(2, TOO_LONG), Done(3, b"c")])
    kinds = [(type(one), one.task) for one in channel.sent]  # type: ignore[union-attr]
    assert kinds == [(Done, 1), (Failed, 2), (Done, 3)]


@pytest.mark.usefixtures("context")
def test_a_fork_answers_nothing(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    channel.is_closed = True
    with pytest.raises(ForkEnded):
        executor_on(channel).answer(Done(1, b"a"))
    assert channel.sent == []


@pytest.mark.usefixtures("context")
def test_a_failure_too_long_to_send_still_says_what_it_said_of_the_process(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    failed = Failed(1, RAISED, "E", "m", "", TOO_LONG, peak=7, is_spoilt=True)
    executor_on(channel).answer(failed)
    (sent,) = channel.sent
    assert isinstance(sent, Failed)
    assert (sent.kind, sent.peak, sent.is_spoilt) == (UNSENDABLE, 7, True)


UNLOADABLE = b"cno_such_module\nNoError\n."


def wants(
    retried: Retried, error: BaseException, *reported: type[BaseException]
) -> bool:
    return RetryRules().wants("train", dump_retried(retried), error, *reported)


@pytest.mark.usefixtures("context")
def test_a_retry_follows_from_the_error_or_its_public_type() -> None:
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


class Unaskable(Exception, metaclass=Deceiver):
    """One of them."""


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("retried", "why"),
    [
        (UNLOADABLE, "ModuleNotFoundError: No module named"),
        (dump_retried((Unaskable,)), "SystemExit: do not ask"),
    ],
)
def test_a_class_that_cannot_be_asked_is_reported_once(
    retried: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    retrying = RetryRules()
    for _ in range(3):
        assert not retrying.wants("train", retried, KeyError())
    reported = capsys.readouterr().err
    assert reported.count("train is not tried again") == 1
    assert why in reported
    retrying.forget()
    assert not retrying.wants("train", retried, KeyError())
    assert "train is not tried again" in capsys.readouterr().err


class Thing:
    """What an actor's handle is."""

    error: BaseException | None = None


@pytest.fixture
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


@pytest.mark.usefixtures("context")
@pytest.mark.usefixtures("without_the_collector")
def test_what_the_frames_held_is_freed() -> None:
    thing = Thing()
    error, watched = caught(thing), weakref.ref(thing)
    del thing
    assert watched() is not None
    let_go(error)
    assert watched() is None
    assert error.__traceback__ is not None, "who keeps the error still sees where"


@pytest.mark.usefixtures("context")
@pytest.mark.usefixtures("without_the_collector")
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


@pytest.mark.usefixtures("context")
@pytest.mark.usefixtures("without_the_collector")
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


def double(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return double(number)


class Doubler:
    async def later(self, number: int) -> int:
        return await double_later(number)

    def now(self, number: int) -> int:
        return double(number)


KINDS: list[Any] = [
    double,
    double_later,
    Doubler().later,
    lambda number: double(number) if number % 2 else double_later(number),
]


def run(function: Any, seconds: float, *items: Any) -> ChunkOutcome:
    found = Chunk(function)(seconds, *items)
    if not isinstance(found, ChunkOutcome):
        found = asyncio.run(found)
    assert isinstance(found, ChunkOutcome)
    return found


def error_in(outcome: ChunkOutcome) -> Exception:
    assert outcome.failure is not None
    return unpack_failure(Failed(*outcome.failure), "double")


@pytest.mark.parametrize("function", KINDS)
def test_each_item_gives_its_value(function: Any) -> None:
    outcome = run(function, 0, 1, 2, 3, 4)
    assert (outcome.values, outcome.failure) == ([2, 4, 6, 8], None)
    assert 0 < outcome.seconds < 10
    assert run(function, 0).values == []


@pytest.mark.parametrize("function", KINDS)
def test_what_an_item_raises_comes_with_the_values_before_it(function: Any) -> None:
    outcome = run(function, 0, 1, 2, -3, 4)
    assert outcome.values == [2, 4]
    error = error_in(outcome)
    assert (type(error), error.args) == (ValueError, (-3,))
    told = str(error.__cause__)
    assert "raise ValueError(number)" in told
    assert "chunk.py" not in told.replace("test_chunk.py", "")


@pytest.mark.parametrize("function", KINDS)
def test_it_ends_early_after_its_seconds(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(chunk, "perf_counter", lambda: next(clock))
    outcome = run(function, 1.5, 1, 2, 3, 4)
    assert outcome.values in ([2, 4], [2]), "one or two looks at the clock"
    assert outcome.failure is None
    assert run(function, 1e-9, 1, 2, 3).values == [2], "one item at least is run"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_what_stops_the_task_is_not_the_items(kind: type[BaseException]) -> None:
    def stop(number: int) -> None:
        raise kind

    with pytest.raises(kind):
        Chunk(stop)(0, 1, 2)


def test_a_cancelled_coroutine_stops_the_task() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(Chunk(hang)(0, 1, 2))
        await asyncio.sleep(0)
        task.cancel()
        await task

    async def hang(number: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
    ids=["a spoilt device", "no memory left"],
)
def test_an_error_of_the_device_fails_the_whole_task(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(number: int) -> None:
        raise RuntimeError(text)

    assert str(error_in(run(use, 0, 1))) == text, "no device here"
    monkeypatch.setattr(current, "accelerators", {"GPU": (0,)})
    with pytest.raises(RuntimeError, match="CUDA"):
        Chunk(use)(0, 1)
    assert type(error_in(run(double, 0, -1))) is ValueError, "others are the items'"


def test_the_rest_is_not_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a worker has no children of its own: see `Worker._leave`."""

    def leave(number: int) -> int:
        monkeypatch.setattr(current, "client", None)
        if number < 0:
            raise ValueError(number)
        return number

    monkeypatch.setattr(current, "client", object())
    assert run(leave, 0, 1, 2, 3).values == [1]
    monkeypatch.setattr(current, "client", object())
    with pytest.raises(ValueError, match="-1"):
        Chunk(leave)(0, -1)


def test_a_function_on_its_way() -> None:
    sent = dump_function("double", Sent(dump_function("double", lambda x: x + 1)))
    loaded = load_function(sent)
    assert isinstance(loaded, Chunk)
    assert loaded(0, 1, 2).values == [2, 3]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("never")


def test_a_value_that_cannot_be_pickled_fails_in_its_place() -> None:
    values = [1, [2], Unpicklable(), 4, Unpicklable()]
    outcome = load_result(dump_result(ChunkOutcome(list(values), 1.0, None)))
    assert (outcome.values, outcome.seconds) == ([1, [2]], 1.0)
    error = error_in(outcome)
    assert isinstance(error, SerializationError)
    assert str(error).startswith("double ran, but the result cannot be pickled: result")


def test_methods_by_name() -> None:
    actor = Doubler()
    assert method_of(actor, "now")(2) == 4
    assert method_of(actor, "now" + CHUNKED)(0, 1, 2).values == [2, 4]
    with pytest.raises(AttributeError):
        method_of(actor, "never" + CHUNKED)


class Numbers:
    """A generator that says what becomes of it."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.yielded = 0
        self.how = ""

    def plain(self) -> Iterator[int]:
        try:
            while self.yielded < self.end:
                self.yielded += 1
                yield self.yielded
        except BaseException as error:
            self.how = type(error).__name__
            raise

    async def soft(self) -> AsyncIterator[int]:
        try:
            while self.yielded < self.end:
                self.yielded += 1
                yield self.yielded
        except BaseException as error:
            self.how = type(error).__name__
            raise


def taken(driver: DriverEnd, count: int) -> list[object]:
    """The next items that have come, each in a message of its own."""
    found = []
    for _ in range(count):
        message = driver.next()
        assert type(message) is Items
        assert message.task == 7
        (payload,) = message.payloads
        found.append(load_result(payload))
    return found


def test_items_are_sent_one_by_one_and_those_of_before_are_skipped(
    channel: Channel, driver: DriverEnd
) -> None:
    numbers = Numbers(5)
    send_all(
        numbers.plain(), StreamSender(channel.send, 7, limit=9, skip=2), lambda: None
    )
    assert taken(driver, 3) == [3, 4, 5]
    assert numbers.how == ""


def test_a_held_one_reads_until_there_is_demand(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)
    items = numbers.plain()
    holding = MainThreadWindow(channel, interrupts, flow)
    for _ in range(2):
        flow.send(next(items))
    assert flow.is_held
    driver.send(Demand(8, 9), Demand(7, 1), Demand(7, 3), Exit())
    holding.hold()
    assert not flow.is_held, "neither another's demand nor an older one counts"
    assert flow.limit == 3
    assert taken(driver, 2) == [1, 2]
    assert channel.next() == Exit(), "what is not for it stays"


def test_one_that_is_cancelled_while_it_is_held_is_closed_at_its_yield(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts, page: ControlPage
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)
    interrupts.entered = 7
    page.ask(3, 7)
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        send_all(
            numbers.plain(), flow, MainThreadWindow(channel, interrupts, flow).hold
        )
    assert numbers.how == "GeneratorExit"
    assert numbers.yielded == 1
    assert page.heard(3) == 7
    assert interrupts.entered == 0, "no second interrupt lands in its finally"


def test_one_whose_driver_has_gone_is_closed(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)

    def hang_up_and_hold() -> None:
        if flow.is_held:
            driver.hang_up()
        MainThreadWindow(channel, interrupts, flow).hold()

    with pytest.raises(NodeClosedError):
        send_all(numbers.plain(), flow, hang_up_and_hold)
    assert numbers.how == "GeneratorExit"


def test_an_item_that_cannot_be_sent_names_its_place(
    channel: Channel, driver: DriverEnd
) -> None:
    flow = StreamSender(channel.send, 7, limit=9, skip=0)
    with pytest.raises(UnsendableError, match=r"item 2 .*generator"):
        send_all(iter([1, (each for each in ())]), flow, lambda: None)
    assert taken(driver, 1) == [1]


def test_one_in_a_thread_waits_for_the_thread_that_reads(
    channel: Channel, driver: DriverEnd
) -> None:
    numbers = Numbers(5)
    holding = ThreadWindow(StreamSender(channel.send, 7, limit=1, skip=0))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            send_all(numbers.plain(), holding.flow, holding.hold)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert taken(driver, 1) == [1]
    holding.flow.rise(3)
    assert taken(driver, 2) == [2, 3]
    holding.stop()
    thread.join(timeout=60)
    assert [type(error) for error in caught] == [GeneratorExit]
    assert numbers.how == "GeneratorExit"


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_on_a_loop_others_run_while_it_is_held(
    channel: Channel, driver: DriverEnd, kind: str
) -> None:
    numbers, flow = Numbers(3), StreamSender(channel.send, 7, limit=1, skip=0)
    loop = asyncio.get_running_loop()
    items = numbers.plain() if kind == "plain" else numbers.soft()
    task = loop.create_task(send_all_async(items, flow, loop.create_future))
    while not flow.is_held:
        await asyncio.sleep(0)
    assert numbers.yielded == 1
    flow.rise(2)
    while not flow.is_held:
        await asyncio.sleep(0)
    assert taken(driver, 2) == [1, 2]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert numbers.how == "GeneratorExit"
    assert numbers.yielded == 2
