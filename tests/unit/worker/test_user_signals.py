"""Signal handlers of user code: they raise in user code only, and are restored."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from aiogpu.client.current import current
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.serializer import dump_arguments, dump_function
from aiogpu.wire.codec import FrameReader, encode_all
from aiogpu.wire.messages import (
    ASYNC,
    DEFAULT_GROUP,
    SERIAL,
    THREADED,
    Create,
    Created,
    Define,
    Done,
    Exit,
    Failed,
    Invoke,
    Leave,
    Message,
    Run,
)
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import GuardedHandler, Interrupts
from aiogpu.worker.loop import Worker
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.conftest import Unmoved

NUMBERS = range(1, 4)
CREATION = 100


class HandlerError(Exception):
    """Raised by a handler."""


def fail(_number: int, _frame: FrameType | None) -> None:
    raise HandlerError


def task(number: int) -> int:
    return number


class Actor:
    def method(self, number: int) -> int:
        return number


class SoftActor:
    async def method(self, number: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return number


def tasks_to_run() -> list[Message]:
    function = dump_function("task", task)
    payload: Any = dump_arguments("task", (5,), {})
    runs = [Run(number, 1, payload, False, number) for number in NUMBERS]
    return [Define(1, 1, "task", {"CPU": 1.0}, function), *runs, Exit()]


def actor_to_serve(cls: type, mode: Any) -> list[Message]:
    function = dump_function("actor", cls)
    nothing: Any = dump_arguments("actor", (), {})
    payload: Any = dump_arguments("actor.method", (5,), {})
    return [
        Define(1, 1, "actor", {"CPU": 1.0}, function),
        Create(CREATION, 1, nothing, CREATION, mode, {DEFAULT_GROUP: 1}, {}),
        *(Invoke(number, "method", payload) for number in NUMBERS),
        Leave(),
    ]


class ServedWorker:
    """A worker in this process, and its driver in a thread."""

    def __init__(self, page: ControlPage, script: list[Message]) -> None:
        self._interrupts = Interrupts(page)
        self.signals = self._interrupts.user
        self.signals.is_active = True
        self._script = script

    def serve(self) -> list[Done | Failed]:
        """Serve all messages but the last, then the last; return the answers."""
        answers: list[Done | Failed] = []
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = Channel(self._interrupts)
            channel.use(theirs)
            worker = Worker(
                channel, self._interrupts, Imports(), Unmoved(), lambda: None
            )
            current.client = worker._client
            driver = threading.Thread(target=self._drive, args=(ours, answers))
            driver.start()
            worker.serve()
            driver.join()
        return answers

    def _drive(self, ours: socket.socket, answers: list[Done | Failed]) -> None:
        *script, end = self._script
        calls = [message for message in script if isinstance(message, Run | Invoke)]
        begins = [message for message in script if message not in calls]
        reader = FrameReader()
        ours.sendall(encode_all(begins))
        if not any(isinstance(message, Create) for message in begins):
            ours.sendall(encode_all(calls))
        while len(answers) < len(calls):
            for message in reader.feed(ours.recv(1 << 16)):
                if isinstance(message, Created):
                    ours.sendall(encode_all(calls))
                elif isinstance(message, Done | Failed):
                    answers.append(message)
            if answers and answers[0].task == CREATION:
                break
        ours.sendall(encode_all([end]))


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """An actor collects garbage at its end; the objects of other tests take long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("context", "frozen_heap")
# A handler can raise between the call that makes a coroutine and its next opcode.
@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
@pytest.mark.parametrize(
    ("script", "stride"),
    [
        pytest.param(tasks_to_run(), 7, id="tasks"),
        pytest.param(actor_to_serve(Actor, SERIAL), 7, id="actor"),
        pytest.param(actor_to_serve(Actor, THREADED), 29, id="threads"),
        pytest.param(actor_to_serve(SoftActor, ASYNC), 29, id="coroutines"),
        pytest.param(tasks_to_run(), 1, id="tasks-1", marks=pytest.mark.slow),
        pytest.param(
            actor_to_serve(Actor, SERIAL), 1, id="actor-1", marks=pytest.mark.slow
        ),
        pytest.param(
            actor_to_serve(SoftActor, ASYNC),
            3,
            id="coroutines-3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_handler_that_raises_at_any_opcode_fails_only_the_call_it_hits(
    script: list[Message], stride: int, page: ControlPage
) -> None:
    """Call a handler at each bytecode of a worker and its user code, in turn."""
    ServedWorker(page, script).serve()  # imports all modules
    steps_left = 0
    served: ServedWorker

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal steps_left
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps_left -= 1
            if steps_left == 0:
                sys.settrace(None)
                # Its exception is raised in the frame.
                GuardedHandler(served.signals, fail)(signal.SIGUSR1, frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # Python 3.12 sends no opcode events the first time
    served = ServedWorker(page, script)
    served.serve()
    sys.settrace(before)
    step = steps_left = 0
    while steps_left <= 0:
        steps_left = step = step + stride
        served = ServedWorker(page, script)
        sys.settrace(trace)
        try:
            answers = served.serve()
        finally:
            sys.settrace(before)
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        assert len(failed) <= 1, step
        if [answer.task for answer in failed] != [CREATION]:
            assert {answer.task for answer in answers} == set(NUMBERS), step
        assert all("HandlerError" in answer.type_name for answer in failed), step
    assert step > 300, "opcodes were traced"
