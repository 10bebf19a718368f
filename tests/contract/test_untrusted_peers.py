"""[B41] Sockets of a node: who is nobody it knows, who says nonsense, who forges it.

A stranger gets nothing and harms nobody; a forged node is sent nothing, and nothing of
it is unpickled; nothing is on a network. Where no second user can be had, as this user
is not root, only what needs none is tested.
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
from collections.abc import AsyncIterator, Iterator
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
from tests.cli.box import box
from tests.contract import tasks, value_tasks
from tests.contract.actor_classes import Async, Counter
from tests.contract.forged_node import forged
from tests.contract.node_here import Here, node_here
from tests.contract.raw_client import RawClient, Service, all_is_free, service, watching
from tests.support.gate import Gate
from tests.support.program import environment
from tests.support.until import until
from tests.unit.wire.cases import CLIENT, NODE, WORKER, Case, kept
from tests.unit.wire.spoiling import frames_in

np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

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
            expected = f"the program did not identify itself within {SOON:g} s"
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


@pytest.mark.parametrize(
    "said", [b"", b"\0", b"\xff" * 8, (1 << 26).to_bytes(8, "little"), bytes(8)]
)
async def test_who_is_nobody_gets_no_memory(
    said: bytes, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does who says nothing."""
    if not said:
        monkeypatch.setattr("aiogpu.runtime.objects.store.WITHIN", SOON)
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
    assert "is not in use any more" in refused.reason
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
async def test_a_deeply_nested_payload_disconnects_its_sender(
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
            assert "nested more than 4 levels" in told.reason
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
            spoilt = tasks.say_as_a_worker.remote(data)
            served = tasks.add.remote(1, 2)
            assert await served == 3
            with suppress(aiogpu.AiogpuError):
                await spoilt
        await all_is_free()
        assert await tasks.add.remote(3, 4) == 7
    assert not any(record.exc_info for record in caplog.records)


NOBODY: Final = 65534


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")


COMMANDS: Final = [
    ["status"],
    ["status", "--json"],
    ["list", "tasks"],
    ["top"],
    ["why", "1"],
    ["timeline", "-"],
    ["logs"],
    ["run", "--", "true"],
    ["stop"],
    ["stop", "--force"],
]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory in which everybody may write, as /tmp is one."""
    # Not pytest's own, which lies in a directory that no other user can enter.
    directory = Path(tempfile.mkdtemp(prefix="agf-", dir="/tmp"))
    directory.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody is to signal."""
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
    """Run an `aiogpu` command in this process; gives its exit code and complaints."""
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
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    with forged(path, uid=NOBODY, makes=mode, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address=path if is_named else "auto")
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in str(error.value)
        assert f"and this is uid {os.geteuid()}" in str(error.value)
        assert "have that user remove it" in str(error.value).lower()
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@as_root
def test_no_command_asks_in_another_users_directory(
    place: Path,
    victim: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    pidfile = pidfile_of(victim, path)
    with forged(path, uid=NOBODY, makes=0o755, trap=trap, pidfile=pidfile) as forger:
        for arguments in COMMANDS:
            code, told = command(monkeypatch, capsys, *arguments)
            assert code == (125 if arguments[0] == "run" else 1), arguments
            assert f"{place}/aiogpu belongs to uid {NOBODY}" in told, arguments
        code, _ = command(monkeypatch, capsys, "gpus")
        assert code == 0, "GPUs are shown without asking"
        assert f"{place}/aiogpu belongs to uid {NOBODY}" in asyncio.run(ask_node()).note
        assert forger.sent() == 0
    assert not os.path.exists(trap)
    assert victim.poll() is None


@as_root
async def test_another_user_listens_at_a_socket_of_this_users(place: Path) -> None:
    """The directory is in order: only the kernel tells who listens."""
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "aiogpu").mkdir(0o700)
    with forged(path, uid=NOBODY, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address=path)
        told = f"listens at {path} (pid {forger.pid}) belongs to uid {NOBODY}"
        assert told in str(error.value)
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@pytest.mark.parametrize("kind", ["open", "linked", "socket linked"])
async def test_a_place_into_which_others_could_reach(kind: str, place: Path) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "real").mkdir(0o700)
    if kind == "linked":
        (place / "aiogpu").symlink_to("real")
    else:
        (place / "aiogpu").mkdir(0o770 if kind == "open" else 0o700)
        (place / "aiogpu").chmod(0o770 if kind == "open" else 0o700)
    at = path
    if kind == "socket linked":
        at = f"{place}/real/node.sock"
        os.symlink(at, path)
    with forged(at, trap=trap) as forger:
        with pytest.raises(aiogpu.errors.NodeError) as error:
            await aiogpu.init(address="auto")
        told = "has mode 0770" if kind == "open" else "is a symbolic link"
        assert told in str(error.value)
        assert await asyncio.to_thread(forger.sent) == 0
    assert not os.path.exists(trap)


