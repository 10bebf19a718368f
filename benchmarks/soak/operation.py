"""One operation of the load, the account of all of them, and the load itself.

An operation starts work of one kind and says of each handle which ends are legal. An
operation that does not end within `LIMIT` hangs.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

import aiogpu
from benchmarks.soak.sandbox import LIMIT_VARIABLE, dump_all_stacks

LIMIT: Final = float(os.environ.get(LIMIT_VARIABLE, "120"))
"""Seconds that any handle may take; what is drawn takes a few at most."""
SHOWN: Final = 20
"""Wrong ends that are reported one by one."""
KILL_ERRORS: Final = (aiogpu.WorkerDiedError, aiogpu.ActorDiedError)
"""Legal for whatever runs where processes are killed."""
NODE_ERRORS: Final = (aiogpu.NodeDiedError, aiogpu.errors.NodeClosedError)
"""Legal where the node itself is ended."""
PAUSES: Final = (0, 0, 0.002, 0.02)
"""Seconds after which something is cancelled."""

T = TypeVar("T")
Error = type[BaseException]
Operate = Callable[["Operation"], Awaitable[None]]


@dataclass(slots=True)
class Account:
    """The outcomes of all operations of one program.

    Attributes:
        is_mortal: whether the node may end meanwhile.
        is_joined: whether other programs use it too.
        begun: how many handles were made.
        ends: how many of them ended how.
        wrong: ends that are not legal, in words.
        hung: handles that have not ended, in words.
    """

    is_mortal: bool = False
    is_joined: bool = False
    begun: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        counts = {"operations": self.operations, "ends": self.ends}
        told = {"wrong": self.wrong[:SHOWN], "hung": self.hung[:SHOWN]}
        return {"begun": self.begun, **counts, **told}


class Operation:
    """Work of one kind; it has ended when all its handles have.

    Attributes:
        random: draws what it does; the same for the same seed and number.
        number: tells it from others of its program.
        is_joined: whether other programs use its node too.
    """

    def __init__(self, name: str, number: int, seed: str, account: Account) -> None:
        self.name = name
        self.number = number
        self.random = Random(f"{seed}/{number}")
        self.is_joined = account.is_joined
        self._account = account
        self._open: list[tuple[str, weakref.ref[Any]]] = []

    def begin(self, what: str, handle: T) -> T:
        """Note a handle, which is then to end."""
        self._account.begun += 1
        self._open.append((what, weakref.ref(handle)))
        return handle

    async def cancel(self, handle: Any, part: float) -> tuple[Error, ...]:
        """Cancel it now and then, such a part of all; return what is then legal."""
        if self.random.random() >= part:
            return ()
        await asyncio.sleep(self.random.choice(PAUSES))
        handle.cancel()
        return (asyncio.CancelledError,)

    async def end(self, handle: Any, expected: object, *legal: Error) -> bool:
        """Wait for a handle without cancelling it; return whether it has a result."""
        await asyncio.wait([handle])
        if handle.cancelled():
            return self.note(handle, asyncio.CancelledError(), legal)
        if (error := handle.exception()) is not None:
            return self.note(handle, error, legal)
        return self.found(handle, handle.result(), expected)

    async def attempt(
        self, what: object, awaited: Awaitable[Any], expected: object, *legal: Error
    ) -> bool:
        """Await something, which a cancel of this wait cancels too."""
        try:
            result = await awaited
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            return self.note(what, error, legal)
        return self.found(what, result, expected)

    def drop(self) -> None:
        """Count a handle that nobody waits for: what it stands for goes on."""
        self._account.ends["dropped"] += 1

    def expect(self, what: str, is_so: bool) -> None:
        """Note what does not hold."""
        if not is_so:
            self._account.wrong.append(f"{self}: {what} does not hold")

    def found(self, what: object, result: object, expected: object) -> bool:
        """Count a result; return whether it is the right one."""
        is_right = expected(result) if callable(expected) else result == expected
        self._count("result", is_right, f"{what!r} gave {result!r:.200}")
        return is_right

    def note(
        self, what: object, error: BaseException, legal: tuple[Error, ...]
    ) -> bool:
        """Count an error, which is wrong unless it is legal. Returns False."""
        allowed = (*legal, *KILL_ERRORS)
        if self._account.is_mortal:
            allowed = (*allowed, *NODE_ERRORS)
            if isinstance(error.__cause__, NODE_ERRORS):
                # A pool is closed with its node, and says why.
                allowed = (*allowed, aiogpu.errors.MisuseError)
        detail = f"{what!r} raised {error!r:.600} caused by {error.__cause__!r:.600}"
        self._count(type(error).__name__, isinstance(error, allowed), detail)
        return False

    def _count(self, end: str, is_legal: bool, detail: str) -> None:
        self._account.ends[end] += 1
        if not is_legal:
            self._account.wrong.append(f"{self}: {detail}")

    async def run(self, operate: Operate) -> None:
        """Run the operation to its end, within the limit."""
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
    """Operations drawn by their weights one after the other, so many at a time."""

    def __init__(
        self,
        operations: Mapping[Operate, int],
        seed: str,
        in_flight: int,
        account: Account,
    ) -> None:
        self.account = account
        self._operations = operations
        self._seed = seed
        self._free = asyncio.Semaphore(in_flight)
        self._random = Random(seed)
        self._number = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Begin operations until it is to stop; then let all of them end."""
        async with asyncio.TaskGroup() as group:
            while await self._free.acquire() and not stop.is_set():
                weights = list(self._operations.values())
                (operate,) = self._random.choices(list(self._operations), weights)
                group.create_task(self._run_one(operate))
            self._free.release()

    async def _run_one(self, operate: Operate) -> None:
        self._number += 1
        name = operate.__name__
        try:
            operation = Operation(name, self._number, self._seed, self.account)
            await operation.run(operate)
        finally:
            self._free.release()
