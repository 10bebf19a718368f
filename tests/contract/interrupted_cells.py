"""What cells of IPython run until they are interrupted."""

from __future__ import annotations

import asyncio

from tests.contract.tasks import add


async def submit(at: int) -> None:
    """Submit calls for ever without a pause, and tell when so many are submitted."""
    count = 0
    while True:
        if count == at:
            print("\nbegun", flush=True)
        add.remote(count, 0)
        count += 1


async def gather(at: int) -> None:
    """Await 4 000 calls, tell when one of them is answered, and do not end."""

    async def tell(number: int) -> None:
        if await add.remote(number, 0) == at:
            print("\nbegun", flush=True)

    calls = [tell(number) for number in range(4000)]
    await asyncio.gather(*calls, asyncio.Event().wait())
