"""Questions to Ray that block: asked in threads that nobody waits for at the end.

A cluster that has gone answers nothing, and Ray waits for it; a thread of a pool would
keep the interpreter from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final, TypeVar

from aiogpu.errors import NodeDiedError

T = TypeVar("T")

PATIENCE: Final = 15.0
"""Seconds in which a cluster that lives has answered."""


def begun(call: Callable[[], T]) -> Future[T]:
    """What a call will give that is made in a thread of its own."""
    answer: Future[T] = Future()
    Thread(target=_make, args=(call, answer), name="aiogpu-ask", daemon=True).start()
    return answer


def _make(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - whoever asks is told
        answer.set_exception(error)
    else:
        answer.set_result(found)


async def asked(call: Callable[[], T], seconds: float = PATIENCE) -> T:
    """What a call gives, while the loop goes on.

    Raises:
        NodeDiedError: it has given nothing in that time, or failed.
    """
    answer = begun(call)
    waiting = asyncio.wrap_future(_unless_left(answer))
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


def _unless_left(answer: Future[T]) -> Future[T]:
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
