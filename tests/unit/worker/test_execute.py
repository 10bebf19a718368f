"""One task, chunk or stream at a time: how it may end, and what is answered."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest

from aiogpu.client.current import current
from aiogpu.errors import SerializationError
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    UNSENDABLE,
    ChunkOutcome,
    unpack_failure,
)
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.references import ActorReference, add_reference
from aiogpu.serialization.serializer import (
    Retried,
    dump_arguments,
    dump_function,
    dump_retried,
    load_result,
)
from aiogpu.wire.messages import Define, Done, Failed, Message, Run
from aiogpu.worker import chunk
from aiogpu.worker.actors import ThreadWindow
from aiogpu.worker.chunk import Chunk
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import RetryRules, StreamSender, send_all
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.conftest import Unmoved


class Runner:
    """An executor with one function."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.interrupts = executor.interrupts

    def define(
        self, payload: bytes, func: int = 1, function: int = 1, retried: Retried = False
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
        nothing = ActorReference(1, None)
        assert not add_reference(nothing), "what is pickled next is by itself"
    assert step > 100, "steps were traced"


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
def test_a_fork_answers_nothing(executor_on: Callable[[FakeChannel], Executor]) -> None:
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
    assert reported.count("train is never retried") == 1
    assert why in reported
    retrying.forget()
    assert not retrying.wants("train", retried, KeyError())
    assert "train is never retried" in capsys.readouterr().err


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


def test_a_stream_in_a_thread_waits_for_the_thread_that_reads() -> None:
    sent: SimpleQueue[Any] = SimpleQueue()
    window = ThreadWindow(StreamSender(sent.put, 7, limit=1, skip=0))
    yielded: list[int] = []

    def items() -> Iterator[int]:
        for number in range(5):
            yielded.append(number)
            yield number

    def produce() -> None:
        with pytest.raises(GeneratorExit):
            send_all(items(), window.flow, window.hold)

    producer = threading.Thread(target=produce)
    producer.start()
    for limit in (1, 2, 3):
        window.flow.rise(limit)
        assert sent.get(timeout=60).task == 7
    window.stop()
    producer.join(timeout=60)
    assert (yielded, sent.empty()) == ([0, 1, 2], True)
