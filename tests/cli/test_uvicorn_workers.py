"""uvicorn with four workers, and one ledger of one GPU for all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote, unquote

import pytest

import aiogpu
from tests.cli.box import LIMIT, Box
from tests.contract import tasks
from tests.support.gate import Gate

httpx = pytest.importorskip("httpx", reason="httpx is not installed")


pytest.importorskip("uvicorn", reason="uvicorn is not installed")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A web application whose every worker joins the node of its box."""
    if scope["type"] == "lifespan":
        await receive()
        async with aiogpu.init(address="auto"):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    # `/pid` says which worker answers; `/hold/GATE/NAME` holds half a GPU until the
    # gate lets it go.
    _, what, *rest = scope["raw_path"].decode().split("/")
    answer = str(os.getpid())
    if what == "hold":
        gate, name = map(unquote, rest)
        answer = await tasks.gated.options(num_gpus=0.5).remote(gate, name)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer.encode()})


WORKERS = 4


@asynccontextmanager
async def serving(here: Box) -> AsyncIterator[asyncio.subprocess.Process]:
    """The server's first process; all its workers have joined."""
    command = ["-m", "uvicorn", "tests.cli.test_uvicorn_workers:app", "--lifespan=on"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        f"--workers={WORKERS}",
        f"--uds={here.directory}/web",
        env=here.variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(LIMIT):
            said, count = "", 0
            while count < WORKERS:
                line = (await process.stderr.readline()).decode()
                assert line, said
                said += line
                count = said.count("Application startup complete")
        yield process
    finally:
        await ended(process)


async def ended(process: asyncio.subprocess.Process) -> None:
    """End the server in order, and by force if it still has requests."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.communicate(), 10)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def clients(here: Box) -> AsyncIterator[dict[int, httpx.AsyncClient]]:
    """A connection to each of the workers, by its process id."""
    found: dict[int, httpx.AsyncClient] = {}
    opened = []
    try:
        async with asyncio.timeout(LIMIT):
            while len(found) < WORKERS:
                transport = httpx.AsyncHTTPTransport(uds=f"{here.directory}/web")
                client = httpx.AsyncClient(
                    transport=transport, base_url="http://box", timeout=LIMIT
                )
                opened.append(client)
                found[int((await client.get("/pid")).text)] = client
        yield found
    finally:
        for client in opened:
            await client.aclose()


async def shared(gate: Gate, inside: int, waiting: int) -> None:
    """Wait until so many are at the gate, and so many tasks wait for the GPU."""
    async with asyncio.timeout(LIMIT):
        while True:
            status = await aiogpu.status()
            assert status.devices[0].free >= 0
            if (len(gate.inside), status.waiting_count) == (inside, waiting):
                assert status.devices[0].free == 1 - inside / 2
                return


@pytest.mark.slow
@pytest.mark.either_loop
async def test_four_workers_share_one_gpu(here: Box, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=8", "--num-gpus=1")
    await asyncio.to_thread(here.run, *start)
    async with (
        aiogpu.init(address=here.place.socket),
        serving(here),
        clients(here) as workers,
    ):
        asked = {
            pid: asyncio.create_task(
                client.get(f"/hold/{quote(gate.path, safe='')}/{pid}")
            )
            for pid, client in workers.items()
        }
        await shared(gate, inside=2, waiting=2)
        first = set(gate.inside)

        # One of those that hold a half dies: its half goes to one that waits.
        killed = first.pop()
        os.kill(int(killed), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await asked.pop(int(killed))
        gate.forget(killed)
        await shared(gate, inside=2, waiting=1)
        while asked:
            pid = gate.inside.pop()
            gate.release(pid)
            assert (await asked.pop(int(pid))).text == pid
            gate.forget(pid)
            async with asyncio.timeout(LIMIT):
                while asked and not gate.inside:
                    await asyncio.sleep(0)
    await asyncio.to_thread(here.run, "stop")
    assert here.files == []
