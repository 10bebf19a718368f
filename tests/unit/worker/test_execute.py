"""Execution of a task, a chunk or a stream: how it ends and what the worker answers."""

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

    def define(self, payload: bytes, retried: Retried = False) -> None:
        resources = {"GPU": 0.5, "CPU": 1.0}
        retried_pickle = dump_retried(retried)
        self.executor.define(Define(1, 1, "train", resources, payload, retried_pickle))

    def use(self, function: Callable[..., object]) -> None:
        self.define(dump_function("train", function))

    def run(self, *args: object) -> Done | Failed:
        answer = self.executor.run(Run(7, 1, dump_arguments("train", args, {}), False))
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


class LoadingProbe:
    """An argument that unpickles as the value of `current.is_loading`."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[()]]:
        return is_loading, ()


class Broken:
    """An argument that cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return int, ("none",)


@pytest.mark.usefixtures("context")
def test_arguments_are_unpickled_while_is_loading_is_set(runner: Runner) -> None:
    runner.use(lambda *given: [*given, current.is_loading])
    assert value(runner.run(LoadingProbe())) == [True, False]
    assert type(runner.run(Broken())) is Failed
    assert value(runner.run()) == [False]
    payload = Payload.of(Contents(dump_arguments("train", (LoadingProbe(),), {})))  # type: ignore[arg-type]
    answer = runner.executor.run(Run(7, 1, payload, False))
    assert value(answer) == [True, False]


def fresh_object() -> str:
    return "fresh"


def no_object() -> str:
    raise LookupError


async def fresh_later() -> str:
    return "fresh"


def no_value() -> object:
    """Return an object that cannot be pickled."""
    return threading.Lock()


@pytest.mark.usefixtures("context")
def test_task_cancelled_early_does_not_run(runner: Runner, page: ControlPage) -> None:
    page.cancel(3, 7)
    runner.use(fresh_object)
    assert runner.fail().kind == STOPPED
    assert page.acknowledged(3) == 7
    page.cancel(3, 8)
    assert value(runner.run()) == "fresh"


def kind_of(answer: Done | Failed) -> str:
    return answer.kind if isinstance(answer, Failed) else "done"


@pytest.mark.usefixtures("context")
# A signal can be handled between the call that makes a coroutine and its next opcode.
@pytest.mark.filterwarnings("ignore:coroutine 'fresh_later' was never awaited")
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
def test_cancel_at_any_opcode_ends_only_the_task(
    task: Callable[[], object],
    stride: int,
    first: bool,
    runner: Runner,
    page: ControlPage,
) -> None:
    """Handle the signal at each bytecode of the worker and of the task, in turn."""
    runner.use(task)
    ends = {STOPPED, kind_of(runner.run())}  # this run imports all modules
    steps_left = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps_left
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps_left -= 1
            if steps_left == 0:
                sys.settrace(None)
                page.cancel(3, 7)
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, frame)  # its exception is raised in the frame
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # Python 3.12 sends no opcode events the first time
    runner.run()
    sys.settrace(before)
    step = steps_left = 0
    while steps_left <= 0:
        steps_left = step = step + stride
        page.cancel(3, 7 if first else 0)
        page.acknowledge(3, 0)
        sys.settrace(trace)
        try:
            answer = runner.run()
        finally:
            sys.settrace(before)
        assert kind_of(answer) in ({STOPPED} if first else ends), step
        assert not add_reference(ActorReference(1, None)), "no pickling is open"
    assert step > 100, "opcodes were traced"


@pytest.mark.usefixtures("context")
def test_failure_says_if_the_task_is_retried(runner: Runner) -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind

    runner.use(fail)
    assert not runner.fail(OSError).is_retried
    runner.define(b"", retried=(OSError,))
    assert runner.fail(ConnectionError).is_retried
    assert not runner.fail(KeyError).is_retried
    runner.define(b"", retried=True)
    assert runner.fail(SystemExit).is_retried
    unreadable = runner.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(unreadable, Failed)
    assert not unreadable.is_retried, "a retry would fail as well"


TOO_LONG = bytes(9)


