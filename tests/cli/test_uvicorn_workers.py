"""uvicorn with several workers that share one GPU of a service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import aiogpu
from tests.cli.sandbox import LIMIT, Sandbox
from tests.contract import tasks
from tests.support.gate import Gate

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")

from fastapi import FastAPI, Request  # noqa: E402

from aiogpu.fastapi import cancel_on_disconnect, lifespan  # noqa: E402

app = FastAPI(lifespan=lifespan(address="auto"))


@app.get("/pid")
async def pid() -> int:
    """The process id of the worker that answers."""
    return os.getpid()


@app.get("/hold/{gate}/{name}")
async def hold(request: Request, gate: str, name: str) -> str:
    """Hold half a GPU until the gate releases it."""
    call = tasks.gated.options(num_gpus=0.5).remote(gate.replace("!", "/"), name)
    return await cancel_on_disconnect(request, call)


@asynccontextmanager
async def serving(
    sandbox: Sandbox, workers: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The server's first process, once all its workers have joined."""
    command = ["-m", "uvicorn", "tests.cli.test_uvicorn_workers:app", "--lifespan=on"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        f"--workers={workers}",
        f"--uds={sandbox.directory}/web",
        env=sandbox.variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        await wait_for_line(process, "Application startup complete", workers)
        yield process
    finally:
        await ended(process)


async def wait_for_line(
    process: asyncio.subprocess.Process, words: str, times: int = 1
) -> None:
    """Read the server's output until it contains this text."""
    assert process.stderr is not None
    message = ""
    async with asyncio.timeout(LIMIT):
        while message.count(words) < times:
            line = (await process.stderr.readline()).decode()
            assert line, message
            message += line


async def ended(process: asyncio.subprocess.Process) -> None:
    """End the server in order; kill it if it still has requests."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.communicate(), 10)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def clients(
    sandbox: Sandbox, workers: int, but: Collection[int] = ()
) -> AsyncIterator[dict[int, httpx.AsyncClient]]:
    """A connection to each worker, by process id, except to the old ones in `but`."""
    result: dict[int, httpx.AsyncClient] = {}
    opened = []
    try:
        async with asyncio.timeout(LIMIT):
            while len(result) < workers:
                transport = httpx.AsyncHTTPTransport(uds=f"{sandbox.directory}/web")
                client = httpx.AsyncClient(
                    transport=transport, base_url="http://box", timeout=LIMIT
                )
                opened.append(client)
                pid = int((await client.get("/pid")).text)
                if pid not in but:
                    result[pid] = client
        yield result
    finally:
        for client in opened:
            await client.aclose()


def request_half_a_gpu(client: httpx.AsyncClient, gate: Gate, name: object) -> Any:
    """Request half a GPU until the gate releases `name`."""
    path = gate.path.replace("/", "!")
    return asyncio.create_task(client.get(f"/hold/{path}/{name}"))


async def wait_until_shared(gate: Gate, inside: int, waiting: int) -> None:
    """Wait until this many requests are at the gate, and this many tasks wait."""
    async with asyncio.timeout(LIMIT):
        while True:
            status = await aiogpu.status()
            assert status.devices[0].free >= 0
            if (len(gate.inside), status.waiting_count) == (inside, waiting):
                assert status.devices[0].free == 1 - inside / 2
                return


@pytest.mark.slow
@pytest.mark.either_loop
async def test_four_workers_share_one_gpu(sandbox: Sandbox, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=8", "--num-gpus=1")
    await asyncio.to_thread(sandbox.run, *start)
    async with (
        aiogpu.init(address=sandbox.place.socket),
        serving(sandbox, 4),
        clients(sandbox, 4) as workers,
    ):
        asked = {
            pid: request_half_a_gpu(client, gate, pid)
            for pid, client in workers.items()
        }
        await wait_until_shared(gate, inside=2, waiting=2)
        first = set(gate.inside)

        # A worker with a half dies: its half goes to a waiting task.
        killed = first.pop()
        os.kill(int(killed), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await asked.pop(int(killed))
        gate.forget(killed)
        await wait_until_shared(gate, inside=2, waiting=1)
        while asked:
            pid = gate.inside.pop()
            gate.release(pid)
            assert (await asked.pop(int(pid))).json() == pid
            gate.forget(pid)
            async with asyncio.timeout(LIMIT):
                while asked and not gate.inside:
                    await asyncio.sleep(0)
    await asyncio.to_thread(sandbox.run, "stop")
    assert sandbox.files == []


@pytest.mark.slow
@pytest.mark.either_loop
async def test_a_reload_and_a_shutdown_answer_pending_requests(
    sandbox: Sandbox, gate: Gate
) -> None:
    start = ("start", "--head", "--num-cpus=8", "--num-gpus=1")
    await asyncio.to_thread(sandbox.run, *start)
    async with (
        aiogpu.init(address=sandbox.place.socket),
        serving(sandbox, 2) as server,
        clients(sandbox, 2) as old,
    ):
        client, _ = old.values()
        asked = request_half_a_gpu(client, gate, "reload")
        await gate.entered("reload")
        server.send_signal(signal.SIGHUP)
        # The new workers start before the old ones end, which answer first.
        await wait_for_line(server, "Application startup complete")
        assert not asked.done()
        gate.release("reload")
        assert (await asked).json() == "reload"
        await wait_for_line(server, "Application startup complete")

        async with clients(sandbox, 2, but=old) as new:
            gate.forget("reload")
            remaining, stopped = (
                request_half_a_gpu(each, gate, pid) for pid, each in new.items()
            )
            names = [str(pid) for pid in new]
            await gate.entered(*names)
            remaining.cancel()  # its task is stopped
            while (await aiogpu.status()).devices[0].free < 0.5:
                await asyncio.sleep(0)
            server.terminate()
            await wait_for_line(server, "Waiting for connections to close")
            gate.release(names[1])
            assert (await stopped).json() == names[1]
        assert await server.wait() == 0
        while (status := await aiogpu.status()).devices[0].free < 1:
            await asyncio.sleep(0)
        assert {client.pid for client in status.clients} <= {os.getpid()}
    await asyncio.to_thread(sandbox.run, "stop")
    assert sandbox.files == []
