"""Joining a node of another process: who is let in, who is cut off, what is left."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
from collections.abc import Iterator
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.api.options import placement_group_of
from aiogpu.api.reservation import Placement, placement_func
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status_codec import status_codec
from aiogpu.serialization.payload import MARK, Contents, pack
from aiogpu.serialization.serializer import NO_ARGUMENTS
from aiogpu.wire.codec import encode
from aiogpu.wire.connection import CLIENT
from aiogpu.wire.messages import (
    FIRST_CLIENT,
    FIRST_SEGMENT,
    NUMBER_BITS,
    VERSION,
    Ask,
    ChildDemand,
    ChildDone,
    ChildFailed,
    Depart,
    Departed,
    Discard,
    Fetch,
    Find,
    Hello,
    Hold,
    Inquire,
    Make,
    Message,
    Put,
    PutFailed,
    Refused,
    Returned,
    Share,
    Stop,
    Submit,
    TakeLease,
    Withdraw,
)
from tests.contract import stream_tasks, tasks
from tests.contract.actor_classes import Counter
from tests.contract.raw_client import (
    RawClient,
    Service,
    declared,
    func_of,
    service,
    watching,
)

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

ROUNDS: Final = 60
"""Clients that say made-up things, in one run of the test."""


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


async def test_one_of_another_protocol_is_told_so(node: Service) -> None:
    with RawClient(node, greets=False) as client:
        client.say(Hello(VERSION + 1, CLIENT, client.number, os.getpid()))
        (told,) = client.hear_all()
        assert isinstance(told, Refused)
        assert "use the same version of aiogpu on both" in told.reason


async def test_one_of_another_release_is_told_so(node: Service) -> None:
    with RawClient(node) as client:
        client.join(release="0.0.1")
        (told,) = client.hear_all()
        assert isinstance(told, Refused)
        assert "the program 0.0.1; use the same version in both" in told.reason


async def test_a_program_of_another_release_raises(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.__version__", "0.0.1")
    with pytest.raises(
        aiogpu.errors.NodeError, match=r"refuses: .* the program 0\.0\.1; use"
    ):
        await aiogpu.init(address=node.path)


@pytest.mark.parametrize("number", [0, FIRST_CLIENT - 1, FIRST_CLIENT << 1, 1 << 62])
async def test_a_number_that_no_client_has_is_refused(
    node: Service, number: int
) -> None:
    with RawClient(node, greets=False) as client:
        client.say(Hello(VERSION, CLIENT, number, os.getpid()))
        (told,) = client.hear_all()
        assert isinstance(told, Refused)


async def test_a_number_is_given_once(node: Service) -> None:
    with RawClient(node) as first:
        first.joined()
        with RawClient(node, first.number) as second:
            (told,) = second.hear_all()
            assert "each with a number of its own" in str(told)
        first.say(Inquire(1, "resources", 0))
        assert status_codec.load(first.hear(ChildDone).payload)["CPU"] == 2


async def test_who_breaks_the_rules_is_told_which(node: Service) -> None:
    with RawClient(node) as client:
        client.joined()
        client.say(Submit(0, 1, 99, NO_ARGUMENTS), Submit(0, 1, 99, NO_ARGUMENTS))
        assert isinstance(client.hear(ChildFailed), ChildFailed)
        told = client.hear(Refused)
        assert told.reason == "it has said what it may not: the number 1 after 1"
        assert client.hear_all() == []


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"scalars": (("CPU", -10_000),)}, "nobody can ask"),
        ({"scalars": (("CPU", 1), ("CPU", 1))}, "nobody can ask"),
        ({"timeout": float("nan")}, "nobody can ask"),
        ({"is_lease": True}, "nobody can ask"),
        ({"is_lease": True, "is_endless": True}, "was declared as no task"),
        ({"scalars": (("CPU", 10**9),)}, "can never give"),
    ],
)
async def test_terms_that_nobody_can_have(
    node: Service, terms: dict[str, Any], why: str
) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, func_of(tasks.add), **terms))
            client.say(Submit(0, 1, 1, NO_ARGUMENTS))
            assert why in client.hear(ChildFailed).message


async def test_a_placement_ends_with_its_program(node: Service) -> None:
    placement_group = placement_group_of(
        [{"GPU": 1}, {"CPU": 1}], "PACK", "group", "key"
    )
    member = tasks.add.options(placement=Placement(placement_group), num_gpus=0.5)
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, placement_func(placement_group, 0)), TakeLease(1, 1))
            assert client.hear(ChildDone).child == 1
            assert (await aiogpu.available_resources())["GPU"] == 0
            assert (await aiogpu.status()).placements[0].client == client.number
            client.say(declared(2, func_of(member)), TakeLease(2, 1))
            assert "asked for before" in client.hear(ChildFailed).message
            client.say(declared(3, func_of(member)), Submit(0, 3, 3, NO_ARGUMENTS))
            assert client.hear(ChildFailed).child == 3


async def test_a_class_is_no_task_and_a_task_no_class(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(declared(1, func_of(Counter)), declared(2, func_of(tasks.add)))
            client.say(Submit(0, 1, 1, NO_ARGUMENTS))
            assert "Counter was declared as no task" in client.hear(ChildFailed).message
            actor = -((client.number << NUMBER_BITS) + 2)
            client.say(Make(actor, 2, NO_ARGUMENTS, "", "", False))
            client.say(Ask(0, 3, actor, "add", NO_ARGUMENTS))
            assert "add was declared as no actor" in client.hear(ChildFailed).message


async def test_a_value_of_a_part_that_is_not_there(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            mine = -((client.number << NUMBER_BITS) + 1)
            two = Contents(stream=pickle.dumps((((1, 2),), {})), returns=2)
            client.say(declared(1, func_of(tasks.echo)))
            client.say(Submit(0, 1, 1, pack(two)), Share(mine, 1, 7))
            assert client.hear(ChildDone).child == 1
            client.say(Fetch(0, 2, mine))
            assert "has no part 7" in client.hear(ChildFailed).message


def made_up(random: random.Random, client: int, other: int) -> Message:
    """Something that a client may say, and that need not make sense."""
    some = [0, 1, 2, 3, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), other]

    def number() -> int:
        return random.choice([*some, *([random.randrange(1, 1 << 20)] * 9)])

    def identity() -> int:
        owner = random.choice([client, client, client, other])
        own = -((owner << NUMBER_BITS) + random.randrange(1, 1 << 16))
        return random.choice([own, own, own, number()])

    def segment() -> int:
        owner = random.choice([0, client, other])
        return FIRST_SEGMENT + (owner << 36) + random.randrange(4)

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
        lambda: Submit(random.choice([0, 0, number()]), number(), func, payload()),
        lambda: Withdraw(number(), number()),
        lambda: TakeLease(number(), func),
        lambda: ChildDemand(number(), number()),
        lambda: Make(identity(), func, payload(), where, where, func % 2 == 0),
        lambda: Find(number(), where, where),
        lambda: Ask(
            random.choice([0, number()]), number(), identity(), where, payload()
        ),
        lambda: Hold(identity()),
        lambda: Stop(identity(), where),
        lambda: Returned((identity(), segment()), (number(), number(), number())),
        lambda: Put(identity(), payload()),
        lambda: PutFailed(
            identity(), where, where, where, where, random.choice([None, payload()])
        ),
        lambda: Share(identity(), number(), number()),
        lambda: Fetch(number(), number(), identity()),
        lambda: Discard(identity()),
        lambda: Inquire(number(), random.choice(["why", "why task", where]), number()),
        lambda: Depart(),
    ]
    return random.choice(says)()


def harass(node: Service, random: random.Random, other: int) -> None:
    """One client that has joined, and says made-up things until it is cut off."""
    with RawClient(node) as client:
        client.joined(only_looks=False)
        funcs = [func_of(one) for one in (tasks.add, stream_tasks.numbers, Counter)]
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
                    # Else it would seldom be heard out.
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
            pass  # cut off


@pytest.mark.parametrize("seed", range(3))
async def test_made_up_messages_harm_nobody_else(node: Service, seed: int) -> None:
    source = random.Random(seed)
    with RawClient(node) as other:
        other.joined()
        async with watching(node):
            for _ in range(ROUNDS):
                harassing = asyncio.to_thread(harass, node, source, other.number)
                served = tasks.add.remote(1, 2)
                await harassing
                assert await served == 3
            other.say(Inquire(1, "resources", 0))
            assert other.hear(ChildDone).child == 1


async def test_an_answer_that_cannot_be_opened_is_an_error(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiogpu.init(address=node.path, log_to_driver=False):
        monkeypatch.setattr(status_codec, "classes", ())
        with pytest.raises(aiogpu.errors.DeserializationError):
            async with asyncio.timeout(20):
                await aiogpu.status()


async def test_leaving_twice_is_leaving(node: Service) -> None:
    async with watching(node):
        with RawClient(node) as client:
            client.joined()
            client.say(Depart(), Depart())
            client.hear(Departed)
            client.hear(Departed)


async def test_what_is_too_much_is_refused_and_no_more(no_leaks: None) -> None:
    with service(limits=Limits(max_waiting=3)) as node:
        async with aiogpu.init(address=node.path, log_to_driver=False):
            handles = [tasks.double.remote(i) for i in range(50)]
            told = await asyncio.gather(*handles, return_exceptions=True)
            refused = [one for one in told if isinstance(one, aiogpu.errors.LimitError)]
            assert told[:3] == [0, 2, 4]
            assert len(refused) + sum(isinstance(one, int) for one in told) == 50
            assert refused
            assert await tasks.double.remote(21) == 42


async def test_a_preload_that_is_mended_serves(
    node: Service, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with pytest.raises(aiogpu.errors.PreloadError, match="mended_later"):
            await aiogpu.init(address=node.path, preload=("mended_later",))
    (tmp_path / "mended_later.py").write_text("HERE = 1\n")
    async with aiogpu.init(address=node.path, preload=("mended_later",)):
        assert await tasks.modules.remote("mended_later") == {"mended_later": True}
