"""One task, chunk or stream at a time: how it may end, and what is answered."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from aiogpu.errors import (
    NodeClosedError,
    SerializationError,
)
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    UNSENDABLE,
    ChunkOutcome,
    unpack_failure,
)
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.serializer import (
    Retried,
    dump_arguments,
    dump_function,
    dump_retried,
    load_result,
)
from aiogpu.wire.messages import Define, Demand, Done, Exit, Failed, Items, Message, Run
from aiogpu.worker import chunk
from aiogpu.worker.actors import ThreadWindow
from aiogpu.worker.chunk import Chunk
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor, MainThreadWindow
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import (
    RetryRules,
    StreamSender,
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
    sys.settrace(trace)  # Python 3.12 has no events of bytecodes the first time
    runner.run()
    sys.settrace(before)
    step = left = 0
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
