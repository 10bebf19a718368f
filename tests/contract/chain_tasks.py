"""Chains of calls, each of which needs the result of the call before it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiogpu


@aiogpu.remote
def increase(number: int) -> int:
    return number + 1


@aiogpu.remote
class Adder:
    """Does the same as an actor."""

    def increase(self, number: int) -> int:
        return number + 1


@aiogpu.remote
def give(number: int) -> int:
    return number


@aiogpu.remote
def fail() -> int:
    raise KeyError("the head")


@aiogpu.remote
async def wait_for_ever() -> int:
    await asyncio.Event().wait()
    return 0


def head(how: str) -> Any:
    """Start the first call of a chain, which ends in this way."""
    if how == "fails":
        return fail.remote()
    if how == "gives":
        return give.remote(0)
    if how == "is late":
        return wait_for_ever.options(timeout=0.2).remote()
    return wait_for_ever.remote()


def links(first: Any, length: int, adder: Any = None) -> list[Any]:
    """Make so many calls, each with the previous call's handle as its argument."""
    call = (increase if adder is None else adder.increase).remote
    chain = [first]
    for _ in range(length):
        chain.append(call(chain[-1]))
    return chain[1:]


@aiogpu.remote
async def end_softly(how: str, length: int, has_actor: bool) -> list[str]:
    """Return the types of the results and errors of a task's own chain."""
    adder = Adder.remote() if has_actor else None
    first = head(how)
    chain = links(first, length, adder)
    if how == "is cancelled":
        first.cancel()
    ended = await asyncio.gather(*chain, return_exceptions=True)
    assert adder is None or await adder.increase.remote(1) == 2
    return sorted({type(end).__name__ for end in ended})


@aiogpu.remote
def end_plainly(how: str, length: int, has_actor: bool) -> list[str]:
    """Do the same in plain code, which waits for the last call first."""
    adder = Adder.remote() if has_actor else None
    first = head(how)
    chain = links(first, length, adder)
    if how == "is cancelled":
        first.cancel()
    ended = {_outcome(handle) for handle in reversed(chain)}
    assert adder is None or aiogpu.get(adder.increase.remote(1)) == 2
    return sorted(ended)


def _outcome(handle: Any) -> str:
    try:
        return type(aiogpu.get(handle)).__name__
    except Exception as error:
        return type(error).__name__
