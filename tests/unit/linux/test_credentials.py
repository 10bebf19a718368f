"""A server of another user is sent nothing, whoever connects to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aiogpu.client.references import Descriptors
from aiogpu.errors import NodeError
from aiogpu.linux.sockets import peer_credentials, user
from aiogpu.memory.control_page import ControlPage
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.zygote.keeper import Watch

OTHER = 3_000_000_000
"""A user id without a name; such large ones come from directory services."""


def test_the_kernel_tells_who_is_there() -> None:
    one, other = socket.socketpair()
    with one, other:
        told = peer_credentials(one)
    assert told == (os.getpid(), os.geteuid(), os.getegid())


def test_users_are_named_where_they_have_a_name() -> None:
    assert user(0) == "uid 0 (root)"
    assert user(OTHER) == f"uid {OTHER}"


def connect_channel(path: str) -> None:
    page = ControlPage.open(descriptor := ControlPage.create())
    os.close(descriptor)
    Channel(Interrupts(page)).connect(path, 7)


def connect_watch(path: str) -> None:
    Watch("keeper", 1, path, os.pidfd_open(os.getpid()))


def connect_descriptors(path: str) -> None:
    Descriptors(path, owner=7).receive(1)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # such a worker ends at once
@pytest.mark.parametrize(
    "connect", [connect_channel, connect_watch, connect_descriptors]
)
def test_a_worker_says_nothing_to_another_user(
    connect: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(20)
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        with pytest.raises(NodeError, match=f"listens at {path} .*nothing was sent"):
            connect(path)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(100) == b""
