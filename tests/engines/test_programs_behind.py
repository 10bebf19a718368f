"""A program that is stopped (Ctrl-Z): its results do not pile up in the node."""

from __future__ import annotations

import asyncio
import os
import signal

import aiogpu
from tests.daemon.box import box
from tests.program import start

MANY = 1500
PROGRAM = """
    import asyncio, sys
    import aiogpu

    @aiogpu.remote
    def make(size):
        return bytes(size)

    async def main():
        async with aiogpu.init(address=sys.argv[1]):
            handles = [make.remote(200_000) for _ in range(int(sys.argv[2]))]
            print("submitted", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(sum(map(len, await asyncio.gather(*handles))), flush=True)

    asyncio.run(main())
"""


async def test_its_tasks_wait_until_it_goes_on() -> None:
    with box() as here:
        options = ("--num-cpus=2", "--num-gpus=0")
        await asyncio.to_thread(here.run, "start", "--head", *options)
        address = here.place.socket
        program = start(PROGRAM, address, str(MANY))
        try:
            assert program.stdout is not None
            said = await asyncio.to_thread(program.stdout.readline)
            os.kill(program.pid, signal.SIGSTOP)
            assert said == "submitted\n"
            await look_on(address)
            os.kill(program.pid, signal.SIGCONT)
            out, err = await asyncio.to_thread(program.communicate, timeout=100)
            assert out == f"{MANY * 200_000}\n", err
        finally:
            if program.poll() is None:
                program.kill()
                program.communicate()


async def look_on(address: str) -> None:
    """Wait until nothing runs any more, and see that some still wait."""
    async with aiogpu.init(address=address), asyncio.timeout(60):
        while True:
            status = await aiogpu.status()
            (client,) = [one for one in status.clients if one.running + one.waiting]
            if not client.running:
                break
        assert client.waiting > MANY // 2
        assert "to read the results" in status.waiting[0].reason