class FakeChannel:
    """A channel that refuses the payload `TOO_LONG`."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_closed = False

    def send(self, message: Message) -> None:
        self.send_all([message])

    def send_all(self, messages: list[Message]) -> None:
        if any(getattr(m, "payload", None) == TOO_LONG for m in messages):
            raise SerializationError("too long")
        self.sent += messages


class Silent:
    """A stdio and a client without output."""

    def end_lines(self) -> None: ...


class ForkEnded(Exception):
    """Raised in place of the end of the process."""


@pytest.fixture
def executor_on(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> Callable[[FakeChannel], Executor]:
    def end_fork(_code: int) -> Any:
        raise ForkEnded

    def make(channel: FakeChannel) -> Executor:
        silent: Any = Silent()
        fake: Any = channel
        return Executor(fake, interrupts, Unmoved(), Imports(), silent, silent)

    monkeypatch.setattr(os, "_exit", end_fork)
    return make


@pytest.mark.usefixtures("context")
def test_answer_that_cannot_be_sent_spoils_no_other_answer(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    executor_on(channel).answer_all([Done(1, b"a"), Done(2, TOO_LONG), Done(3, b"c")])
    kinds = [(type(m), m.task) for m in channel.sent]  # type: ignore[union-attr]
    assert kinds == [(Done, 1), (Failed, 2), (Done, 3)]


@pytest.mark.usefixtures("context")
def test_fork_sends_no_answer(executor_on: Callable[[FakeChannel], Executor]) -> None:
    channel = FakeChannel()
    channel.is_closed = True
    with pytest.raises(ForkEnded):
        executor_on(channel).answer(Done(1, b"a"))
    assert channel.sent == []


@pytest.mark.usefixtures("context")
def test_failure_too_long_to_send_keeps_what_it_says_of_the_process(
    executor_on: Callable[[FakeChannel], Executor],
) -> None:
    channel = FakeChannel()
    failed = Failed(1, RAISED, "E", "m", "", TOO_LONG, peak=7, is_spoilt=True)
    executor_on(channel).answer(failed)
    (sent,) = channel.sent
    assert isinstance(sent, Failed)
    assert (sent.kind, sent.peak, sent.is_spoilt) == (UNSENDABLE, 7, True)


class RaisingMeta(type):
    """A class of classes for which `isinstance` raises."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise SystemExit("do not ask")


class UncheckableError(Exception, metaclass=RaisingMeta):
    """An exception for which `isinstance` raises."""


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("retried", "reason"),
    [
        (b"cno_such_module\nNoError\n.", "ModuleNotFoundError: No module named"),
        (dump_retried((UncheckableError,)), "SystemExit: do not ask"),
    ],
)
def test_retry_class_that_cannot_be_checked_is_reported_once(
    retried: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    retrying = RetryRules()
    for _ in range(3):
        assert not retrying.wants("train", retried, KeyError())
    reported = capsys.readouterr().err
    assert reported.count("train is never retried") == 1
    assert reason in reported
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
    outcome = Chunk(function)(seconds, *items)
    if not isinstance(outcome, ChunkOutcome):
        outcome = asyncio.run(outcome)
    assert isinstance(outcome, ChunkOutcome)
    return outcome


def error_in(outcome: ChunkOutcome) -> Exception:
    return unpack_failure(Failed(*outcome.failure), "double")  # type: ignore[misc]


@pytest.mark.parametrize("function", KINDS)
def test_chunk_ends_early_when_its_seconds_are_over(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(chunk, "perf_counter", lambda: next(clock))
    outcome = run(function, 1.5, 1, 2, 3, 4)
    assert outcome.values in ([2, 4], [2]), "the clock is read once or twice"
    assert outcome.failure is None
    assert run(function, 1e-9, 1, 2, 3).values == [2], "at least one item runs"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_exception_that_stops_a_task_stops_the_chunk(kind: type[BaseException]) -> None:
    def stop(number: int) -> None:
        raise kind

    with pytest.raises(kind):
        Chunk(stop)(0, 1, 2)


def test_cancelled_coroutine_stops_the_whole_chunk() -> None:
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
def test_device_error_fails_a_chunk(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(number: int) -> None:
        raise RuntimeError(text)

    assert str(error_in(run(use, 0, 1))) == text, "the process has no device"
    monkeypatch.setattr(current, "accelerators", {"GPU": (0,)})
    with pytest.raises(RuntimeError, match="CUDA"):
        Chunk(use)(0, 1)
    assert type(error_in(run(double, 0, -1))) is ValueError, "an error of its item"


def test_stream_in_a_thread_waits_for_its_reader() -> None:
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
        window.flow.raise_limit(limit)
        assert sent.get(timeout=60).task == 7
    window.stop()
    producer.join(timeout=60)
    assert (yielded, sent.empty()) == ([0, 1, 2], True)
