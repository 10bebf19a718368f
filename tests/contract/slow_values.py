"""A value that takes longer to unpickle than a turn of the loop has for that."""

from __future__ import annotations

import time

import aiogpu
from aiogpu.api.results.handle import DECODING

turns = 0
"""How often the loop has turned, as a test counts it."""
unpickled_in: list[int] = []
"""In which of them each value was unpickled."""


class SlowValue:
    """Large, so that it comes through shared memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = bytearray(1 << 19)

    def __reduce__(self) -> tuple[object, ...]:
        import pickle

        return make_again, (self.number, pickle.PickleBuffer(self.content))


def make_again(number: int, _: object) -> int:
    """Take its time."""
    until = time.perf_counter() + 2 * DECODING
    while time.perf_counter() < until:
        pass
    unpickled_in.append(turns)
    return number


@aiogpu.remote
def make_slow_value(number: int) -> SlowValue:
    """Give one."""
    return SlowValue(number)
