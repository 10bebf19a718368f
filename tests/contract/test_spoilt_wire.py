"""What the fuzzer of the wire has found, said to the sockets of a real node.

Whoever says it is cut off or answered; the node serves all others meanwhile and after.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Final
from zlib import crc32

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.raw_client import RawClient, Service, all_is_free, service, watching
from tests.unit.wire.cases import CLIENT, NODE, WORKER, Case, kept
from tests.unit.wire.spoiling import frames_in

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

SAID: Final = {name: case for name, case in kept().items() if case.target == NODE}
FEW: Final = 8
"""Of those that end a worker so many with every change."""


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


def say(node: Service, case: Case, joins: bool) -> None:
    """Say it to the socket for programs, at once or as one that has joined."""
    with RawClient(node, greets=joins) as client, suppress(ConnectionError):
        data = case.data
        if joins:
            client.joined(only_looks=True)
            data = b"".join(frames_in(data)[1:])
        for chunk in case._replace(data=data).chunks:
            client.socket.sendall(chunk)
        client.socket.shutdown(socket.SHUT_WR)
        while client.socket.recv(1 << 16):
            pass


@pytest.mark.parametrize("joins", [False, True])
async def test_said_by_a_program_it_harms_nobody_else(
    node: Service, joins: bool
) -> None:
    async with watching(node):
        for case in SAID.values():
            saying = asyncio.to_thread(say, node, case, joins)
            served = tasks.add.remote(1, 2)
            await saying
            assert await served == 3


@aiogpu.remote(max_retries=0)
def say_as_a_worker(data: bytes) -> None:
    """Say it on the connection of this worker to its node, and no more."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(int(name)))
            with copy:
                if str(copy.getpeername()).endswith("node.sock"):
                    copy.sendall(data)
                    os._exit(0)
    raise LookupError("a worker has no connection to its node")


def of_workers(is_all: bool) -> list[bytes]:
    """What follows the greeting, in those that are not of another role."""
    found = [
        b"".join(frames_in(case.data)[1:])
        for _, case in sorted(SAID.items(), key=lambda it: crc32(it[0].encode()))
        if CLIENT.encode() not in case.data
    ]
    mine = {b"".join(case.data for case in kept().values() if case.target == WORKER)}
    said = [data for data in found if data]
    return said + sorted(mine) if is_all else said[:FEW]


@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_said_by_a_worker_it_ends_that_worker_alone(
    is_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = of_workers(is_all)
    assert len(said) >= FEW
    async with aiogpu.init(num_cpus=2, log_to_driver=False):
        for data in said:
            spoilt = say_as_a_worker.remote(data)
            served = tasks.add.remote(1, 2)
            assert await served == 3
            with suppress(aiogpu.AiogpuError):
                await spoilt
        await all_is_free()
        assert await tasks.add.remote(3, 4) == 7
    assert not any(record.exc_info for record in caplog.records)
