"""Who connects to a node, or for its shared memory, and is nobody it knows."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from aiogpu.engines.node_connection import NodeConnection
from aiogpu.memory.fd_passing import DescriptorSender
from aiogpu.observe.status_codec import status_codec
from aiogpu.serialization.payload import Contents, pack
from aiogpu.wire.codec import encode
from aiogpu.wire.messages import (
    FIRST_SEGMENT,
    NUMBER_BITS,
    OWNER_BITS,
    ChildDone,
    Close,
    Depart,
    Inquire,
    Put,
    Refused,
    descriptor_path,
)
from tests.contract import value_tasks
from tests.contract.node_here import Here, node_here
from tests.contract.raw_client import RawClient, Service
from tests.support.program import environment
from tests.support.until import until

np = pytest.importorskip("numpy")
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

SOON: Final = 0.05
LARGE: Final = 1 << 20


@pytest.fixture
async def here(no_leaks: None, runtime_directory: Path) -> AsyncIterator[Here]:
    async with node_here(runtime_directory) as opened:
        yield opened


def memory_of(here: Here) -> str:
    """The path of the socket for descriptors."""
    return descriptor_path(here.engine._supervisor.directory)


def connected(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(20)
    found.connect(path)
    return found


@pytest.mark.parametrize("greets", [False, True])
async def test_who_does_not_say_which_program_he_is_is_sent_away(
    greets: bool, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawClient(Service(here.path, os.getpid())) as known:
        await asyncio.to_thread(known.joined, only_looks=True)
        monkeypatch.setattr("aiogpu.runtime.callers.programs.WITHIN", SOON)
        with RawClient(Service(here.path, os.getpid()), greets=greets) as silent:
            (told,) = await asyncio.to_thread(silent.hear_all)
            assert isinstance(told, Refused)
            expected = f"was not said within {SOON:g} s which program this is"
            assert expected in told.reason
        known.say(Inquire(1, "resources", 0))
        answer = await asyncio.to_thread(known.hear, ChildDone)
        assert status_codec.load(answer.payload)["CPU"] == 2
    clients = here.engine._supervisor.clients
    await until(lambda: not clients.by_id)
    assert not clients._unnamed


async def test_a_program_says_at_once_which_it_is(tmp_path: Path) -> None:
    """Also where its loop is held up for long by what comes next."""
    line = NodeConnection(asyncio.get_running_loop(), print, print)  # nobody speaks
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        line.send(Depart())
        await line.connect(str(tmp_path / "s"), b"greeting", Close())
        accepted, _ = listening.accept()
        with accepted:
            accepted.setblocking(False)
            assert accepted.recv(100) == b"greeting" + encode(Close())
            await asyncio.sleep(0)
            assert accepted.recv(100) == encode(Depart())
            line.close()


async def test_who_says_nothing_gets_no_memory(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.objects.store.WITHIN", SOON)
    with connected(memory_of(here)) as silent:
        assert await asyncio.to_thread(silent.recv, 1) == b""


@pytest.mark.parametrize(
    "said", [b"\0", b"\xff" * 8, (1 << 26).to_bytes(8, "little"), bytes(8)]
)
async def test_who_is_nobody_gets_no_memory(said: bytes, here: Here) -> None:
    with connected(memory_of(here)) as stranger:
        stranger.sendall(said)
        assert await asyncio.to_thread(stranger.recv, 1) == b""


FORGER: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as forger:
    forger.settimeout(20)
    forger.connect(sys.argv[1])
    forger.sendall(int(sys.argv[2]).to_bytes(8, "little"))
    print(forger.recv(1))
"""


