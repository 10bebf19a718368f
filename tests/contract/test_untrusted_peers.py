"""Untrusted peers: unknown processes, garbage, forged nodes.

An unknown process gets nothing and harms no other; programs send a forged node nothing
and unpickle nothing of it; no socket is on a network. Tests with a second user need
root.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import pytest

import aiogpu
from aiogpu.cli.doctor import ask_node
from aiogpu.cli.main import main
from aiogpu.daemon.place import start_time
from aiogpu.engines.node_connection import NodeConnection
from aiogpu.errors import NodeError
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
from benchmarks.processes import belonging, internet_sockets, listening
from tests.cli.sandbox import open_sandbox
from tests.contract import served, tasks, value_tasks
from tests.contract.actor_classes import Async, Counter
from tests.contract.forged_node import forged
from tests.contract.node_here import Here
from tests.contract.raw_client import RawClient, Service, all_is_free, service, watching
from tests.support.gate import Gate
from tests.support.program import start
from tests.support.waits import until
from tests.unit.wire.cases import CLIENT, NODE, WORKER, Case, kept
from tests.unit.wire.spoiling import frames_in

np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

SOON: Final = 0.05
LARGE: Final = 1 << 20


def memory_of(here: Here) -> str:
    """Return the path of the socket for descriptors."""
    return descriptor_path(here.engine._supervisor.directory)


def client_of(here: Here, **options: Any) -> RawClient:
    return RawClient(Service(here.path, os.getpid()), **options)


def connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(path)
    return connection


def trap_of(place: Path) -> tuple[str, str]:
    """Return the paths of a node's socket and of the directory that a trap makes."""
    return f"{place}/aiogpu/node.sock", str(place / "trap")


