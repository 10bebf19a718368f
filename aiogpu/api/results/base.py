"""What handles share, with and without an event loop; and their clients.

A handle can decode its result, travel inside arguments and results, and name the owner
of its task. Its `HandleClient` knows where the value lives, and is told of waits: the
handles of a program share one. Light to import: must not import asyncio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from aiogpu.api.usage_errors import NotItsResult
from aiogpu.errors import DeserializationError, TaskCancelledError
from aiogpu.serialization.references import add_handle
from aiogpu.serialization.serializer import load_result

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aiogpu.api.results.reports import ReportBuffer
    from aiogpu.client.interface import Outcome, Shareable, ValueStore, Waits
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


OF_A_LIST: Final = "for a list: a handle inside another argument is not replaced"
"""The reason why a task got a handle instead of a result as an argument."""


class Owner(Protocol):
    """The starter of a handle's task, such as a session or an actor."""

    def cancel(self, task: int) -> None:
        """Stop the task."""

    async def why(self, name: str, task: int) -> Why:
        """Return why the task waits, or its state."""


class StreamOwner(Owner, Protocol):
    """The owner of a stream's task."""

    def demand(self, task: int, limit: int) -> None:
        """Let the generator yield up to `limit` items in all."""


class Reporting:
    """The receiver of a task's reports; see `aiogpu.report`."""

    __slots__ = ()

    if TYPE_CHECKING:
        _reports: ReportBuffer

    @property
    def report_buffer(self) -> ReportBuffer:
        """The unread reports; the buffer is made at first use."""
        try:
            return self._reports
        except AttributeError:
            # Imported late: most tasks report nothing.
            from aiogpu.api.results.reports import ReportBuffer

            self._reports = ReportBuffer()  # type: ignore[misc]
            return self._reports

    def receive_report(self, lost: int, payload: bytes) -> None:
        """Take a report of the task; called by the engine."""
        self.report_buffer.receive(lost, payload)


# The client's side of a handle.


class HandleClient:
    """The client of handles whose values are in this process.

    So it is on an embedded and an inline node.

    Attributes:
        store: the store of values if other processes keep them, else None.
        is_borrowed: the handle was received from another program or task.
        has_waits: the client is told of waits, and the handle may be settled in a
            thread other than its event loop's.
    """

    __slots__ = ("_waits", "has_waits", "store")

    is_borrowed: ClassVar[bool] = False

    def __init__(
        self, store: ValueStore | None = None, waits: Waits | None = None
    ) -> None:
        self.store = store
        self._waits = waits
        self.has_waits = waits is not None

    def share(self, handle: Any) -> Reference:
        """Return the value that other holders of the handle refer to."""
        # Imported late: only handles inside arguments and results need it.
        from aiogpu.runtime.objects.values import Value

        value = Value(handle.task_name, handle.task_id)
        if handle.raw is not None:
            value.settle(handle.raw)
        elif handle.cancelled():
            value.settle(_cancelled(handle))
        elif handle.error is not None:
            value.settle(handle.error)
        else:
            value.stop = handle.cancel
        return value

    def on_submitted(self, handle: Any) -> None:
        """Note that a task was submitted whose handle was shared before."""

    def settle_shared(self, handle: Any, outcome: Outcome) -> None:
        """Settle the shared value; other holders may wait for it."""
        handle.shared.settle(outcome)

    def cancel_shared(self, handle: Any) -> None:
        """Settle the shared value of a cancelled handle."""
        self.settle_shared(handle, _cancelled(handle))

    def fetch(self, handle: Any) -> None:
        """Request the value, if it comes only on request."""

    def begin_wait(self, handle: Any) -> None:
        """Note that code on an event loop waits for the handle."""
        if self._waits is not None:
            self._waits.begin_wait(handle.task_id)

    def end_wait(self, handle: Any) -> None:
        """Note that such a wait has ended before the task."""
        if self._waits is not None:
            self._waits.end_wait(handle.task_id)

    def end_waits(self, handle: Any) -> None:
        """Note that the task has ended, and so have all waits for the handle."""
        if self._waits is not None:
            self._waits.settle(handle.task_id)


class RemoteClient(HandleClient):
    """The client of handles whose values other processes keep.

    Other processes refer to a result by an id that this process chooses and sends to
    the node. While a program joins its node, a handle may be shared before its task is
    submitted: then the id is promised, and the node learns the task of the id once the
    task has a number.
    """

    __slots__ = ("_promised", "_shares")

    def __init__(self, store: ValueStore, waits: Waits | None = None) -> None:
        super().__init__(store, waits)
        self._shares = store.shares
        self._promised: set[int] | None = None

    def share(self, handle: Any) -> Reference:
        """Return the reference by which other holders share the result."""
        if handle.task_id or handle.done():
            return self._shares.share(handle)
        promise = self._shares.promise()
        self._promised = self._promised or set()
        self._promised.add(promise.id)
        return promise

    def on_submitted(self, handle: Any) -> None:
        """Note that a task was submitted whose handle was shared before."""
        if self._take_promise(handle):
            self._shares.keep(handle.shared, handle)

    def settle_shared(self, handle: Any, outcome: Outcome) -> None:
        """Fail a promise whose task is never submitted; the node settles the others."""
        if isinstance(outcome, Exception) and self._take_promise(handle):
            self._shares.fail(handle.shared, outcome)

    def _take_promise(self, handle: Any) -> bool:
        """Forget the promise of a handle's value; return False if there is none."""
        if not self._promised or handle.shared.id not in self._promised:
            return False
        self._promised.discard(handle.shared.id)
        return True

    def cancel_shared(self, handle: Any) -> None:
        """Settle the shared value of a cancelled handle."""
        super().cancel_shared(handle)
        if handle.part >= 0:
            # The call may go on for its other results.
            self._shares.drop(handle.task_id, handle.shared)


