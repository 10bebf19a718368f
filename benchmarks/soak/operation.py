"""An operation of the load, the account of all operations, and the load itself.

An operation starts work of one kind and states for each handle which ends are legal. An
operation that does not end within `LIMIT` hangs.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final, TypeVar

import aiogpu
from benchmarks.soak.sandbox import DEFAULT_LIMIT, LIMIT_VARIABLE, dump_all_stacks

LIMIT: Final = float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
"""Seconds that any handle may take."""
SHOWN: Final = 20
"""The number of wrong ends that are reported."""
KILL_ERRORS: Final = (aiogpu.WorkerDiedError, aiogpu.ActorDiedError)
"""Always legal, since processes are killed."""
NODE_ERRORS: Final = (aiogpu.NodeDiedError, aiogpu.errors.NodeClosedError)
"""Legal if the node itself is ended."""
PAUSES: Final = (0, 0, 0.002, 0.02)
"""Seconds from a start to a cancel."""

T = TypeVar("T")
Error = type[BaseException]
Operate = Callable[["Operation"], Awaitable[None]]


@dataclass(slots=True)
class Account:
    """The outcomes of all operations of one program.

    Attributes:
        is_mortal: the node may end meanwhile.
        is_joined: other programs use the node too.
        begun: number of handles.
        operations: number of operations of each kind.
        ends: number of handles that ended in each way.
        wrong: descriptions of illegal ends.
        hung: descriptions of handles that have not ended.
    """

    is_mortal: bool = False
    is_joined: bool = False
    begun: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the first errors."""
        counts = {"begun": self.begun, "operations": self.operations, "ends": self.ends}
        return {**counts, "wrong": self.wrong[:SHOWN], "hung": self.hung[:SHOWN]}


class Operation:
    """Work of one kind, which has ended when all its handles have.

    Attributes:
        random: the operation's choices; the same for the same seed and number.
        number: unique within the program.
        is_joined: other programs use the node too.
    """

    def __init__(self, name: str, number: int, seed: str, account: Account) -> None:
        self.name = name
        self.number = number
        self.random = Random(f"{seed}/{number}")
        self.is_joined = account.is_joined
        self._account = account
        self._open: list[tuple[str, weakref.ref[Any]]] = []

    def begin(self, what: str, handle: T) -> T:
        """Record a new handle, which must end."""
        self._account.begun += 1
        self._open.append((what, weakref.ref(handle)))
        return handle

    async def cancel(self, handle: Any, probability: float) -> tuple[Error, ...]:
        """Cancel the handle with this probability; return the errors that are legal."""
        if self.random.random() >= probability:
            return ()
        await asyncio.sleep(self.random.choice(PAUSES))
        handle.cancel()
        return (asyncio.CancelledError,)

    async def end(self, handle: Any, expected: object, *legal: Error) -> bool:
        """Wait for a handle without cancelling it; return True for the right result."""
        await asyncio.wait([handle])
        if handle.cancelled():
            return self.note(handle, asyncio.CancelledError(), legal)
        if (error := handle.exception()) is not None:
            return self.note(handle, error, legal)
        return self.found(handle, handle.result(), expected)

    async def attempt(
        self, what: object, awaited: Awaitable[Any], expected: object, *legal: Error
    ) -> bool:
        """Await something that a cancel of this wait cancels as well."""
        try:
            result = await awaited
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            return self.note(what, error, legal)
        return self.found(what, result, expected)

    def drop(self) -> None:
        """Count a handle that the program drops; its task continues."""
        self._account.ends["dropped"] += 1

    def expect(self, claim: str, holds: bool) -> None:
        """Record a claim that does not hold."""
        if not holds:
            self._account.wrong.append(f"{self}: {claim} does not hold")

    def found(self, what: object, result: object, expected: object) -> bool:
        """Count a result; return True if it is the expected one."""
        is_right = expected(result) if callable(expected) else result == expected
        self._count("result", is_right, f"{what!r} gave {result!r:.200}")
        return is_right

    def note(
        self, what: object, error: BaseException, legal: tuple[Error, ...]
    ) -> bool:
        """Count an error, which must be legal. Always returns False."""
        allowed = (*legal, *KILL_ERRORS)
        if self._account.is_mortal:
            allowed = (*allowed, *NODE_ERRORS)
            if isinstance(error.__cause__, NODE_ERRORS):
                # A pool closes with its node, and its error names the cause.
                allowed = (*allowed, aiogpu.errors.MisuseError)
        detail = f"{what!r} raised {error!r:.600} caused by {error.__cause__!r:.600}"
        self._count(type(error).__name__, isinstance(error, allowed), detail)
        return False

    def _count(self, end: str, is_legal: bool, detail: str) -> None:
        self._account.ends[end] += 1
        if not is_legal:
            self._account.wrong.append(f"{self}: {detail}")

    async def run(self, operate: Operate) -> None:
        """Run the operation to its end; report the handles that hang."""
        self._account.operations[self.name] += 1
        try:
            async with asyncio.timeout(LIMIT) as limit:
                await operate(self)
        except Exception as error:  # noqa: BLE001
            if isinstance(error, TimeoutError) and limit.expired():
                self._account.hung.append(await self._hanging())
            else:
                self.note("the operation", error, ())

    async def _hanging(self) -> str:
        reports, hanging = [], []
        for what, reference in self._open:
            handle = reference()
            is_done = getattr(handle, "done", None)
            if handle is not None and not (is_done and is_done()):
                try:
                    async with asyncio.timeout(10):
                        why = str(await handle.why())
                except Exception as error:  # noqa: BLE001
                    why = repr(error)
                reports.append(f"{what} {handle!r}: {why}")
                hanging.append(handle)
        await dump_all_stacks()
        for handle in hanging:
            if hasattr(handle, "cancel"):
                handle.cancel()
        left = "; ".join(reports) or "no handle is open, but it does not end"
        return f"{self} has not ended in {LIMIT:g} s: {left}"

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


class Load:
    """Random operations by weight, `in_flight` of them at a time."""

    def __init__(
        self,
        operations: Mapping[Operate, int],
        seed: str,
        in_flight: int,
        account: Account,
    ) -> None:
        self._account = account
        self._operations = operations
        self._seed = seed
        self._free = asyncio.Semaphore(in_flight)
        self._random = Random(seed)
        self._numbers = count(1)

    async def run(self, stop: asyncio.Event) -> None:
        """Begin operations until `stop` is set; then wait for all of them."""
        weights = list(self._operations.values())
        async with asyncio.TaskGroup() as group:
            while await self._free.acquire() and not stop.is_set():
                (operate,) = self._random.choices(list(self._operations), weights)
                about = operate.__name__, next(self._numbers), self._seed
                task = group.create_task(Operation(*about, self._account).run(operate))
                task.add_done_callback(lambda _: self._free.release())
            self._free.release()
