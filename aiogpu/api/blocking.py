"""Calls from plain code, which has no event loop, and how it waits: `aiogpu.get`.

asyncio stays out of this file: importing it would cost a plain task more than it does.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aiogpu.api.blocking_handle import BlockingHandle, Borrowed
from aiogpu.api.options import check_seconds
from aiogpu.api.usage_errors import refuse
from aiogpu.client.current import client_of_task, is_loop_running, passing, services
from aiogpu.errors import (
    MisuseError,
    TaskTimeoutError,
)

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Client

T = TypeVar("T")


def submit_in_task(site: Site, payload: bytes) -> Any:
    """Start a child of the task whose code asks; gives the kind of handle that fits.

    Raises:
        MisuseError: no task runs, but what one has left behind.
    """
    client = client_of_task()
    return request(client, site.spec.name, partial(client.submit, site, payload))


def request(client: Client, name: str, start: Callable[[Any], int]) -> Any:
    """The kind of handle that fits, of what a task asks for.

    Args:
        client: of the task whose code asks.
        name: what the handle is called.
        start: makes the request, given who waits for its end; gives its number.
    """
    receiver = handle = handle_for(client, name)
    if passing and services.client is None:
        from aiogpu.runtime.callers.caller import carrying

        receiver = carrying(handle)
    number = start(receiver)
    if isinstance(handle, BlockingHandle):
        handle.child = number
    else:
        handle.task_id = number
    return handle


def handle_for(client: Client, name: str, owner: Any = None) -> Any:
    """The kind of handle that fits, for the code of a task.

    `owner` stops the work and is asked about it; None for the client.
    """
    if is_loop_running():
        import asyncio

        from aiogpu.api.child_handle import ChildHandle

        loop = asyncio.get_running_loop()
        return ChildHandle(name, owner or client, loop, client.waits)
    handle: BlockingHandle[Any] = BlockingHandle(name, client)
    handle.owner = owner
    return handle


@overload
def get(handle: Handle[T], /, *, timeout: float | None = None) -> T: ...


@overload
def get(handle: Sequence[Handle[T]], /, *, timeout: float | None = None) -> list[T]: ...


def get(handle: Any, /, *, timeout: float | None = None, **unknown: Any) -> Any:
    """Wait in a plain task for what it has started; its CPUs are free meanwhile.

    Args:
        handle: what `.remote()` gave in this task, or a list of such.
        timeout: seconds; None waits as long as it takes.
        **unknown: none; they are misspelt.

    Returns:
        The result, or a list of results in the order of the handles.

    Raises:
        OptionError: an option is unknown or ill-valued.
        MisuseError: an event loop runs here: await the handle instead.
        Exception: what one of them has raised, as soon as it has; the others go on.
        TaskTimeoutError: time was up; what was waited for goes on.
        DeadlockError: the wait could never end.
    """
    if unknown:
        refuse(unknown, {"timeout": timeout}, "get()")
    if type(handle).__name__ == "Putting":
        return handle.handle
    if is_loop_running():
        raise MisuseError(
            "aiogpu.get() would block the event loop that runs here; write `await "
            "handle`, or `await asyncio.gather(*handles)`."
        )
    deadline = None
    if timeout is not None:
        deadline = time.monotonic() + check_seconds("timeout", timeout)
    are_several = isinstance(handle, list | tuple)
    handles = list(handle) if are_several else [handle]
    del handle
    try:
        results = _results(handles, deadline, timeout)
    finally:
        del handles  # see `BlockingHandle.result`
    return results if are_several else results[0]


def _results(
    handles: list[Any], deadline: float | None, timeout: float | None
) -> list[Any]:
    for one in handles:
        if not isinstance(one, BlockingHandle):
            raise MisuseError(_wrong(one))
    try:
        in_time = _wait(handles, deadline)
        for one in handles:
            if one.has_failed:
                one.result()
        if not in_time:
            raise TaskTimeoutError(_late(handles, timeout))
        return [one.result() for one in handles]
    finally:
        one = None
        del handles


def _wait(handles: list[BlockingHandle[Any]], deadline: float | None) -> bool:
    """Until all have ended or one has failed; False if time is up before."""
    for one in handles:
        if isinstance(one.owner, Borrowed):
            one.owner.fetch(one)
    pending = [one for one in handles if not one.done()]
    if not pending or any(one.has_failed for one in handles):
        return True
    client, waiter = client_of_task(), get_ident()
    for one in pending:
        if hasattr(one.owner, "on_loop"):
            one.client = client  # it may have come to another task of this process
        if one.client is not client:
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another task; aiogpu.get() "
                f"waits for what the running task has started."
            )
    numbers = tuple(one.child for one in pending)
    client.note_wait(waiter, numbers, deadline is None)
    try:
        return client.wait_until(_Countdown(client, pending).is_over, deadline)
    finally:
        if all(one.done() for one in handles):
            client.end_wait(waiter)
        else:
            # The driver cannot know that nobody waits any more.
            client.note_wait(waiter, ())


class _Countdown:
    """Whether a wait is over, at no more than one look at each handle."""

    def __init__(self, client: Client, pending: list[BlockingHandle[Any]]) -> None:
        self._client = client
        self._pending = list(pending)
        self._upsets = -1

    def is_over(self) -> bool:
        pending, upsets = self._pending, self._client.upsets
        while pending and pending[-1]._state != "pending":
            if pending.pop().has_failed:
                # Another thread may have found that it cannot be unpickled.
                return True
        if upsets != self._upsets:
            self._upsets = upsets
            return not pending or any(one.has_failed for one in pending)
        return not pending


def _late(handles: list[BlockingHandle[Any]], timeout: float | None) -> str:
    late = [one.task_name for one in handles if not one.done()]
    if not late:
        # Where tasks run in this thread, one may have ended too late.
        return f"{handles[-1].task_name} ended after the {timeout:g} s of aiogpu.get()."
    return (
        f"{len(late)} of {len(handles)} tasks did not end within the {timeout:g} s of "
        f"aiogpu.get(), {late[0]} for one; they go on."
    )


def _wrong(given: object) -> str:
    kind = type(given).__name__
    if kind in ("Stream", "BlockingStream"):
        return (
            f"aiogpu.get() was given {given!r}; iterate it, its items come one by one."
        )
    if kind in ("Handle", "ChildHandle"):
        return (
            "aiogpu.get() waits in plain tasks, for what they have started; this "
            "handle belongs to an event loop: await it there."
        )
    return (
        f"aiogpu.get() was given {given!r}; give it what .remote() has returned in "
        f"this task, or a list of such."
    )