@pytest.mark.parametrize("trapped", ["ledger", "answer"])
async def test_what_a_node_says_of_itself_is_never_unpickled(
    trapped: str, place: Path
) -> None:
    path, trap = f"{place}/aiogpu/node.sock", str(place / "trap")
    (place / "aiogpu").mkdir(0o700)
    with forged(path, trap=trap, trapped=trapped):
        if trapped == "ledger":
            with pytest.raises(aiogpu.errors.NodeError, match="understood"):
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
    """Also where the directory and the pidfile are this user's."""
    monkeypatch.setattr("aiogpu.daemon.stop.SLACK", SOON)
    path = f"{place}/aiogpu/node.sock"
    (place / "aiogpu").mkdir(0o700)
    with forged(path, pidfile=pidfile_of(victim, path)):
        for arguments in (["stop"], ["stop", "--force"]):
            code, told = command(monkeypatch, capsys, *arguments)
            assert code == 1
            assert f"process {victim.pid}, which is not the node of {path}" in told
        if os.geteuid() == 0:
            os.chown(f"{place}/aiogpu/node.pid", NOBODY, NOBODY)
            code, told = command(monkeypatch, capsys, "stop")
            assert code == 1
            assert f"node.pid belongs to uid {NOBODY}" in told
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
    """Workers that run tasks, and actors; to be kept."""
    actors = [Counter.remote(), Async.remote()]
    handles = [actor.gated.remote(gate.path, "actor") for actor in actors[:1]]
    handles += [
        tasks.gated.options(num_gpus=share, num_cpus=0).remote(gate.path, "task")
        for share in (0.5, 0)
    ]
    assert await actors[1].add.remote() == 1
    await gate.entered("actor", "task", "task")
    return [*actors, *handles]


@pytest.mark.fresh  # what it has is found by what it was started with
async def test_a_node_in_a_program_is_on_no_network(
    no_leaks: None, runtime_directory: Path, gate: Gate
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        kept = await be_busy(gate)
        found = belonging(str(runtime_directory))
        pids = [HERE, *(process.pid for process in found)]
        assert {process.kind for process in found} >= {"workers", "keepers", "zygotes"}
        assert internet_sockets(pids) == []
        places = listening(pids) - {gate.path}
        assert places
        assert all(path.startswith(f"{runtime_directory}/") for path in places), places
        gate.release("actor", "task")
        del kept


async def test_a_service_and_its_programs_are_on_no_network(gate: Gate) -> None:
    with box() as here:
        options = ("--num-cpus=2", "--num-gpus=1")
        await asyncio.to_thread(here.run, "start", "--head", *options)
        async with aiogpu.init(address=here.place.socket):
            kept = await be_busy(gate)
            found = belonging(here.directory)
            pids = [HERE, *(process.pid for process in found)]
            parts = {"nodes", "workers", "keepers", "zygotes"}
            assert {process.kind for process in found} >= parts
            assert internet_sockets(pids) == []
            places = listening(pids) - {gate.path}
            assert here.place.socket in places
            assert all(path.startswith(f"{here.directory}/") for path in places)
            gate.release("actor", "task")
            del kept


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=str)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=str)
def test_one_on_the_loopback_would_be_seen(
    family: socket.AddressFamily, kind: socket.SocketKind
) -> None:
    try:
        opened = socket.socket(family, kind)
        with opened:
            opened.bind((LOOPBACK[family], 0))
            if kind is socket.SOCK_STREAM:
                opened.listen()
            (told,) = internet_sockets([HERE])
            assert str(HERE) in told
    except OSError:
        pytest.skip("this machine has no such addresses")
    assert internet_sockets([HERE]) == []


def test_one_without_a_file_would_be_seen() -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"\0aiogpu-test-{HERE}")
        opened.listen()
        assert f"@aiogpu-test-{HERE}" in listening([HERE])