async def test_nobody_gets_memory_in_another_ones_name(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    async with here.join():
        large = np.ones(LARGE, np.uint8)
        number = next(iter(here.engine._supervisor.clients.by_id))
        # Of this process, but it has connected before.
        assert (await value_tasks.give.remote(large)).sum() == LARGE
        with connected(memory_of(here)) as second:
            second.sendall(number.to_bytes(8, "little"))
            assert await asyncio.to_thread(second.recv, 1) == b""
        forger = subprocess.Popen(
            [sys.executable, "-c", FORGER, memory_of(here), str(number)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        out, _ = await asyncio.to_thread(forger.communicate)
        assert out == "b''\n"
        assert f"refused shared memory to process {forger.pid}" in caplog.text
        for _ in range(3):
            large = await value_tasks.give.remote(large)
        assert large.sum() == LARGE


async def test_garbage_for_descriptors_harms_nobody_else(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiogpu")
    source = random.Random(5)
    # By this name it is seen where a copy of it is left behind.
    given = os.memfd_create("aiogpu-garbage")
    async with here.join():
        for turn in range(8):
            with RawClient(Service(here.path, os.getpid())) as client:
                await asyncio.to_thread(client.joined)
                with connected(memory_of(here)) as memory:
                    memory.sendall(client.number.to_bytes(8, "little"))
                    for _ in range(turn):
                        data = source.randbytes(source.randrange(1, 40))
                        socket.send_fds(memory, [data], [given] * source.randrange(4))
                    client.say(put_of(client.number))
                    assert await asyncio.to_thread(client.hear, Refused)
            large = np.full(LARGE, turn, np.uint8)
            assert (await value_tasks.give.remote(large) == turn).all()
    os.close(given)
    clients = here.engine._supervisor.clients
    await until(lambda: not clients.by_id)


@pytest.mark.parametrize("whose", ["the node", "a program"])
async def test_nobody_claims_a_segment_of_another(whose: str, here: Here) -> None:
    """Others would read that in place of what its owner writes."""
    place = Service(here.path, os.getpid())
    with RawClient(place) as owner, RawClient(place) as intruder:
        await asyncio.to_thread(owner.joined)
        welcome = await asyncio.to_thread(intruder.joined)
        claimed = 0 if whose == "the node" else owner.number
        answers = []
        for client, segments_of in ((intruder, claimed), (owner, owner.number)):
            put = put_of(client.number, segments_of)
            with connected(welcome.descriptors) as memory:
                pass_segment(memory, client.number, segments_of)
                client.say(put, Inquire(2, "resources", 0))
                answers.append(await asyncio.to_thread(client.hear, tuple))
    refused, told = answers
    assert isinstance(refused, Refused), refused
    assert "nobody has the segment" in refused.reason
    assert isinstance(told, ChildDone), told


@pytest.mark.parametrize("messages", [1, 3])
async def test_descriptors_that_nobody_speaks_of_are_closed(
    here: Here, messages: int
) -> None:
    given = os.memfd_create("aiogpu-unspoken")
    with RawClient(Service(here.path, os.getpid())) as client:
        await asyncio.to_thread(client.joined)
        with connected(memory_of(here)) as memory:
            memory.sendall(client.number.to_bytes(8, "little"))
            for _ in range(messages):
                socket.send_fds(memory, [b"\0"], [given] * 253)
            client.say(put_of(client.number))
            assert await asyncio.to_thread(client.hear, Refused)
    await until(lambda: not here.engine._supervisor.clients.by_id)
    assert held("aiogpu-unspoken") == 1
    os.close(given)


@pytest.mark.parametrize("depth", [30, 3000])
async def test_a_parcel_in_many_others_ends_who_sends_it(
    depth: int, here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    payload = b"x"
    for _ in range(depth):
        payload = pack(Contents(b"p", parts=(payload,)))
    async with here.join():
        with RawClient(Service(here.path, os.getpid())) as client:
            await asyncio.to_thread(client.joined)
            client.say(Put(-((client.number << NUMBER_BITS) + 1), payload))
            told = await asyncio.to_thread(client.hear, Refused)
            assert "a parcel within" in told.reason
        assert await value_tasks.give.remote(1) == 1
    assert not any(record.exc_info for record in caplog.records)


def held(name: str) -> int:
    """How many descriptors of this process lead to what is called so."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += name in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def pass_segment(memory: socket.socket, client: int, owner: int) -> None:
    """Pass a page as the first segment of a process, in the name of a client."""
    given = os.memfd_create("aiogpu-passed")
    os.ftruncate(given, 4096)
    memory.sendall(client.to_bytes(8, "little"))
    DescriptorSender(memory).send(first_segment(owner), given)
    os.close(given)


def first_segment(owner: int) -> int:
    """Id of the first segment that a process writes; the node's own is owner 0."""
    return FIRST_SEGMENT + (owner << OWNER_BITS) + 1


def put_of(client: int, owner: int | None = None) -> Put:
    """A value in the first segment of a process: its own, unless it claims another."""
    segment = first_segment(client if owner is None else owner)
    contents = Contents(stream=b"x", segment=segment, size=4096, spans=(0, 4096))
    return Put(-((client << NUMBER_BITS) + 1), pack(contents))
