"""`python -m benchmarks.soak.program ADDRESS SEED IN_FLIGHT [mortal]`: one program.

It opens or joins a node, and is then told "storm", "rest" and "end" in turn. ADDRESS is
"local" for a node of its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from typing import Any, Final

import aiogpu
from aiogpu.testing.leaks import Resources
from benchmarks.soak import books
from benchmarks.soak.channel import Channel
from benchmarks.soak.load import Load
from benchmarks.soak.node import OPTIONS
from benchmarks.soak.operation import Account

TELL_EVERY: Final = 1.0


class Program:
    """See above."""

    def __init__(self, channel: Channel, session: Any, load: Load) -> None:
        self._channel = channel
        self._node = session
        self._load = load
        self._stop = asyncio.Event()
        self._storm: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Do as it is told, until the end."""
        self._channel.tell("ready", pid=os.getpid())
        while True:
            heard = await self._channel.hear()
            match heard:
                case "storm":
                    self._stop.clear()
                    self._storm = asyncio.create_task(self._load.run(self._stop))
                case "rest":
                    wrong = await self._rest()
                    self._channel.tell("rested", unbalanced=wrong, **self._told())
                case _:
                    if not heard:
                        self._load.break_off()
                    await self._calm()
                    return

    async def tell_on(self) -> None:
        """Say again and again how far it has come."""
        while True:
            await asyncio.sleep(TELL_EVERY)
            self._channel.tell("account", **self._told())

    def _told(self) -> dict[str, Any]:
        return self._load.account.as_told()

    async def _calm(self) -> None:
        self._stop.set()
        if self._storm is not None:
            await self._storm

    async def _rest(self) -> list[str]:
        await self._calm()
        gc.collect()
        engine = self._node._session._engine
        if not hasattr(engine, "_open_driver"):
            return []  # the node's books hold what others want of it, too
        return await books.settled(books.inner(engine))


def minding(account: Account) -> Any:
    """A handler for what the loop finds wrong."""

    def handle(_: object, context: dict[str, Any]) -> None:
        # Of handles that were dropped nobody asks how they have ended.
        if "never retrieved" not in context.get("message", ""):
            account.wrong.append(f"the loop: {context!r:.1000}")

    return handle


async def main(address: str, seed: str, in_flight: int, is_mortal: bool) -> None:
    """Open or join, serve, and leave nothing."""
    channel = await Channel.open()
    account = Account(is_mortal, is_joined=address != "local")
    asyncio.get_running_loop().set_exception_handler(minding(account))
    before = Resources.take()
    options = OPTIONS if address == "local" else {}
    async with aiogpu.init(address=address, **options) as session:
        load = Load(seed, in_flight, account)
        program = Program(channel, session, load)
        notifier = asyncio.create_task(program.tell_on())
        await program.serve()
        notifier.cancel()
    gc.collect()
    left = Resources.take().since(before)
    channel.tell("ended", left=left, **account.as_told())


if __name__ == "__main__":
    where, drawn, flight, *how = sys.argv[1:]
    aiogpu.run(main(where, drawn, int(flight), "mortal" in how))
