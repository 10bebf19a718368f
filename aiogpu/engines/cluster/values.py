"""Values as the faces ask for them, for one event loop: what is shared, and fetched.

In the words of `engines.far.Far` this is all three: what was lent to this process,
what it gives to others, and the way to values that are not here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aiogpu.engines import ray
from aiogpu.engines.cluster.calls import Live
from aiogpu.engines.cluster.payload import IN_STORE, kept_in, made, stored
from aiogpu.engines.cluster.shared import Shared, known, shared_of
from aiogpu.errors import TaskCancelledError
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.serialization.references import PickledValue

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.observe.why import Why


class ClusterValues:
    """See above."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<ClusterValues of {self._engine!r}>"

    @property
    def far(self) -> ClusterValues:
        """Whose way to values this is."""
        return self

    @property
    def loans(self) -> ClusterValues:
        """What was lent to this process."""
        return self

    @property
    def shares(self) -> ClusterValues:
        """What it gives to others."""
        return self

    @property
    def link(self) -> ClusterValues:
        """The way to values."""
        return self

    @property
    def loop(self) -> AbstractEventLoop:
        """The event loop."""
        return self._engine.loop

    def loan(self, identity: int) -> Shared:
        """The value to which a handle is being unpickled."""
        return known(identity)

    def share(self, handle: Any) -> Shared:
        """Return what others refer to who are given a handle."""
        calls = self._engine.calls
        shared = shared_of(handle, calls.ref_of)
        self._note(handle, shared)
        if shared.is_promised:
            # It waits itself for what it was given.
            def settle() -> None:
                shared.take_over(shared_of(handle, calls.ref_of))

            calls.when_sent(handle.child, settle)
        return shared

    def promise(self) -> Shared:
        """The same before its task is started."""
        return Shared()

    def keep(self, shared: Shared, handle: Any) -> None:
        """The task of what was promised is started."""
        known_by_now = self.share(handle)
        self._note(handle, shared)
        known_by_now.when_known(lambda: shared.take_over(known_by_now))

    def _note(self, handle: Any, shared: Shared) -> None:
        """Have it forsaken with its call."""
        live = self._engine.calls.live.get(handle.child)
        if live is not None:
            live.shares.append(shared)

    def fail(self, shared: Shared, error: BaseException) -> None:
        """The task of what was promised is never started."""
        shared.fail(error)

    def drop(self, child: int, shared: Shared) -> None:
        """One of several results is cancelled: who needs it is told.

        Calls of other processes that were sent it already are given it.
        """
        error = TaskCancelledError("one of several results was cancelled.")
        shared.forsake(error)
        live = self._engine.calls.live.get(child)
        if live is not None:
            self.forsake(live, error, shared.part)

    def forsake(self, live: Live, error: Exception, part: int = -1) -> None:
        """A call's results will not be wanted any more, or one of them.

        What was sent to Ray and needs them is told at once, and stopped: Ray would
        tell it in other words, or not at all.
        """
        failed = pack_own_error(error)
        forsaken = [(live, part)]
        while forsaken:
            one, part = forsaken.pop()
            for shared in one.shares:
                if part in (-1, shared.part):
                    shared.forsake(error)
            for number, needed in one.needed_by:
                dependent = self._engine.calls.live.get(number)
                if dependent is None or part not in (-1, needed):
                    continue
                forsaken.append((dependent, -1))
                receiver = dependent.receiver
                self._engine.cancel(number)
                if receiver is not None:
                    receiver.reject(failed)

    def put(self, payload: bytes) -> Shared:
        """Have a value kept."""
        shared = Shared()
        shared.take(payload)
        return shared

    def fetch(self, value: int, receiver: Any) -> int:
        """Ask for a value; gives the question's number."""
        shared, calls = known(value), self._engine.calls
        live = Live("a value", receiver, self.loop.time())
        number = calls.begin(live)
        fetch = partial(self._fetch, shared, number)
        if shared.failed is None and shared.payload is None and shared.ref is not None:
            fetch()
        else:
            # Not at once: whoever asks notes the number first.
            calls.post(lambda: shared.when_known(fetch))
        return number

    def _fetch(self, shared: Shared, number: int) -> None:
        calls = self._engine.calls
        live = calls.live.get(number)
        if live is None:
            return
        failed, payload = shared.failed, shared.payload
        if failed is not None:
            calls.end(number, lambda receiver: receiver.reject(failed))
        elif payload is not None:
            calls.end(number, lambda receiver: receiver.receive(payload))
        else:
            live.is_borrowed = True
            calls.watch(number, (shared.as_ref(),))

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        shared = known(value)
        if shared.ref is not None:
            self._engine.calls.cancelling.cancel(shared.ref)

    def cancel(self, task: int) -> None:
        """Nobody wants an answer any more."""
        self._engine.cancel(task)

    async def why(self, name: str, task: int) -> Why:
        """Say why a task waits."""
        from aiogpu.observe.why import Why

        return await self._engine.why(task) or Why(name, task, "ended")

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task: the loop itself tells Ray so, when it is idle."""

    def end_wait(self, task: int) -> None:
        """It waits no longer."""

    def settle(self, task: int) -> None:
        """A task has ended."""

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of what this process sends; see `Engine.pack`.

        What is large goes into Ray's store at once, so that it is what it was now.
        """
        payload = packed_here(outgoing)
        kept = kept_in(payload)
        assert kept is not None, payload
        is_late = any(one.is_promised for one in kept.references)
        if outgoing.is_large and self._engine.is_open and not is_late:
            kept.ref = ray.keep(stored(payload))
            contents = payload.contents._replace(
                stream=b"", buffers=(), segment=IN_STORE
            )
            payload.contents = contents
        elif outgoing.buffers:
            copied = tuple(map(bytes, outgoing.buffers))
            payload.contents = payload.contents._replace(buffers=copied)
        return payload


def packed_here(outgoing: PickledValue) -> Payload:
    """A payload that refers to the sender's own buffers: it is to be sent at once."""
    references: tuple[Any, ...] = tuple(outgoing.references)
    contents = Contents(
        outgoing.stream,
        buffers=tuple(outgoing.buffers),  # type: ignore[arg-type]
        places=outgoing.places,
        returns=outgoing.returns,
    )
    needs: tuple[Any, ...] = tuple(one.share() for one in outgoing.handles)
    return made(contents, references, needs)
