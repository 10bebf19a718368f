"""One operation of the load, and the account of what came of all of them.

An operation starts work of one kind and says of each handle which ends are legal. It
has ended when all its handles have; one that does not within `LIMIT` hangs.
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import aiogpu
from benchmarks.soak import stacks
from benchmarks.soak.box import LIMITING

LIMIT: Final = float(os.environ.get(LIMITING, "120"))
"""Seconds that any handle may take; what is drawn takes a few at most."""
TOLD: Final = 20
"""Wrong ends that are told one by one."""
OF_KILLS: Final = (aiogpu.WorkerDiedError, aiogpu.ActorDiedError)
"""Legal for whatever runs where processes are killed."""
OF_THE_NODE: Final = (aiogpu.NodeDiedError, aiogpu.errors.NodeClosedError)
"""Legal where the node itself is ended."""

T = TypeVar("T")


class Account:
    """What came of all operations of one program.

    Attributes:
        begun: how many handles were made.
        ends: how many of them ended how.
        wrong: ends that are not legal, in words.
        hung: handles that have not ended, in words.
        is_mortal: whether the node may end meanwhile.
        is_joined: whether other programs use it too.
    """

    def __init__(self, is_mortal: bool = False, is_joined: bool = False) -> None:
        self.begun = 0
        self.operations: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hung: list[str] = []
        self.is_mortal = is_mortal
        self.is_joined = is_joined

    def as_told(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "begun": self.begun,
            "operations": dict(self.operations),
            "ends": dict(self.ends),
            "wrong": self.wrong[:TOLD],
            "hung": self.hung[:TOLD],
        }


class Operation:
    """One of them.

    Attributes:
        hand: draws what it does; the same for the same seed and number.
        number: tells it from others of its program.
    """

    def __init__(self, name: str, number: int, seed: str, account: Account) -> None:
        self.name = name
        self.number = number
        self.hand = random.Random(f"{seed}/{number}")
        self._account = account
        self._open: list[tuple[str, weakref.ref[Any]]] = []

    @property
    def is_joined(self) -> bool:
        """Whether other programs use its node too."""
        return self._account.is_joined

    def begin(self, what: str, handle: T) -> T:
        """Take note of a handle, which is then to end."""
        self._account.begun += 1
        self._open.append((what, weakref.ref(handle)))
        return handle

    async def end(
        self, handle: Any, expected: object, *legal: type[BaseException]
    ) -> bool:
        """Wait for a handle's end without asking for it; whether it has a result."""
        await asyncio.wait([handle])
        if handle.cancelled():
            return self.note(handle, asyncio.CancelledError(), legal)
        error = handle.exception()
        if error is not None:
            return self.note(handle, error, legal)
        return self.found(handle, handle.result(), expected)

    async def attempt(
        self,
        what: object,
        awaited: Awaitable[Any],
        expected: object,
        *legal: type[BaseException],
    ) -> bool:
        """The same of what is awaited and may be cancelled by that."""
        try:
            result = await awaited
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            return self.note(what, error, legal)
        return self.found(what, result, expected)

    def drop(self, handle: object) -> None:
        """Count a handle that nobody waits for: what it stands for goes on."""
        self._account.ends["dropped"] += 1

    def see(self, what: str, is_so: bool) -> None:
        """Take note of what does not hold."""
        if not is_so:
            self._account.wrong.append(f"{self}: {what} does not hold")

    def found(self, what: object, result: object, expected: object) -> bool:
        """Count a result; whether it is the right one."""
        is_right = expected(result) if callable(expected) else result == expected
        self._count("result", is_right, f"{what!r} gave {result!r:.200}")
        return is_right

    def note(
        self, what: object, error: BaseException, legal: tuple[type[BaseException], ...]
    ) -> bool:
        """Count an error, which is wrong unless it is one of these. Gives False."""
        allowed = (*legal, *OF_KILLS)
        if self._account.is_mortal:
            allowed = (*allowed, *OF_THE_NODE)
            if isinstance(error.__cause__, OF_THE_NODE):
                # A pool is closed with its node, and says why.
                allowed = (*allowed, aiogpu.errors.MisuseError)
        told = f"{what!r} raised {error!r:.600} caused by {error.__cause__!r:.600}"
        self._count(type(error).__name__, isinstance(error, allowed), told)
        return False

    def _count(self, end: str, is_legal: bool, told: str) -> None:
        self._account.ends[end] += 1
        if not is_legal:
            self._account.wrong.append(f"{self}: {told}")

    async def run(self, operate: Callable[[Operation], Awaitable[None]]) -> None:
        """To its end, within the limit."""
        self._account.operations[self.name] += 1
        try:
            async with asyncio.timeout(LIMIT) as limit:
                await operate(self)
        except TimeoutError as error:
            if not limit.expired():
                self.note("the operation", error, ())
            else:
                self._account.hung.append(await self._hanging())
        except Exception as error:  # noqa: BLE001
            self.note("the operation", error, ())

    async def _hanging(self) -> str:
        told, hanging = [], []
        for what, reference in self._open:
            handle = reference()
            is_done = getattr(handle, "done", None)
            if handle is not None and not (is_done and is_done()):
                try:
                    async with asyncio.timeout(10):
                        why = str(await handle.why())
                except Exception as error:  # noqa: BLE001
                    why = repr(error)
                told.append(f"{what} {handle!r}: {why}")
                hanging.append(handle)
        await stacks.asked()
        for handle in hanging:
            if hasattr(handle, "cancel"):
                handle.cancel()
        left = "; ".join(told) or "no handle is open, but it does not end"
        return f"{self} has not ended in {LIMIT:g} s: {left}"

    def __str__(self) -> str:
        return f"{self.name} {self.number}"
