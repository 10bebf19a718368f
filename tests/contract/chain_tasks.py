"""Chains of calls, each of which needs the result of the one before it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiogpu


@aiogpu.remote
def increase(number: int) -> int:
    return number + 1


@aiogpu.remote
class Adder:
    """Does the same, one call after the other."""

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
    """What all of a chain needs in the end, and how that ends."""
    if how == "fails":
        return fail.remote()
    if how == "gives":
        return give.remote(0)
    if how == "is late":
        return wait_for_ever.options(timeout=0.2).remote()
    return wait_for_ever.remote()


def links(first: Any, length: int, adder: Any = None) -> list[Any]:
    """So many calls, each with the last one's handle as its argument."""
    call = (increase if adder is None else adder.increase).remote
    chain = [first]
    for _ in range(length):
        chain.append(call(chain[-1]))
    return chain[1:]


@aiogpu.remote
async def end_softly(how: str, length: int, has_actor: bool) -> list[str]:
    """How the links of a task's own chain end, by their type, each once."""
    adder = Adder.remote() if has_actor else None
    first = head(how)
    chain = links(first, length, adder)
    if how == "is cancelled":
        first.cancel()
    ended = await asyncio.gather(*chain, return_exceptions=True)
    assert adder is None or await adder.increase.remote(1) == 2
    return sorted({type(one).__name__ for one in ended})


@aiogpu.remote
def end_plainly(how: str, length: int, has_actor: bool) -> list[str]:
    """The same in plain code, which waits for the last one first."""
    adder = Adder.remote() if has_actor else None
    first = head(how)
    chain = links(first, length, adder)
    if how == "is cancelled":
        first.cancel()
    ended = {_outcome(one) for one in reversed(chain)}
    assert adder is None or aiogpu.get(adder.increase.remote(1)) == 2
    return sorted(ended)


def _outcome(handle: Any) -> str:
    try:
        return type(aiogpu.get(handle)).__name__
    except Exception as error:
        return type(error).__name__
