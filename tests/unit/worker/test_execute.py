"""One task at a time: how it may end, what is answered, and what is kept."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from aiogpu.errors import GpuOutOfMemoryError, SerializationError, TaskError
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.exceptions import RAISED, STOPPED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.serializer import (
    Retried,
    dump_arguments,
    dump_function,
    dump_reference,
    dump_retried,
    load_result,
)
from aiogpu.wire.messages import Define, Done, Failed, Message, Run
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import RetryRules, let_go
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.conftest import DriverEnd, Unmoved

pytestmark = pytest.mark.usefixtures("context")


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


def test_arguments_that_cannot_be_read(runner: Runner) -> None:
    runner.knows(fresh_object)
    answer = runner.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.payload) == (UNREADABLE, None)


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


def test_a_task_that_was_cancelled_before_it_began(
    runner: Runner, page: ControlPage
) -> None:
    page.ask(3, 7)
    runner.knows(fresh_object)
    assert runner.fail().kind == STOPPED
    assert page.heard(3) == 7
    page.ask(3, 8)
    assert value(runner.run()) == "fresh"


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


def test_a_result_that_is_too_long_is_the_calls_failure(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    executor_on(channel).answer(Done(1, TOO_LONG))
    (failed,) = channel.sent
    assert isinstance(failed, Failed)
    assert (failed.task, failed.kind) == (1, UNSENDABLE)
    assert "too long" in failed.message


def test_it_spoils_none_of_those_that_go_with_it(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    executor_on(channel).answer_all([Done(1, b"a"), Done(2, TOO_LONG), Done(3, b"c")])
    kinds = [(type(one), one.task) for one in channel.sent]  # type: ignore[union-attr]
    assert kinds == [(Done, 1), (Failed, 2), (Done, 3)]


def test_a_fork_answers_nothing(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    channel.is_closed = True
    with pytest.raises(ForkEnded):
        executor_on(channel).answer(Done(1, b"a"))
    assert channel.sent == []


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


@pytest.mark.usefixtures("without_the_collector")
def test_what_the_frames_held_is_freed() -> None:
    thing = Thing()
    error, watched = caught(thing), weakref.ref(thing)
    del thing
    assert watched() is not None
    let_go(error)
    assert watched() is None
    assert error.__traceback__ is not None, "who keeps the error still sees where"


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
