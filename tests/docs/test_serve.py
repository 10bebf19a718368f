"""The examples of servers, run by real servers and called by a real client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.sandbox import open_sandbox
from tests.support.program import clean_environment

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = EXAMPLES / "08_serve.py"
WORKERS = ("-m", "uvicorn", "--app-dir", str(EXAMPLES), "--workers", "2")
LIMIT = 60
pytestmark = pytest.mark.either_loop


class Server:
    """The example as a process, and a client of it.

    Attributes:
        log: the output, complete once the server has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process, path: str) -> None:
        self.process = process
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path),
            base_url="http://server",
            timeout=LIMIT,
        )
        self.log = ""

    async def started(self, processes: int) -> None:
        """Wait until each process accepts requests."""
        assert self.process.stdout is not None
        while (
            self.log.count("Application startup complete") < processes
            or "Uvicorn running on" not in self.log
        ):
            line = (await self.process.stdout.readline()).decode()
            assert line, self.log
            self.log += line

    async def get(self, text: str) -> httpx.Response:
        return await self.client.get("/predict", params={"text": text})

    async def health(self) -> list[dict[str, object]]:
        answer = await self.client.get("/healthz")
        assert answer.status_code == 200, answer.text
        models: list[dict[str, object]] = answer.json()
        return models

    async def is_at(self, *batches: int) -> None:
        """Wait until the models run this number of batches and streams each."""
        while [model["batches"] for model in await self.health()] != [*batches]:
            await asyncio.sleep(0)

    async def end(self) -> int:
        """End the server by SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = await self.process.communicate()
        self.log += rest.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def running_server(
    place: Path,
    *command: str,
    variables: Mapping[str, str] | None = None,
    processes: int = 1,
) -> AsyncIterator[Server]:
    path = f"{place}/s"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(command or (str(PROGRAM),)),
        path,
        env=variables or clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    server = Server(process, path)
    try:
        async with asyncio.timeout(LIMIT):
            await server.started(processes)
            yield server
    finally:
        await server.client.aclose()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def descendants_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def workers(pid: int) -> list[psutil.Process]:
    found = []
    for each in descendants_of(pid):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if each.name().startswith("aiogpu-work"):
                found.append(each)
    return found


async def test_the_server_answers_and_rejects_bad_requests(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        texts = ["a" * n for n in range(1, 41)]
        answers = await asyncio.gather(*map(server.get, texts))
        assert [answer.json() for answer in answers] == [*range(1, 41)]
        bad = await server.get("")
        assert (bad.status_code, bad.json()) == (422, {"detail": "there is no text"})
        assert (await server.client.get("/predict")).status_code == 422
        idle = {"gpus": [0], "batches": 0}
        assert await server.health() == [idle, idle]


async def test_a_stream_stops_when_its_client_leaves(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        whole = await server.client.get("/spell", params={"text": "abc"})
        assert whole.text == "abc"
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        async with server.client.stream(
            "GET", "/spell", params={"text": "for ever"}
        ) as answer:
            seen = ""
            async for more in answer.aiter_text():
                seen += more
                if seen == "for ever":
                    break  # no more items: only the closed connection tells the server
            await server.is_at(1, 0)
        await server.is_at(0, 0)
        await server.end()
        assert "Traceback" not in server.log


async def test_a_client_that_disconnects_stops_its_call(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        # A call for each model: requests go to the least busy one.
        clients = [asyncio.create_task(server.get("for ever")) for _ in range(2)]
        # An earlier call could join one of these batches.
        await server.is_at(1, 1)
        assert (await server.get("others are answered")).json() == 19
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        await server.is_at(0, 0)
        # Two batches run at once: a third one starts when these have stopped.
        for client in [*clients, *clients]:
            assert client.cancelled()
            assert (await server.get("next")).json() == 4
        await server.end()
        assert "Traceback" not in server.log


async def test_a_model_that_dies_is_restarted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        dead = workers(server.process.pid)
        assert len(dead) >= 2
        for each in dead:
            each.kill()
        while True:
            answer = await server.client.get("/healthz")
            assert answer.status_code in (200, 503)
            if answer.status_code == 200:
                break
        assert (await server.get("again")).json() == 5
        assert not {each.pid for each in dead} & {
            each.pid for each in workers(server.process.pid)
        }


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
async def test_sigterm_leaves_nothing_behind(tmp_path: Path, is_busy: bool) -> None:
    async with running_server(tmp_path) as server:
        processes = descendants_of(server.process.pid)
        assert len(processes) > 2
        if is_busy:
            client = asyncio.create_task(server.get("for ever"))
            await server.is_at(1, 0)
        assert await server.end() in (0, -signal.SIGTERM)
        gone, alive = psutil.wait_procs(processes, timeout=5)
        assert (len(gone), alive) == (len(processes), [])
        assert "Application shutdown complete" in server.log
        if is_busy:
            with suppress(httpx.HTTPError):
                await client


async def test_server_processes_share_a_model_that_outlives_them(
    tmp_path: Path,
) -> None:
    command = (*WORKERS, "23_workers:app", "--uds")
    with open_sandbox() as sandbox:
        sandbox.run("start", "--head", "--num-gpus=1")
        async with running_server(
            tmp_path, *command, variables=sandbox.variables, processes=2
        ) as server:
            answers: list[dict[str, int]] = []

            async def ask(text: str) -> None:
                # A new connection each time, which either process may accept.
                closing = {"Connection": "close"}
                answer = await server.client.get(
                    "/score", params={"text": text}, headers=closing
                )
                answers.append(answer.json())

            while len({answer["server"] for answer in answers}) < 2:
                await asyncio.gather(*(ask("abc") for _ in range(4)))
            assert {answer["score"] for answer in answers} == {3}
            asked = sorted(answer["asked"] for answer in answers)
            assert asked == [*range(1, len(answers) + 1)]
            assert await server.end() == 0
            assert "Traceback" not in server.log
        listing, _ = sandbox.run("list", "actors")
        assert "model" in listing


@pytest.mark.parametrize("program", ["08_serve", "23_workers"])
def test_the_example_names_an_existing_extra(program: str) -> None:
    source = (EXAMPLES / f"{program}.py").read_text()
    (extra,) = re.findall(r"aiogpu\[(\w+)\]", source)
    project = (PROGRAM.parents[1] / "pyproject.toml").read_text()
    assert re.search(rf"^{extra} = \[.*fastapi", project, re.MULTILINE)
