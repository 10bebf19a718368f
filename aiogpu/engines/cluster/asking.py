"""Calls to Ray that block: made in threads that nobody waits for at the end.

A cluster that has gone answers nothing, and Ray waits for it; a thread of a pool would
keep the interpreter from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeVar

from aiogpu.errors import NodeDiedError

T = TypeVar("T")

PATIENCE: Final = 15.0
"""Seconds in which a cluster that lives has answered."""


def begun(call: Callable[[], T]) -> Future[T]:
    """Return what a call will give that is made in a thread of its own."""
    answer: Future[T] = Future()
    Thread(target=_make, args=(call, answer), name="aiogpu-ask", daemon=True).start()
    return answer


class OneThread:
    """A thread in which calls are made one after the other, until it is ended."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<OneThread {self._thread.name}>"

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return what a call will give, when those before it have been made."""
        answer: Future[T] = Future()
        self._calls.put(partial(_make, call, answer))
        return answer

    def end(self) -> None:
        """It ends when the calls have been made that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (make := self._calls.get()) is not None:
            make()


def _make(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - whoever asks is told
        answer.set_exception(error)
    else:
        answer.set_result(found)


async def asked(call: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Return what a call gives, while the loop goes on.

    Raises:
        NodeDiedError: it has given nothing in that time, or failed.
    """
    answer = begun(call)
    waiting = asyncio.wrap_future(unless_left(answer))
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError as error:
        raise NodeDiedError(
            f"the Ray cluster does not answer within {seconds:g} s."
        ) from error
    except Exception as error:
        raise NodeDiedError(
            f"the Ray cluster gives no answer: {type(error).__name__}: {error}"
        ) from error


def unless_left(answer: Future[T]) -> Future[T]:
    """The same for a waiter that may leave, and with it the loop, before it comes."""
    passed_on: Future[T] = Future()

    def tell(done: Future[T]) -> None:
        if not passed_on.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            passed_on.set_exception(error)
        else:
            passed_on.set_result(done.result())

    answer.add_done_callback(tell)
    return passed_on