@pytest.mark.parametrize("greets", [False, True])
async def test_a_silent_client_is_refused(
    greets: bool, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(here) as known:
        await asyncio.to_thread(known.joined, only_looks=True)
        monkeypatch.setattr("aiogpu.runtime.callers.programs.WITHIN", SOON)
        with client_of(here, greets=greets) as silent:
            (answer,) = await asyncio.to_thread(silent.hear_all)
            assert isinstance(answer, Refused)
            reason = f"the program did not identify itself within {SOON:g} s"
            assert reason in answer.reason
        known.say(Inquire(1, "resources", 0))
        answer = await asyncio.to_thread(known.hear, ChildDone)
        assert status_codec.load(answer.payload)["CPU"] == 2
    clients = here.engine._supervisor.clients
    await until(lambda: not clients.by_id)
    assert not clients._unnamed


async def test_a_program_greets_at_once(tmp_path: Path) -> None:
    """The greeting is sent even if the loop is busy for long afterwards."""
    line = NodeConnection(asyncio.get_running_loop(), print, print)  # no answer comes
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


@pytest.mark.parametrize(
    "sent", [b"", b"\0", b"\xff" * 8, (1 << 26).to_bytes(8, "little"), bytes(8)]
)
async def test_an_unknown_process_gets_no_memory(
    sent: bytes, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sent:
        monkeypatch.setattr("aiogpu.runtime.objects.store.WITHIN", SOON)
    with connected(memory_of(here)) as stranger:
        stranger.sendall(sent)
        assert await asyncio.to_thread(stranger.recv, 1) == b""


FORGER: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as forger:
    forger.settimeout(20)
    forger.connect(sys.argv[1])
    forger.sendall(int(sys.argv[2]).to_bytes(8, "little"))
    print(forger.recv(1))
"""


async def test_a_process_gets_no_memory_in_anothers_name(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    async with here.join():
        large = np.ones(LARGE, np.uint8)
        number = next(iter(here.engine._supervisor.clients.by_id))
        # The number is this process's own, which has connected before.
        assert (await value_tasks.give.remote(large)).sum() == LARGE
        with connected(memory_of(here)) as second:
            second.sendall(number.to_bytes(8, "little"))
            assert await asyncio.to_thread(second.recv, 1) == b""
        forger = start(FORGER, memory_of(here), str(number))
        out, _ = await asyncio.to_thread(forger.communicate)
        assert out == "b''\n"
        assert f"refused shared memory to process {forger.pid}" in caplog.text
        for _ in range(3):
            large = await value_tasks.give.remote(large)
        assert large.sum() == LARGE


async def test_garbage_for_descriptors_harms_no_other(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiogpu")
    source = random.Random(5)
    # `no_leaks` finds copies of the descriptor by this name.
    given = os.memfd_create("aiogpu-garbage")
    async with here.join():
        for turn in range(8):
            with client_of(here) as client:
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


@pytest.mark.parametrize("owner_is", ["the node", "a program"])
async def test_a_client_cannot_claim_others_segments(owner_is: str, here: Here) -> None:
    """Otherwise programs would read the intruder's segment instead of the owner's."""
    with client_of(here) as owner, client_of(here) as intruder:
        await asyncio.to_thread(owner.joined)
        welcome = await asyncio.to_thread(intruder.joined)
        claimed = 0 if owner_is == "the node" else owner.number
        answers = []
        for client, segments_of in ((intruder, claimed), (owner, owner.number)):
            put = put_of(client.number, segments_of)
            with connected(welcome.descriptors) as memory:
                pass_segment(memory, client.number, segments_of)
                client.say(put, Inquire(2, "resources", 0))
                answers.append(await asyncio.to_thread(client.hear, tuple))
    refused, answer = answers
    assert isinstance(refused, Refused), refused
    assert "is not in use any more" in refused.reason
    assert isinstance(answer, ChildDone), answer


@pytest.mark.parametrize("messages", [1, 3])
async def test_unused_descriptors_are_closed(here: Here, messages: int) -> None:
    given = os.memfd_create("aiogpu-unspoken")
    with client_of(here) as client:
        await asyncio.to_thread(client.joined)
        with connected(memory_of(here)) as memory:
            memory.sendall(client.number.to_bytes(8, "little"))
            for _ in range(messages):
                socket.send_fds(memory, [b"\0"], [given] * 253)
            client.say(put_of(client.number))
            assert await asyncio.to_thread(client.hear, Refused)
    await until(lambda: not here.engine._supervisor.clients.by_id)
    links = served.descriptors(os.getpid())
    assert sum("aiogpu-unspoken" in link for link in links) == 1
    os.close(given)


@pytest.mark.parametrize("depth", [30, 3000])
async def test_a_deeply_nested_payload_disconnects_its_sender(
    depth: int, here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    payload = b"x"
    for _ in range(depth):
        payload = pack(Contents(b"p", parts=(payload,)))
    async with here.join():
        with client_of(here) as client:
            await asyncio.to_thread(client.joined)
            client.say(Put(-((client.number << NUMBER_BITS) + 1), payload))
            refused = await asyncio.to_thread(client.hear, Refused)
            assert "nested more than 4 levels" in refused.reason
        assert await value_tasks.give.remote(1) == 1
    assert not any(record.exc_info for record in caplog.records)


def pass_segment(memory: socket.socket, client: int, owner: int) -> None:
    """Pass a page as the first segment of a process, in the name of a client."""
    given = os.memfd_create("aiogpu-passed")
    os.ftruncate(given, 4096)
    memory.sendall(client.to_bytes(8, "little"))
    DescriptorSender(memory).send(first_segment(owner), given)
    os.close(given)


def first_segment(owner: int) -> int:
    """Return the id of the first segment that a process writes; the node is owner 0."""
    return FIRST_SEGMENT + (owner << OWNER_BITS) + 1


def put_of(client: int, owner: int | None = None) -> Put:
    """Make the message of a value in the first segment of its client, or of another."""
    segment = first_segment(client if owner is None else owner)
    contents = Contents(stream=b"x", segment=segment, size=4096, spans=(0, 4096))
    return Put(-((client << NUMBER_BITS) + 1), pack(contents))


GARBAGE: Final = {name: case for name, case in kept().items() if case.target == NODE}


FEW: Final = 8
"""Cases that end a worker and run by default."""


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


def send(node: Service, case: Case, joins: bool) -> None:
    """Send garbage to the socket for programs, at once or after joining."""
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
async def test_garbage_of_a_program_harms_no_other(node: Service, joins: bool) -> None:
    async with watching(node):
        for case in GARBAGE.values():
            sending = asyncio.to_thread(send, node, case, joins)
            other = tasks.add.remote(1, 2)
            await sending
            assert await other == 3


def of_workers(is_all: bool) -> list[bytes]:
    """Return the bytes after the greeting, of the cases that a worker may send."""
    garbage = [
        b"".join(frames_in(case.data)[1:])
        for _, case in sorted(GARBAGE.items(), key=lambda item: crc32(item[0].encode()))
        if CLIENT.encode() not in case.data
    ]
    own = b"".join(case.data for case in kept().values() if case.target == WORKER)
    garbage = [data for data in garbage if data]
    return [*garbage, own] if is_all else garbage[:FEW]


@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_garbage_of_a_worker_ends_it_alone(
    is_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = of_workers(is_all)
    assert len(garbage) >= FEW
    async with aiogpu.init(num_cpus=2, log_to_driver=False):
        for data in garbage:
            lost = tasks.say_as_a_worker.remote(data)
            assert await tasks.add.remote(1, 2) == 3
            with suppress(aiogpu.AiogpuError):
                await lost
        await all_is_free()
        assert await tasks.add.remote(3, 4) == 7
    assert not any(record.exc_info for record in caplog.records)


NOBODY: Final = 65534


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")


COMMANDS: Final = (
    *("status", "status --json", "list tasks", "top", "why 1", "timeline -", "logs"),
    *("run -- true", "stop", "stop --force"),
)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a runtime directory in which every user may write, like /tmp."""
    # Not pytest's own, which lies in a directory that no other user can enter.
    directory = Path(tempfile.mkdtemp(prefix="agf-", dir="/tmp"))
    directory.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that must not be signalled."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def pidfile_of(victim: subprocess.Popen[bytes], socket: str) -> dict[str, Any]:
    return {
        "pid": victim.pid,
        "started": start_time(victim.pid),
        "socket": socket,
        "logs": "/tmp",
        "drain": 0.0,
        "ends_within": 0.0,
        "version": aiogpu.__version__,
    }


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Run an `aiogpu` command in this process; return its exit code and errors."""
    monkeypatch.setattr(sys, "argv", ["aiogpu", *arguments])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        # `aiogpu run` blocks signals in order to wait for them.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("is_named", [False, True])
async def test_no_program_joins_in_another_users_directory(
    mode: int, is_named: bool, place: Path
) -> None:
    path, trap = trap_of(place)
    with forged(path, uid=NOBODY, makes=mode, trap=trap) as forger:
        with pytest.raises(NodeError) as error:
            await aiogpu.init(address=path if is_named else "auto")
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in str(error.value)
        assert f"and this is uid {os.geteuid()}" in str(error.value)
        assert "ask that user to remove it" in str(error.value).lower()
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@as_root
def test_no_command_asks_in_another_users_directory(
    place: Path,
    victim: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, trap = trap_of(place)
    pidfile = pidfile_of(victim, path)
    with forged(path, uid=NOBODY, makes=0o755, trap=trap, pidfile=pidfile) as forger:
        for arguments in COMMANDS:
            code, message = command(monkeypatch, capsys, *arguments.split())
            assert code == (125 if "run" in arguments else 1), arguments
            assert f"{place}/aiogpu belongs to uid {NOBODY}" in message, arguments
        code, _ = command(monkeypatch, capsys, "gpus")
        assert code == 0, "`gpus` asks no node"
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in asyncio.run(ask_node()).note
        assert forger.sent() == 0
    assert not os.path.exists(trap)
    assert victim.poll() is None


@as_root
async def test_no_program_joins_a_socket_of_another_user(place: Path) -> None:
    """The directory is this user's: only the kernel tells who listens."""
    path, trap = trap_of(place)
    (place / "aiogpu").mkdir(0o700)
    with forged(path, uid=NOBODY, trap=trap) as forger:
        with pytest.raises(NodeError) as error:
            await aiogpu.init(address=path)
        message = f"listens at {path} (pid {forger.pid}) belongs to uid {NOBODY}"
        assert message in str(error.value)
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@pytest.mark.parametrize("kind", ["open", "linked", "socket linked"])
async def test_no_program_joins_in_an_unsafe_directory(kind: str, place: Path) -> None:
    path, trap = trap_of(place)
    (place / "real").mkdir(0o700)
    if kind == "linked":
        (place / "aiogpu").symlink_to("real")
    else:
        (place / "aiogpu").mkdir()
        (place / "aiogpu").chmod(0o770 if kind == "open" else 0o700)
    at = path
    if kind == "socket linked":
        at = f"{place}/real/node.sock"
        os.symlink(at, path)
    with forged(at, trap=trap) as forger:
        with pytest.raises(NodeError) as error:
            await aiogpu.init(address="auto")
        reason = "has mode 0770" if kind == "open" else "is a symbolic link"
        assert reason in str(error.value)
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@pytest.mark.parametrize("trapped", ["ledger", "answer"])
async def test_a_nodes_status_is_never_unpickled(trapped: str, place: Path) -> None:
    path, trap = trap_of(place)
    (place / "aiogpu").mkdir(0o700)
    with forged(path, trap=trap, trapped=trapped):
        if trapped == "ledger":
            with pytest.raises(NodeError, match="cannot be read"):
                await aiogpu.init(address="auto")
        else:
            session = await aiogpu.init(address="auto")
            for what in ("status", "cluster_resources", "available_resources"):
                with pytest.raises(aiogpu.AiogpuError, match="cannot be read"):
                    await getattr(aiogpu, what)()
            await session.shutdown(at_once=True)
    assert not os.path.exists(trap)


def test_stop_signals_no_process_that_is_not_the_node(
    place: Path,
    victim: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not even if the directory and the pidfile are this user's."""
    monkeypatch.setattr("aiogpu.daemon.stop.SLACK", SOON)
    path = f"{place}/aiogpu/node.sock"
    (place / "aiogpu").mkdir(0o700)
    with forged(path, pidfile=pidfile_of(victim, path)):
        reason = f"process {victim.pid}, which is not the node of {path}"
        for arguments in (["stop"], ["stop", "--force"]):
            code, message = command(monkeypatch, capsys, *arguments)
            assert (code, reason in message) == (1, True), message
        if os.geteuid() == 0:
            os.chown(f"{place}/aiogpu/node.pid", NOBODY, NOBODY)
            code, message = command(monkeypatch, capsys, "stop")
            assert (code, f"node.pid belongs to uid {NOBODY}" in message) == (1, True)
    assert victim.poll() is None


def test_stop_does_not_wait_for_a_pidfile_that_is_a_pipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "aiogpu").mkdir(0o700)
    os.mkfifo(place / "aiogpu" / "node.pid")
    code, _ = command(monkeypatch, capsys, "stop")
    assert code == 0


HERE = os.getpid()


LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


async def be_busy(gate: Gate) -> list[object]:
    """Have workers run tasks and actors; return the handles, to be kept."""
    counter, coroutines = Counter.remote(), Async.remote()
    handles = [
        tasks.gated.options(num_gpus=share, num_cpus=0).remote(gate.path, "task")
        for share in (0.5, 0)
    ]
    call = counter.gated.remote(gate.path, "actor")
    assert await coroutines.add.remote() == 1
    await gate.entered("actor", "task")
    return [counter, coroutines, call, *handles]


def check_sockets(directory: str, kinds: set[str], gate: Gate) -> set[str]:
    """Check that a node's processes listen in its directory alone; return where."""
    processes = belonging(directory)
    pids = [HERE, *(process.pid for process in processes)]
    assert {process.kind for process in processes} >= kinds
    assert internet_sockets(pids) == []
    places = listening(pids) - {gate.path}
    assert places
    assert all(path.startswith(f"{directory}/") for path in places), places
    return places


@pytest.mark.fresh  # its processes are found by their command lines
async def test_a_node_in_a_program_is_on_no_network(
    no_leaks: None, runtime_directory: Path, gate: Gate
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        kept = await be_busy(gate)
        check_sockets(str(runtime_directory), {"workers", "keepers", "zygotes"}, gate)
        gate.release("actor", "task")
        del kept


async def test_a_service_and_its_programs_are_on_no_network(gate: Gate) -> None:
    with open_sandbox() as here:
        options = ("--num-cpus=2", "--num-gpus=1")
        await asyncio.to_thread(here.run, "start", "--head", *options)
        async with aiogpu.init(address=here.place.socket):
            kept = await be_busy(gate)
            kinds = {"nodes", "workers", "keepers", "zygotes"}
            assert here.place.socket in check_sockets(here.directory, kinds, gate)
            gate.release("actor", "task")
            del kept


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=str)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=str)
def test_a_loopback_socket_would_be_seen(
    family: socket.AddressFamily, kind: socket.SocketKind
) -> None:
    try:
        opened = socket.socket(family, kind)
        with opened:
            opened.bind((LOOPBACK[family], 0))
            if kind is socket.SOCK_STREAM:
                opened.listen()
            (line,) = internet_sockets([HERE])
            assert str(HERE) in line
    except OSError:
        pytest.skip("this machine has no such addresses")
    assert internet_sockets([HERE]) == []


def test_an_abstract_socket_would_be_seen() -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"\0aiogpu-test-{HERE}")
        opened.listen()
        assert f"@aiogpu-test-{HERE}" in listening([HERE])
