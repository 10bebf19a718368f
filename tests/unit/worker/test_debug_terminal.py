"""The worker's end of the socket of `aiogpu debug`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.linux.sockets import Credentials
from aiogpu.worker.debug import terminal as module
from aiogpu.worker.debug.terminal import LONGEST, Terminal, accept


@pytest.fixture
def ends() -> Iterator[tuple[Terminal, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Terminal(ours), theirs


def test_only_this_user_and_root_may_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    cases = ((own, True), (0, True), (own + 1, False))
    for number, (uid, is_accepted) in enumerate(cases):
        path = tmp_path / f"socket{number}"
        credentials = Credentials(1, uid, 1)
        monkeypatch.setattr(module, "peer_credentials", lambda _, c=credentials: c)
        with (
            socket.socket(socket.AF_UNIX) as listening,
            socket.socket(socket.AF_UNIX) as client,
        ):
            listening.bind(str(path))
            listening.listen()
            client.connect(str(path))
            terminal = accept(listening)
            assert (terminal is not None) == is_accepted
            if terminal is not None:
                terminal.close()
            assert client.recv(1) == b""


def test_text_is_sent_by_lines_and_the_rest_is_the_prompt(
    ends: tuple[Terminal, socket.socket],
) -> None:
    terminal, theirs = ends
    theirs.sendall(b'{"line": "first"}\n{"line": "sec')
    print("one\ntwo", file=terminal)
    terminal.write("(Pdb) ")
    assert terminal.readline() == "first\n"
    assert theirs.recv(1000) == b'{"text": "one\\ntwo\\n"}\n{"prompt": "(Pdb) "}\n'
    theirs.sendall(b'ond"}\n')
    assert terminal.readline() == "second\n"
    theirs.shutdown(socket.SHUT_WR)
    assert terminal.readline() == ""
    assert not terminal.is_open
    terminal.send(text="to nobody")


@pytest.mark.parametrize("sent", [b"nonsense\n", b"[1]\n", b"x" * (LONGEST + 1)])
def test_nonsense_closes_the_terminal(
    ends: tuple[Terminal, socket.socket], sent: bytes
) -> None:
    terminal, theirs = ends
    theirs.setblocking(False)
    while sent:
        sent = sent[theirs.send(sent) :]
        assert terminal.receive(0) is None
    while terminal.is_open:
        assert terminal.receive(1) is None
    assert not terminal.is_open


def test_a_check_ends_the_wait_for_a_line(
    ends: tuple[Terminal, socket.socket],
) -> None:
    terminal, _ = ends
    checks = iter([None, None, terminal.close])

    def check() -> None:
        if (close := next(checks)) is not None:
            close()

    terminal.check = check
    assert terminal.readline() == ""
