"""A program that is stopped (Ctrl-Z): its results do not pile up in the node."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil

import aiogpu
from tests.cli.service.box import box
from tests.support.program import start
from tests.support.until import until

MANY = 3000
STOPPED = psutil.STATUS_STOPPED
PROGRAM = """
    import asyncio, os, signal, sys
    import aiogpu

    @aiogpu.remote
    def make(size):
        return bytes(size)

    async def main():
        async with aiogpu.init(address=sys.argv[1]):
            handles = [make.remote(200_000) for _ in range(int(sys.argv[2]))]
            stop = lambda _: os.kill(os.getpid(), signal.SIGSTOP)
            handles[0].add_done_callback(stop)
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
            await until(lambda: psutil.Process(program.pid).status() == STOPPED)
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
        assert client.waiting
        assert "to read the results" in status.waiting[0].reason