class BorrowedClient(HandleClient):
    """The client, and the owner, of a handle received from another program or task.

    The value is requested when code waits for the handle or asks whether it is done.

    Attributes:
        reference: the value behind the handle.
        store: fetches the value from another process; None for a value of this process.
        why: returns why the task that makes the value waits.
    """

    __slots__ = ("reference", "why")

    is_borrowed: ClassVar[bool] = True

    def __init__(
        self,
        reference: Any,
        store: ValueStore | None,
        why: Callable[[str, int], Coroutine[Any, Any, Why]],
        waits: Waits | None = None,
    ) -> None:
        super().__init__(store, waits)
        self.has_waits = True
        self.reference = reference
        self.why = why

    def share(self, _handle: object) -> Reference:
        """Return the value that other holders of the handle refer to."""
        return self.reference  # type: ignore[no-any-return]

    def settle_shared(self, handle: Any, outcome: Outcome) -> None:
        """Settle the shared value, unless the node does."""
        if self.store is None:
            super().settle_shared(handle, outcome)

    def fetch(self, handle: Any) -> None:
        """Request the value unless it has arrived or was requested already."""
        if self.store is not None and not handle.task_id and not handle.has_ended():
            handle.task_id = self.store.fetch(self.reference.id, handle)

    def begin_wait(self, handle: Any) -> None:
        """Request the value, and note that code on an event loop waits for it."""
        self.fetch(handle)
        if not handle.has_ended():
            super().begin_wait(handle)

    def cancel(self, request: int) -> None:
        """Stop the task that makes the value, and withdraw the request for it."""
        if self.store is not None:
            self.store.cancel(request)
            self.store.discard(self.reference.id)
        elif self.reference.stop is not None:
            self.reference.stop()


def _cancelled(handle: Shareable) -> TaskCancelledError:
    return TaskCancelledError(f"{handle.task_name} was cancelled.")


LOCAL: Final = HandleClient()
"""The client of handles of an embedded node, which hears of no waits."""


def client_for(store: ValueStore | None, waits: Waits | None = None) -> HandleClient:
    """Return the client of handles of a program or a task.

    Args:
        store: the store of values if other processes keep them, else None.
        waits: who is told of waits on the event loop; None for nobody.
    """
    if store is not None:
        return RemoteClient(store, waits)
    return LOCAL if waits is None else HandleClient(None, waits)


# Handles.


UNREAD: Final[Any] = object()
"""The value of a handle before the result is unpickled."""


class HandleBase(Reporting, NotItsResult):
    """The common base of handles in plain tasks and on event loops.

    Attributes:
        task_name: name of the task.
        task_id: number of the task; 0 before the task is submitted.
        client: knows where the value lives, and is told of waits.
        part: index among several results of the task; -1 for a single result.
        raw: the pickled value; None before it has arrived.
        shared: the value that other holders of the handle refer to; None without other
            holders.
        restore: unpickles a handle. Set by `api.calls`, which makes all handles and so
            imports this module.
    """

    __aiogpu_handle__ = True

    restore: ClassVar[Callable[..., Any]]

    if TYPE_CHECKING:
        task_name: str
        task_id: int
        client: HandleClient
        part: int
        raw: bytes | None
        shared: Reference | None
        _value: Any
        _error: Exception | None

    else:
        __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        identity = add_handle(self.task_name, self.share)
        return HandleBase.restore, (identity, self.task_name)

    def on_submitted(self, number: int) -> None:
        """Note the number of the submitted task."""
        self.task_id = number
        if self.shared is not None:
            self.client.on_submitted(self)

    def share(self) -> Reference:
        """Return the value that other holders of this handle refer to."""
        if self.shared is None:
            self._keep_alive()
            self.shared = self.client.share(self)
        return self.shared

    def stand_for(self, reference: Reference) -> None:
        """Note the reference behind a handle that came from another process."""
        self._keep_alive()
        self.shared = reference

    def _keep_alive(self) -> None:
        """Keep the work going even if all local waiters withdraw."""

    def _decode(self) -> None:
        """Unpickle the result; the error of that becomes the handle's."""
        try:
            self._value = load_result(self.raw)  # type: ignore[arg-type]
        except DeserializationError as error:
            self._value, self._error = None, error


def cut_frames(error: BaseException) -> None:
    """Cut the frames of aiogpu above a task's error, so that it is raised at the await.

    Call this in an `except` block that ends with a bare `raise`, which adds no frame.
    Another error, raised by aiogpu itself, keeps its frames.
    """
    last, trace = "", error.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"] in _CUT:
        last, trace = trace.tb_frame.f_code.co_name, trace.tb_next
    if last in _RAISING:
        error.__traceback__ = trace


_CUT: Final = frozenset(
    {
        "aiogpu.api.portal.handle",
        "aiogpu.api.portal.calls",
        "aiogpu.api.results.blocking",
        "aiogpu.api.results.handle",
        "aiogpu.api.results.wait",
        "aiogpu.sync",
    }
)
"""The modules between an await or `get` and a task's error."""


_RAISING: Final = frozenset(
    {"__await__", "await_end", "result", "results_of", "<listcomp>", "get"}
)
"""The functions there that raise a task's error."""
