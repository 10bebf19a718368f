"""Vendors are asked beside each other, and one of them has the node's GPUs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiogpu.accelerators import registry
from aiogpu.core.model.request import Device
from aiogpu.engines.devices import detect
from aiogpu.errors import DeviceError

pytestmark = pytest.mark.either_loop


@dataclass
class Paper:
    """A vendor with devices on paper; what it is asked is kept."""

    kind: str
    name: str
    there: tuple[Device, ...] = ()
    error: BaseException | None = None
    hangs: bool = False
    given: Any = field(default_factory=dict)
    asked: list[int | None] = field(default_factory=list)
    may_end: threading.Event = field(default_factory=threading.Event)

    option = "num_paper"
    variable = "PAPER"

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        self.asked.append(wanted)
        if self.hangs:
            self.may_end.wait()
        if self.error is not None:
            raise self.error
        if wanted is None:
            return self.there
        logical = (Device(number) for number in range(len(self.there), wanted))
        return (*self.there, *logical)[:wanted]

    def assignment(self, ids: Sequence[int | str], environ: Mapping[str, str]) -> Any:
        return self.given


def cards(number: int) -> tuple[Device, ...]:
    return tuple(Device(index, name="card") for index in range(number))


async def found(
    *vendors: Paper, limit: float = 60, **wanted: int
) -> list[tuple[str, int]]:
    told = await detect(vendors, {}, wanted, limit)  # type: ignore[arg-type]
    return [(repr(each.vendor), len(each.devices)) for each in told]


async def test_the_first_with_devices_has_the_gpus() -> None:
    one, two, three = Paper("GPU", "A"), Paper("GPU", "B", cards(2)), Paper("GPU", "C")
    assert await found(one, two, three) == [("<B>", 2)]


async def test_without_any_the_first_has_none() -> None:
    assert await found(Paper("GPU", "A"), Paper("GPU", "B")) == [("<A>", 0)]


async def test_another_that_has_some_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = Paper("GPU", "A", cards(1)), Paper("GPU", "B", cards(2))
    assert await found(one, two, Paper("GPU", "C")) == [("<A>", 1)]
    (record,) = caplog.records
    assert record.message == (
        "! the GPUs of this node are those of <A>; 2 of <B> are not shared out."
    )


async def test_a_given_number_is_of_who_has_cards() -> None:
    one, two = Paper("GPU", "A"), Paper("GPU", "B", cards(2))
    assert await found(one, two, GPU=3) == [("<B>", 3)]
    assert (one.asked, two.asked) == ([3], [None, 3])


async def test_a_given_number_is_the_firsts_where_nobody_has_any() -> None:
    one, two = Paper("GPU", "A"), Paper("GPU", "B")
    assert await found(one, two, GPU=3) == [("<A>", 3)]


async def test_none_are_wanted() -> None:
    one, two = Paper("GPU", "A", cards(1)), Paper("GPU", "B", cards(2))
    assert await found(one, two, GPU=0) == [("<A>", 0)]
    assert one.asked == two.asked == [0]


async def test_what_a_variable_names_is_less_than_a_card() -> None:
    """Entries that nobody could check, beside cards that are there."""
    spoken = Paper("GPU", "A", (Device(0), Device(1)))
    assert await found(spoken, Paper("GPU", "B", cards(1))) == [("<B>", 1)]
    assert await found(spoken, Paper("GPU", "B")) == [("<A>", 2)]


async def test_other_kinds_stand_beside_the_gpus() -> None:
    gpus, cores = Paper("GPU", "A", cards(1)), Paper("cores", "N", cards(2))
    assert await found(gpus, cores, Paper("TPU", "T")) == [("<A>", 1), ("<N>", 2)]
    assert await found(gpus, cores, cores=1) == [("<A>", 1), ("<N>", 1)]


async def test_an_error_is_raised_unless_it_is_nobodys() -> None:
    error = DeviceError("not there")
    bad = Paper("GPU", "B", error=error)
    with pytest.raises(DeviceError) as caught:
        await found(Paper("GPU", "A"), bad)
    assert caught.value is error
    assert await found(Paper("GPU", "A", cards(1)), bad) == [("<A>", 1)]
    with pytest.raises(DeviceError, match="not there"):
        await found(Paper("GPU", "A", cards(1)), Paper("cores", "N", error=error))


async def test_a_vendor_that_fails_is_named() -> None:
    with pytest.raises(DeviceError, match=r"<N> cannot say.*: KeyError: 'a'") as caught:
        await found(Paper("GPU", "A"), Paper("cores", "N", error=KeyError("a")))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(DeviceError, match=r"<N> cannot say.*: TimeoutError: mine"):
        await found(Paper("GPU", "A"), Paper("cores", "N", error=TimeoutError("mine")))


async def test_a_vendor_that_hangs_costs_the_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus, cores = Paper("GPU", "A", cards(1)), Paper("cores", "N", hangs=True)
    assert await found(gpus, cores, limit=0.05) == [("<A>", 1)]
    (record,) = caplog.records
    assert record.message == (
        "! <N> has not said for 0.05 s which devices there are; none is shared out."
    )
    cores.may_end.set()


async def test_what_was_asked_of_one_that_hangs_is_an_error() -> None:
    gpus = Paper("GPU", "A", hangs=True)
    with pytest.raises(
        DeviceError, match=r"num_paper=2, but <A> has not said for 0\.0"
    ):
        await found(gpus, GPU=2, limit=0.05)
    gpus.may_end.set()


async def test_all_are_asked_at_once() -> None:
    """Each waits until the other is asked."""
    together = threading.Barrier(2)

    class Meeting(Paper):
        def devices(
            self, environ: Mapping[str, str], wanted: int | None
        ) -> tuple[Device, ...]:
            together.wait(60)
            return super().devices(environ, wanted)

    assert await found(Meeting("GPU", "A"), Meeting("cores", "N", cards(1))) == [
        ("<A>", 0),
        ("<N>", 1),
    ]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Paper:
    vendor = Paper("mine", "M", cards(2))
    monkeypatch.setitem(registry._registered, "mine", vendor)  # type: ignore[arg-type]
    return vendor


@pytest.mark.parametrize(
    ("there", "given", "wanted", "why"),
    [
        ((1, 2), {}, {}, r"devices\(\) gave \(1, 2\), which are no Devices"),
        ((Device(0), Device(0)), {}, {}, r"the ids \[0, 0\], one of them twice"),
        (cards(2), {"A": 1}, {}, r"assignment\(\[0, 1\]\) gave {'A': 1}, no dict"),
        (cards(2), None, {}, "gave None, no dict of texts"),
    ],
)
async def test_a_users_vendor_is_checked_before_a_task_needs_it(
    registered: Paper,
    there: tuple[Any, ...],
    given: object,
    wanted: dict[str, int],
    why: str,
) -> None:
    registered.there, registered.given = there, given
    with pytest.raises(DeviceError, match=f"<M> cannot say.*{why}"):
        await found(Paper("GPU", "A"), registered, **wanted)


async def test_a_users_vendor_gives_as_many_as_are_wanted(registered: Paper) -> None:
    assert await found(Paper("GPU", "A"), registered, mine=3) == [
        ("<A>", 0),
        ("<M>", 3),
    ]
    registered.devices = lambda environ, wanted: cards(2)  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"devices\(\) gave 2 where 3 were wanted"):
        await found(Paper("GPU", "A"), registered, mine=3)
