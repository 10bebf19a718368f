"""One task at a time: what becomes of each way to end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiogpu.client.current import Context, current
from aiogpu.errors import GpuOutOfMemoryError
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
from aiogpu.wire.messages import Define, Done, Failed, Run
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor
from tests.unit.worker.driver_end import DriverEnd

pytestmark = pytest.mark.usefixtures("context")


class Desk:
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
def desk(executor: Executor) -> Desk:
    return Desk(executor)


def value(answer: Done | Failed) -> Any:
    assert isinstance(answer, Done), answer
    return load_result(answer.payload)


def test_a_result(desk: Desk) -> None:
    desk.knows(lambda a, b: a + b)
    assert value(desk.run(1, 2)) == 3
    answer = desk.executor.run(
        Run(7, 1, dump_arguments("train", (1,), {"b": 5}), False)
    )
    assert value(answer) == 6


def test_what_the_task_may_ask_about_itself(desk: Desk, context: Context) -> None:
    seen = []

    def look() -> None:
        seen.append((current.task, current.name, current.resources))

    desk.define(b"")
    desk.executor._functions[1] = look
    desk.run()
    assert seen == [(7, "train", {"GPU": 0.5, "CPU": 1.0})]


def test_a_function_is_loaded_once_and_shared_by_its_sites(desk: Desk) -> None:
    desk.define(dump_reference("os", "getpid"), 1, 9)
    desk.define(b"", 2, 9)
    first = desk.executor._functions
    assert first == {}, "not before it is needed"
    value(desk.run())
    (loaded,) = desk.executor._functions.values()
    assert value(desk.run(func=2)) == os.getpid()
    assert desk.executor._functions == {9: loaded}


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


def test_only_the_thread_that_loads_a_function_is_loading(desk: Desk) -> None:
    desk.knows(Unloaded())
    assert value(desk.run()) == [False, True, False, True, False]


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


def test_who_unpickles_arguments_is_loading_until_the_call(desk: Desk) -> None:
    desk.knows(lambda *given: [*given, current.is_loading])
    assert value(desk.run(Seen())) == [True, False]
    assert type(desk.run(Broken())) is Failed
    assert value(desk.run()) == [False]
    parcel = Payload.of(Contents(dump_arguments("train", (Seen(),), {})))  # type: ignore[arg-type]
    answer = desk.executor.run(Run(7, 1, parcel, False))
    assert value(answer) == [True, False]


def fresh_object() -> str:
    return "fresh"


def test_forgetting_all(desk: Desk) -> None:
    desk.knows(fresh_object)
    assert value(desk.run()) == "fresh"
    desk.executor.forget()
    with pytest.raises(KeyError):
        desk.run()
    desk.define(dump_function("train", lambda: "another"))
    assert value(desk.run()) == "another"


def test_arguments_that_cannot_be_read(desk: Desk) -> None:
    desk.knows(fresh_object)
    answer = desk.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.payload) == (UNREADABLE, None)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"garbage", "UnpicklingError"),
        (dump_reference("no_such_module", "f"), "ModuleNotFoundError"),
        (dump_reference("json", "no_such_function"), "AttributeError"),
    ],
)
def test_a_function_that_cannot_be_read(payload: bytes, error: str, desk: Desk) -> None:
    desk.define(payload)
    for _ in range(2):
        failed = desk.fail()
        assert failed.kind == UNREADABLE
        assert error in failed.type_name


def test_an_exception_of_the_tasks(desk: Desk) -> None:
    def broken(x: int) -> None:
        raise KeyError(x)

    desk.knows(broken)
    failed = desk.fail(4)
    assert (failed.kind, failed.type_name, failed.message) == (RAISED, "KeyError", "4")
    assert failed.payload is not None
    assert "raise KeyError(x)" in failed.traceback
    assert "invoke" not in failed.traceback


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration]
)
def test_what_must_not_travel_goes_as_text(
    kind: type[BaseException], desk: Desk
) -> None:
    def broken() -> None:
        raise kind("why")

    desk.knows(broken)
    failed = desk.fail()
    assert (failed.kind, failed.type_name) == (RAISED, kind.__name__)
    assert failed.payload is None


def test_a_result_that_cannot_be_sent(desk: Desk) -> None:
    desk.define(b"")
    desk.executor._functions[1] = threading.Lock
    failed = desk.fail()
    assert failed.kind == UNSENDABLE
    assert "result (a lock)" in failed.message


def test_a_task_that_was_cancelled_before_it_began(
    desk: Desk, page: ControlPage
) -> None:
    page.ask(3, 7)
    desk.knows(fresh_object)
    assert desk.fail().kind == STOPPED
    assert page.heard(3) == 7
    page.ask(3, 8)
    assert value(desk.run()) == "fresh"


def test_a_task_that_is_interrupted(desk: Desk, page: ControlPage) -> None:
    steps = []

    def task() -> None:
        page.ask(3, 7)
        signal.raise_signal(signal.SIGINT)
        steps.append("never")

    desk.define(b"")
    desk.executor._functions[1] = task
    assert desk.fail().kind == STOPPED
    assert (steps, page.heard(3)) == ([], 7)


def test_a_coroutine_that_is_interrupted_while_its_loop_is_made(
    desk: Desk, page: ControlPage, monkeypatch: pytest.MonkeyPatch
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
    desk.knows(never)
    assert desk.fail().kind == STOPPED
    gc.collect()
    (made,) = begun
    made.close()


def test_a_task_that_hides_its_interrupt(desk: Desk, page: ControlPage) -> None:
    def task() -> None:
        page.ask(3, 7)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("instead") from None

    desk.define(b"")
    desk.executor._functions[1] = task
    failed = desk.fail()
    assert (failed.kind, failed.type_name) == (STOPPED, "ValueError")
    page.ask(3, 0)
    desk.executor._functions[1] = fresh_object
    assert value(desk.run()) == "fresh"


def test_a_coroutine_is_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class PaperCoroutines:
        """Steps by hand; the real one has tests of its own."""

        made = 0

        def __init__(self, *_: object) -> None:
            PaperCoroutines.made += 1

        def run(self, coroutine: Any, task: int) -> Any:
            with pytest.raises(StopIteration) as stopped:
                coroutine.send(None)
            return task, stopped.value.value

    monkeypatch.setattr("aiogpu.worker.coroutines.Coroutines", PaperCoroutines)

    async def double(x: int) -> int:
        return 2 * x

    desk.define(b"")
    desk.executor._functions[1] = double
    assert value(desk.run(4)) == (7, 8)
    assert value(desk.run(5)) == (7, 10)
    assert PaperCoroutines.made == 1


def test_threads_are_looked_at_only_where_the_site_changes(desk: Desk) -> None:
    desk.knows(abs)
    desk.define(b"", func=2)
    for func in (1, 1, 2, 2, 1):
        assert isinstance(desk.run(-1, func=func), Done)
    threads: Any = desk.executor._threads
    assert threads.adapted == [1.0, 2.0, 1.0]


def test_running_out_of_device_memory_is_told_with_the_answer(
    desk: Desk, context: Context
) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    desk.knows(fail)
    assert (
        desk.fail("CUDA out of memory").peak == -1
    )  # without a device that means nothing
    context.accelerators = {"GPU": (0,)}
    assert desk.fail("CUDA error: invalid argument").peak == -1
    failed = desk.fail("CUDA out of memory")
    assert (failed.type_name, failed.peak) == ("RuntimeError", 0)


def test_who_was_to_stop_has_not_run_out(
    desk: Desk, page: ControlPage, channel: Channel, driver: DriverEnd, context: Context
) -> None:
    def task() -> None:
        page.ask(3, 7)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("CUDA out of memory") from None

    desk.define(b"")
    desk.executor._functions[1] = task
    context.accelerators = {"GPU": (0,)}
    failed = desk.fail()
    assert (failed.kind, failed.message) == (STOPPED, "CUDA out of memory")
    channel.close()
    assert driver.rest() == []


def test_whether_it_is_tried_again_is_said(desk: Desk) -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind

    desk.knows(fail)
    assert not desk.fail(OSError).is_retried
    desk.define(b"", retried=(OSError,))
    assert desk.fail(ConnectionError).is_retried
    assert not desk.fail(KeyError).is_retried
    desk.define(b"", retried=True)
    assert desk.fail(SystemExit).is_retried
    unreadable = desk.executor.run(Run(7, 1, b"garbage", False))
    assert isinstance(unreadable, Failed)
    assert not unreadable.is_retried, "it would be no better the next time"


@pytest.mark.parametrize("kind", [GpuOutOfMemoryError, MemoryError, RuntimeError])
def test_what_is_told_of_device_memory_counts_for_retries(
    desk: Desk, context: Context, kind: type[Exception]
) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    desk.knows(fail)
    desk.define(b"", retried=(kind,))
    context.accelerators = {"GPU": (0,)}
    assert desk.fail("CUDA out of memory").is_retried
    assert desk.fail("another").is_retried is (kind is RuntimeError)
