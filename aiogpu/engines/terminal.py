"""Where a program that has joined a node shows what its tasks print there.

As in a program with a node of its own: a thread writes, an answer is told when the
lines before it are out, and a terminal that is slow slows the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from aiogpu.runtime.output.console import Console, Source
from aiogpu.wire.messages import Message, Printed

PATIENCE: Final = 5.0
"""Seconds that the last lines get to be written in."""


class Terminal:
    """See above.

    Args:
        loop: on which messages come.
        source: the connection; made to wait while the terminal does.
        take: is given what was held back.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: Source,
        take: Callable[[Message], None],
    ) -> None:
        self._console = Console(loop, is_shown=True)
        self._source = source
        self._take = take
        self._number = 0

    def __repr__(self) -> str:
        return f"<Terminal {self._console.written}/{self._number}>"

    def keeps(self, message: Message) -> bool:
        """Whether it takes a message: to show it, or to pass it on later."""
        if type(message) is Printed:
            console, stream = self._console, message.stream
            self._number = console.write(
                stream, message.text, self._source, message.worker
            )
            return True
        if self._number <= self._console.written:
            return False
        self._console.after(self._number, partial(self._take, message))
        return True

    def hold_nothing(self) -> None:
        """Pass on what was held back, and hold back nothing more."""
        self._console.hold_nothing()

    async def close(self) -> None:
        """Wait until all lines are out, or for `PATIENCE` seconds."""
        self._console.hold_nothing()
        await self._console.drain(PATIENCE)
        self._console.close()
