"""Joining a node of another process: addresses, options and refusals.

A message that breaks the rules is refused in words and harms no other program.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.api.reservation import Placement, placement_func, placement_group_of
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status_codec import status_codec
from aiogpu.serialization.payload import MARK, Contents, pack
from aiogpu.serialization.serializer import NO_ARGUMENTS
from aiogpu.wire import messages as m
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT
from tests.contract import served, shared_tasks, stream_tasks, tasks, value_tasks
from tests.contract.actor_classes import Counter
from tests.contract.raw_client import (
    RawClient,
    Service,
    declared,
    func_of,
    service,
    watching,
)
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.program import run

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

GIB = 1 << 30
ROUNDS: Final = 60
"""Clients that send random messages, in one run of the test."""


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


async def test_a_node_says_why_it_refuses_a_program(node: Service) -> None:
    pid = os.getpid()
    numbers = (0, m.FIRST_CLIENT - 1, m.FIRST_CLIENT << 1, 1 << 62)
    greetings = [
        (m.Hello(m.VERSION + 1, CLIENT, m.FIRST_CLIENT + 9, pid), "of aiogpu on both"),
        *((m.Hello(m.VERSION, CLIENT, number, pid), "") for number in numbers),
    ]
    for greeting, why in greetings:
        with RawClient(node, greets=False) as client:
            client.say(greeting)
            (answer,) = client.hear_all()
            assert isinstance(answer, m.Refused)
            assert why in answer.reason
    with RawClient(node) as client:
        client.join(release="0.0.1")
        (answer,) = client.hear_all()
        assert isinstance(answer, m.Refused)
        assert "the program 0.0.1; use the same version in both" in answer.reason
    with RawClient(node) as first:
        first.joined()
        with RawClient(node, first.number) as second:
            (answer,) = second.hear_all()
            assert "for programs with a free number" in str(answer)
        first.say(m.Inquire(1, "resources", 0))
        assert status_codec.load(first.hear(m.ChildDone).payload)["CPU"] == 2


async def test_a_program_of_another_release_is_refused(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.version.__version__", "0.0.1")
    with pytest.raises(errors.NodeError, match=r"refuses: .* the program 0\.0\.1; use"):
        await aiogpu.init(address=node.path)


async def test_a_node_says_which_rule_a_program_breaks(node: Service) -> None:
    with RawClient(node) as client:
        client.joined()
        client.say(m.Submit(0, 1, 99, NO_ARGUMENTS), m.Submit(0, 1, 99, NO_ARGUMENTS))
        assert isinstance(client.hear(m.ChildFailed), m.ChildFailed)
        refusal = client.hear(m.Refused)
        rule = "the number 1 was sent after 1; numbers must increase"
        assert refusal.reason == f"it broke the protocol: {rule}"
        assert client.hear_all() == []


TERMS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"scalars": (("CPU", -10_000),)}, "@remote would refuse"),
    ({"scalars": (("CPU", 1), ("CPU", 1))}, "@remote would refuse"),
    ({"timeout": float("nan")}, "@remote would refuse"),
    ({"is_lease": True}, "@remote would refuse"),
    ({"is_lease": True, "is_endless": True}, "was not declared as a task"),
    ({"scalars": (("CPU", 10**9),)}, "can never give"),
]


@pytest.fixture
async def client(node: Service) -> AsyncIterator[RawClient]:
    """A client that has joined; in the end the node holds nothing of it."""
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            yield client


async def test_impossible_terms_are_refused(client: RawClient) -> None:
    for number, (terms, why) in enumerate(TERMS, 1):
        client.say(declared(number, func_of(tasks.add), **terms))
        client.say(m.Submit(0, number, number, NO_ARGUMENTS))
        assert why in client.hear(m.ChildFailed).message, terms


async def test_a_placement_ends_with_its_program(client: RawClient) -> None:
    placement_group = placement_group_of(
        [{"GPU": 1}, {"CPU": 1}], "PACK", "group", "key"
    )
    member = tasks.add.options(placement=Placement(placement_group), num_gpus=0.5)
    client.say(declared(1, placement_func(placement_group, 0)), m.TakeLease(1, 1))
    assert client.hear(m.ChildDone).child == 1
    assert (await aiogpu.available_resources())["GPU"] == 0
    assert (await aiogpu.status()).placements[0].client == client.number
    client.say(declared(2, func_of(member)), m.TakeLease(2, 1))
    assert "it was requested before" in client.hear(m.ChildFailed).message
    client.say(declared(3, func_of(member)), m.Submit(0, 3, 3, NO_ARGUMENTS))
    assert client.hear(m.ChildFailed).child == 3


async def test_a_class_is_no_task_and_a_task_no_class(client: RawClient) -> None:
    client.say(declared(1, func_of(Counter)), declared(2, func_of(tasks.add)))
    client.say(m.Submit(0, 1, 1, NO_ARGUMENTS))
    assert "Counter was not declared as a task" in client.hear(m.ChildFailed).message
    actor = -((client.number << m.NUMBER_BITS) + 2)
    client.say(m.Make(actor, 2, NO_ARGUMENTS, "", "", False))
    client.say(m.Ask(0, 3, actor, "add", NO_ARGUMENTS))
    assert "add was not declared as an actor" in client.hear(m.ChildFailed).message


async def test_a_missing_part_of_a_result_is_refused(client: RawClient) -> None:
    mine = -((client.number << m.NUMBER_BITS) + 1)
    two = Contents(stream=pickle.dumps((((1, 2),), {})), returns=2)
    client.say(declared(1, func_of(tasks.echo)))
    client.say(m.Submit(0, 1, 1, pack(two)), m.Share(mine, 1, 7))
    assert client.hear(m.ChildDone).child == 1
    client.say(m.Fetch(0, 2, mine))
    assert "has no part 7" in client.hear(m.ChildFailed).message


def made_up(random: random.Random, client: int, other: int) -> m.Message:
    """Draw a message that a client may send; it need not make sense."""
    some = [0, 1, 2, 3, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), other]

    def number() -> int:
        return random.choice([*some, *([random.randrange(1, 1 << 20)] * 9)])

    def identity() -> int:
        owner = random.choice([client, client, client, other])
        own = -((owner << m.NUMBER_BITS) + random.randrange(1, 1 << 16))
        return random.choice([own, own, own, number()])

    def segment() -> int:
        owner = random.choice([0, client, other])
        return m.FIRST_SEGMENT + (owner << 36) + random.randrange(4)

    def payload() -> bytes:
        contents = Contents(
            stream=random.choice([b"", NO_ARGUMENTS, b"x" * 50]),
            segment=random.choice([0, 0, segment()]),
            size=random.choice([0, 1 << 40, -5, 4096]),
            spans=random.choice([(), (0, 1 << 50), (-1, -1)]),
            needs=random.choice([(), (identity(),)]),
            places=random.choice([(), (0,), ("x",)]),
            values=random.choice([(), (identity(),)]),
            returns=random.choice([0, 2, -1, 1 << 40]),
            actors=random.choice([(), (identity(),)]),
        )
        kinds = [NO_ARGUMENTS, NO_ARGUMENTS, b"", b"garbage", MARK, pack(contents)]
        return random.choice(kinds)

    where = random.choice(["add", "", " ready", " ended", " capacity", "\udc80\0"])
    func = random.randrange(8)
    says = [
        lambda: m.Submit(random.choice([0, 0, number()]), number(), func, payload()),
        lambda: m.Withdraw(number(), number()),
        lambda: m.TakeLease(number(), func),
        lambda: m.ChildDemand(number(), number()),
        lambda: m.Make(identity(), func, payload(), where, where, func % 2 == 0),
        lambda: m.Find(number(), where, where),
        lambda: m.Ask(
            random.choice([0, number()]), number(), identity(), where, payload()
        ),
        lambda: m.Hold(identity()),
        lambda: m.Stop(identity(), where),
        lambda: m.Returned((identity(), segment()), (number(), number(), number())),
        lambda: m.Put(identity(), payload()),
        lambda: m.PutFailed(
            identity(), where, where, where, where, random.choice([None, payload()])
        ),
        lambda: m.Share(identity(), number(), number()),
        lambda: m.Fetch(number(), number(), identity()),
        lambda: m.Discard(identity()),
        lambda: m.Inquire(
            number(), random.choice(["why", "why task", where]), number()
        ),
        lambda: m.Depart(),
    ]
    return random.choice(says)()


def harass(node: Service, random: random.Random, other: int) -> None:
    """Join, and send random messages until the node closes the connection."""
    with RawClient(node) as client:
        client.joined(only_looks=False)
        funcs = [*map(func_of, (tasks.add, stream_tasks.numbers, Counter))]
        for place, func in enumerate(funcs):
            client.say(declared(place, func))
        lease = {"is_lease": True, "is_endless": True}
        client.say(declared(3, funcs[0], **lease))
        client.say(declared(4, funcs[0], scalars=(("CPU", -1),)))
        client.say(declared(5, funcs[0], is_endless=True))
        client.say(declared(6, funcs[2], is_endless=False))
        try:
            last = 0
            for _ in range(random.randrange(1, 60)):
                message = made_up(random, client.number, other)
                if hasattr(message, "child") and random.random() < 0.9:
                    # Otherwise the node would soon close the connection.
                    last += random.choice([1, 1, 1, 5])
                    message = message._replace(child=last)
                data = encode(message)
                if random.random() < 0.01:
                    place = random.randrange(len(data))
                    data = (
                        data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
                    )
                client.socket.sendall(data)
            if random.random() < 0.5:
                client.socket.shutdown(socket.SHUT_WR)
                client.hear_all()
        except ConnectionError:
            pass  # the node has closed the connection


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
async def test_random_messages_harm_no_other_program(node: Service, seed: int) -> None:
    source = random.Random(seed)
    with RawClient(node) as other:
        other.joined()
        async with watching(node):
            for _ in range(ROUNDS):
                harassing = asyncio.to_thread(harass, node, source, other.number)
                served = tasks.add.remote(1, 2)
                await harassing
                assert await served == 3
            other.say(m.Inquire(1, "resources", 0))
            assert other.hear(m.ChildDone).child == 1


async def test_an_answer_that_cannot_be_decoded_raises(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        monkeypatch.setattr(status_codec, "classes", ())
        with pytest.raises(errors.DeserializationError):
            async with asyncio.timeout(20):
                await aiogpu.status()


async def test_a_program_may_leave_twice(client: RawClient) -> None:
    client.say(m.Depart(), m.Depart())
    client.hear(m.Departed)
    client.hear(m.Departed)


async def test_only_tasks_over_the_limit_are_refused(no_leaks: None) -> None:
    with service(limits=Limits(max_waiting=3)) as node:
        async with aiogpu.init(address=node.path, log_to_driver=False):
            handles = [tasks.double.remote(i) for i in range(50)]
            outcomes = await asyncio.gather(*handles, return_exceptions=True)
            assert outcomes[:3] == [0, 2, 4]
            assert {*map(type, outcomes)} == {int, errors.LimitError}
            assert await tasks.double.remote(21) == 42


async def test_a_repaired_preload_is_imported(
    node: Service, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with pytest.raises(errors.PreloadError, match="mended_later"):
            await aiogpu.init(address=node.path, preload=("mended_later",))
    (tmp_path / "mended_later.py").write_text("HERE = 1\n")
    async with aiogpu.init(address=node.path, preload=("mended_later",)):
        assert await tasks.modules.remote("mended_later") == {"mended_later": True}


@pytest.fixture
def rich(no_leaks: None) -> Iterator[Service]:
    """A node with resources of each kind."""
    with service(
        num_cpus=4,
        num_gpus=2,
        resources={"license": 3, "neuron_cores": 2},
        accelerator_type="A100",
        gpu_memory=80 * GIB,
        memory=8 * GIB,
        object_memory=GIB,
        cancel_grace=5.0,
    ) as running:
        yield running


async def test_a_program_joins_with_options_that_the_node_satisfies(
    rich: Service,
) -> None:
    async with aiogpu.init(
        address=rich.path,
        num_cpus=2,
        num_gpus=1,
        resources={"license": 3, "neuron_cores": 1},
        accelerator_type="A100",
        gpu_memory="79GiB",
        memory="4GiB",
        object_memory="512MiB",
        cancel_grace=5.0,
        spare_workers=2,
        memory_guard=True,
        log_to_driver=False,
    ):
        assert (await aiogpu.cluster_resources())["GPU"] == 2
        assert await tasks.add.options(num_gpus=1).remote(1, 2) == 3


MORE: Final[list[tuple[str, Any, str]]] = [
    ("num_cpus", 5, "init(num_cpus=5): .* has CPU 4"),
    ("num_gpus", 3, "init(num_gpus=3): .* has GPU 2"),
    ("resources", {"license": 4}, "={'license': 4}.* has .license: 3"),
    ("resources", {"seats": 1}, "init(resources={'seats': 1}): .* has .seats: 0"),
    ("resources", {"neuron_cores": 3}, ".* has .neuron_cores: 2"),
    ("accelerator_type", "H100", "=.H100.*: .* has GPUs of type A100"),
    ("gpu_memory", "90GiB", "=.90GiB.*: .* has a GPU of 80GiB"),
    ("memory", "9GiB", "init(memory='9GiB'): .* has memory 8GiB"),
    ("object_memory", "2GiB", "=.2GiB.*: .* has 1GiB"),
    ("cancel_grace", 1.0, "init(cancel_grace=1.0): .* has cancel_grace=5.0"),
    ("foreign", "wait", "init(foreign='wait'): .* has foreign='ignore'"),
    ("spill_directory", "/tmp", "='/tmp'): .* has spill_directory=None"),
]


async def test_options_beyond_the_node_are_refused(
    rich: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, value, has in MORE:
        pattern = has.replace("(", r"\(").replace("):", r"\):")
        with pytest.raises(errors.OptionError, match=pattern) as error:
            await aiogpu.init(address=rich.path, **{option: value})
        assert rich.path in str(error.value)
        assert f"leave {option} out here" in str(error.value)
        assert "`aiogpu start --head`" in str(error.value)
    monkeypatch.setenv("AIOGPU_ADDRESS", rich.path)
    with pytest.raises(errors.OptionError, match="since AIOGPU_ADDRESS='/tmp/"):
        await aiogpu.init(num_gpus=3)
    async with aiogpu.init(num_gpus=1, log_to_driver=False):
        assert await tasks.add.options(num_gpus=0.25).remote(1, 2) == 3


async def test_options_about_unknown_gpus_name_the_start_command(
    no_leaks: None,
) -> None:
    with service(num_gpus=0) as node:
        with pytest.raises(errors.OptionError, match="has no GPU"):
            await aiogpu.init(address=node.path, gpu_memory="1GiB")
        with pytest.raises(errors.OptionError, match="has GPU 0"):
            await aiogpu.init(address=node.path, num_gpus=1)
    with service(num_gpus=1) as unknown:
        with pytest.raises(errors.OptionError, match="has GPUs of unknown memory"):
            await aiogpu.init(address=unknown.path, gpu_memory="1GiB")
        with pytest.raises(errors.OptionError, match="has GPUs of unknown type"):
            await aiogpu.init(address=unknown.path, accelerator_type="A100")
        async with aiogpu.init(address=unknown.path, log_to_driver=False):
            with pytest.raises(errors.InfeasibleError) as error:
                await tasks.add.options(gpu_memory="1GiB").remote(1, 2)
            assert "`aiogpu start --gpu-memory 80GiB`" in str(error.value)
            with pytest.raises(errors.InfeasibleError) as error:
                await tasks.add.options(num_gpus=1, accelerator_type="T4").remote(1, 2)
            assert "`aiogpu start --accelerator-type" in str(error.value)


@pytest.fixture
def place(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path where `address="auto"` looks for a node."""
    with tempfile.TemporaryDirectory(prefix="ags-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.delenv("AIOGPU_ADDRESS", raising=False)
        Path(directory, "aiogpu").mkdir(mode=0o700)
        yield f"{directory}/aiogpu/node.sock"


REFUSED: Final[list[tuple[str, type[Exception], str]]] = [
    ("auto", errors.NodeDiedError, r"/aiogpu/node\.sock.*`aiogpu start --head`"),
    ("/run/x.sock", errors.NodeDiedError, r"/run/x\.sock.*`aiogpu start --head`"),
    ("unix:/run/x.sock", errors.NodeDiedError, r" /run/x\.sock.*`aiogpu start "),
    ("elsewhere", errors.OptionError, r"^init\(address='elsewhere'\): unknown"),
    ("raylet://host:1", errors.OptionError, "'raylet://host:1'"),
    ("Auto", errors.OptionError, "'Auto'"),
    ("ray://", errors.OptionError, r"^init\(address='ray://'\): .*`ray job submit"),
    ("ray://h:1", errors.OptionError, r"with address='ray'.*`ray job submit"),
]


async def test_an_address_without_a_node_is_refused(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without Ray."""
    for address, error, message in REFUSED:
        with pytest.raises(error, match=message):
            await aiogpu.init(address=address)
    for address in ("nowhere", "ray://localhost:1"):
        monkeypatch.setenv("AIOGPU_ADDRESS", address)
        told_of = await raises(errors.OptionError, lambda: aiogpu.init())
        assert str(told_of).startswith(f"AIOGPU_ADDRESS={address!r}: ")


def test_address_ray_without_ray_says_how_to_install_it() -> None:
    out = run(
        """
        import asyncio, sys
        sys.modules["ray"] = None
        import aiogpu

        async def main():
            try:
                await aiogpu.init(address="ray")
            except aiogpu.errors.NodeError as error:
                print(error)

        asyncio.run(main())
        """
    )
    assert out.count("Ray is not installed here") == 1
    assert out.count("pip install 'aiogpu[ray]'") == 1


@contextmanager
def running(path: str) -> Iterator[Service]:
    assert served.forker is not None
    Path(path).unlink(missing_ok=True)  # as a node that is started does
    options: dict[str, object] = {"num_cpus": 1, "log_to_driver": False}
    node = Service(path, served.forker.fork(path, options))
    try:
        yield node
    finally:
        node.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("is_usual", [True, False])
async def test_the_error_of_an_ended_node_says_how_to_join_the_next(
    number: int, is_usual: bool, place: str, gate: Gate
) -> None:
    path = place if is_usual else f"{Path(place).parent}/other.sock"
    address = "auto" if is_usual else path
    advice = f"`await aiogpu.init(address={address!r})` joins it"
    with running(path) as node:
        await aiogpu.init(address=address, log_to_driver=False)
        await raises(errors.NodeRunningError, lambda: aiogpu.init(address=address))
        actor = Counter.remote()
        assert await actor.add.remote() == 1
        waiting = tasks.gated_coroutine.remote(gate.path, "waiting")
        await gate.entered("waiting")
        node.end(number)
        ended = await raises(errors.NodeError, waiting)
        refused = await raises(errors.NodeError, lambda: tasks.add.remote(1, 2))
        assert advice in str(refused)
        was_killed = number == signal.SIGKILL
        for error in (ended, refused):
            assert isinstance(error, errors.NodeDiedError) is was_killed
    with running(path):
        await aiogpu.init(address=address, log_to_driver=False)
        assert await tasks.add.remote(1, 2) == 3
        await raises(errors.NodeError, lambda: actor.add.remote())
        await aiogpu.shutdown()


A, B = b"ab"


async def test_no_task_gets_a_value_of_the_next_node(address: str) -> None:
    """Shared memory has numbers that the next node may use again."""
    done = await value_of_a_node_that_was_closed(address)
    message = ""
    try:
        assert bytes(await done).count(A) == 1 << 20
    except errors.DeserializationError as error:
        message = str(error)
    # From a service that was left, unless its memory had arrived before.
    assert not message or (address == "node" and "its node was closed" in message)
    del done
    gc.collect()


async def value_of_a_node_that_was_closed(address: str) -> aiogpu.Handle[Any]:
    """Return a handle that was not read; the next node refuses it and other handles."""
    make, size = shared_tasks.make, 1 << 20
    async with aiogpu.init(address=address, num_cpus=1):
        awaited, done = make.remote(A, size), make.remote(A, size)
        await awaited
        await asyncio.wait([done])
        put = aiogpu.put(memoryview(bytes([A]) * size))
    async with aiogpu.init(address=address, num_cpus=1):
        others = [await make.remote(B, size) for _ in range(3)]
        for handle in (awaited, done, put):
            with pytest.raises(errors.MisuseError, match="that was closed"):
                shared_tasks.count.remote(handle, A)
            with pytest.raises(
                (errors.MisuseError, errors.SerializationError),
                match="was closed",
            ):
                value_tasks.give.remote([handle])
        assert await shared_tasks.count.remote(others[0], B) == size
        what_was_awaited = await awaited
        assert await shared_tasks.count.remote(what_was_awaited, A) == size
    return done
