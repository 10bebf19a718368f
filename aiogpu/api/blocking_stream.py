"""What `.remote()` of a generator gives in a plain task: an iterator that waits.

asyncio stays out: importing it would cost such a task more than it does.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from aiogpu.api.stream_buffer import ItemBuffer
from aiogpu.client.current import (
    client_of_task,
    error_inside_task,
    is_loop_running,
    passing,
    services,
)
from aiogpu.errors import MisuseError, TaskCancelledError

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Client, Receiver

T = TypeVar("T")
_CLOSED: Final = "was closed"


class BlockingStream(Iterator[T]):
    """The items of a child that is a generator, by `for`; its CPUs are free meanwhile.

    To type checkers `.remote()` gives a `Stream` everywhere.
    """

    def __init__(self, inflow: ItemBuffer, client: Client) -> None:
        self._inflow = inflow
        self._client = client
        self._is_through = False

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self._inflow.task_name

    def __repr__(self) -> str:
        inflow = self._inflow
        return (
            f"<BlockingStream of {inflow.task_name}: {len(inflow.buffer)} items to "
            f"take, {inflow.window.taken} taken>"
        )

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a stream has no truth value; write `for item in "
            f"{self.task_name}.remote(...)`."
        )

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} cannot be pickled; iterate it here and "
            f"pass its items on."
        )

    def __aiter__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} was made in a plain function, where no "
            f"event loop runs; write `for item in {self.task_name}.remote(...)`."
        )

    def __iter__(self) -> BlockingStream[T]:
        return self

    def __next__(self) -> T:
        inflow = self._inflow
        if self._is_through:
            raise StopIteration
        if not inflow.buffer and not inflow.is_over:
            self._wait()
        if inflow.buffer:
            try:
                item: T = inflow.take()
            except BaseException:
                self.close()
                raise
            return item
        self._is_through = True
        if inflow.error is not None:
            error, inflow.error = inflow.error, None
            try:
                raise error
            finally:
                del error  # its traceback keeps this frame
        if inflow.is_cancelled:
            raise TaskCancelledError(f"{self.task_name} was cancelled.")
        raise StopIteration

    def _wait(self) -> None:
        if is_loop_running():
            raise MisuseError(
                f"the next item of {self.task_name} would be waited for in an event "
                f"loop, which would be blocked; call .remote() there, and write `async "
                f"for`."
            )
        inflow = self._inflow
        client, waiter = client_of_task(), get_ident()
        if client is not self._client:
            raise MisuseError(
                f"the stream of {self.task_name} belongs to another task; iterate it "
                f"in the one that has called .remote()."
            )
        client.note_wait(waiter, (inflow.task_id,))
        try:
            client.wait_until(lambda: bool(inflow.buffer) or inflow.is_over)
        finally:
            if inflow.is_over:
                client.end_wait(waiter)
            else:
                # The driver cannot know that nobody waits any more.
                client.note_wait(waiter, ())

    def __enter__(self) -> BlockingStream[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        inflow = self._inflow
        if not inflow.is_over and inflow.close():
            self._client.withdraw_soon(inflow.task_id)

    def close(self) -> None:
        """Stop the generator and drop the items that were not taken; idempotent."""
        self._is_through = True
        self._inflow.cancel()

    def cancel(self) -> bool:
        """Stop the generator; False if it had ended before."""
        if self._inflow.is_over:
            return False
        self._inflow.cancel()
        return True

    def why(self) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the stream of {self.task_name}")


def stream_in_task(site: Site, payload: bytes) -> Any:
    """Start a child that is a generator; gives the kind of stream that fits.

    Raises:
        MisuseError: no task runs, but what one has left behind.
    """
    client = client_of_task()
    start = partial(client.submit, site, payload)
    return request_stream(client, site.spec.name, site.window, start)


def request_stream(
    client: Client, name: str, size: int, start: Callable[[Receiver], int]
) -> Any:
    """The kind of stream that fits, of what a task asks for.

    Args:
        client: of the task whose code asks.
        name: what the stream is called.
        size: how many items it may be ahead.
        start: makes the request, given who waits for its end; gives its number.
    """
    stream: Any
    if is_loop_running():
        import asyncio

        from aiogpu.api.stream import Stream

        loop = asyncio.get_running_loop()
        stream = Stream(name, client, size, loop, client.waits)
        inflow: ItemBuffer = stream.inflow
    else:
        inflow = ItemBuffer(name, _Source(client), size)
        stream = BlockingStream(inflow, client)
    receiver: Receiver = inflow
    if passing and services.client is None:
        from aiogpu.runtime.callers.caller import carrying

        receiver = carrying(inflow)
    inflow.task_id = start(receiver)
    return stream


class _Source:
    """Reaches a child from plain code."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def demand(self, task: int, limit: int) -> None:
        """Let it yield so many items in all."""
        self._client.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop it."""
        self._client.withdraw(task)
