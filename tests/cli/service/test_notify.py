"""The service manager is told what it understands, by files and abstract sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from aiogpu.daemon.readiness import Notifier


@pytest.fixture(params=["file", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"/tmp/agn-{os.getpid()}-{tmp_path.name[-8:]}"
    return f"@aiogpu-test-{os.getpid()}-{tmp_path.name[-8:]}"


def test_it_is_told(address: str) -> None:
    where = f"\0{address[1:]}" if address.startswith("@") else address
    environ = {"NOTIFY_SOCKET": address, "HOME": "/"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(where)
        try:
            notifier = Notifier.take(environ)
            notifier.send(READY=1, STATUS="serves at /there: {GPU: 2}")
        finally:
            if address.startswith("/"):
                os.unlink(address)
        said = manager.recv(1000)
    assert said == b"READY=1\nSTATUS=serves at /there: {GPU: 2}"
    assert environ == {"HOME": "/"}, "no worker speaks for the node"
    assert notifier.interval == 0


def test_without_a_manager_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Notifier.take({}).send(READY=1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("pid", "interval"),
    [("", 15.0), (os.getpid(), 15.0), (1, 0.0)],
    ids=["for all", "for us", "for another"],
)
def test_a_watchdog_and_whom_it_watches(pid: object, interval: float) -> None:
    environ = {"NOTIFY_SOCKET": "/there", "WATCHDOG_USEC": "30000000"}
    if pid:
        environ["WATCHDOG_PID"] = str(pid)
    assert Notifier.take(environ).interval == interval
    assert not environ


def test_a_watchdog_without_a_socket_is_none() -> None:
    assert Notifier.take({"WATCHDOG_USEC": "30000000"}).interval == 0


def test_a_manager_that_does_not_listen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier.take({"NOTIFY_SOCKET": f"{tmp_path}/n"}).send(READY=1)
    assert "cannot be told 'READY=1'" in caplog.text


def test_an_address_that_is_not_understood(caplog: pytest.LogCaptureFixture) -> None:
    Notifier.take({"NOTIFY_SOCKET": "vsock:2:1"}).send(READY=1)
    assert [record.getMessage() for record in caplog.records] == [
        "! NOTIFY_SOCKET=vsock:2:1 is not understood; nothing is told"
    ]
