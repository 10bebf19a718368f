"""Leases are taken whole or not at all, and what is free is always exact."""

import pytest

from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT, device_quantity, quantity
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger


def ledger(cpus: float = 4, gpus: int = 2, **others: float) -> Ledger:
    """A node with so many CPUs and GPUs."""
    scalars = {"CPU": cpus, **others}
    return Ledger(
        {name: quantity(name, amount) for name, amount in scalars.items()},
        [DeviceSet("GPU", [Device(index, "A100") for index in range(gpus)])],
    )


def asking(
    cpus: float = 0, gpus: float = 0, *, kind: str | None = None, spread=False, **others
):
    """A request in the user's numbers."""
    scalars = {"CPU": cpus, **others}
    return Request.of(
        {name: quantity(name, amount) for name, amount in scalars.items()},
        {"GPU": device_quantity("GPU", gpus)},
        kind,
        spread=spread,
    )


def test_a_lease_is_taken_and_given_back():
    node = ledger()
    lease = node.take(asking(1, 0.25))
    assert lease is not None
    assert lease.shares == (((0, 2_500),),)
    assert node.available() == {"CPU": 3.0, "GPU": 1.75}
    node.check()
    node.give_back(lease)
    assert node.available() == node.totals() == {"CPU": 4.0, "GPU": 2.0}
    node.check()


def test_a_lease_is_given_back_once():
    node = ledger()
    lease = node.take(asking(1))
    assert lease is not None
    node.give_back(lease)
    with pytest.raises(KeyError):
        node.give_back(lease)


def test_nothing_is_taken_where_one_thing_is_short():
    node = ledger(cpus=4, gpus=1, license=1)
    assert node.take(asking(5, 1)) is None
    assert node.take(asking(1, 2)) is None
    assert node.take(asking(1, 1, license=2)) is None
    assert node.take(asking(1, 1, unknown=1)) is None
    assert node.available() == node.totals()
    assert not node.leases


def test_devices_of_a_kind_that_is_not_there_are_not_found():
    node = Ledger({"CPU": UNIT})
    assert node.take(asking(1, 0.5)) is None
    assert node.why_infeasible(asking(0, 0.5)) == "it lacks GPU 0.5 of 0"
    assert node.available() == {"CPU": 1.0}


def test_a_thousand_tenths_do_not_drift():
    node = ledger(cpus=100)
    tenth = asking(0.1)
    leases = [node.take(tenth) for _ in range(1000)]
    assert node.available()["CPU"] == 0.0
    assert node.take(tenth) is None
    for lease in leases:
        assert lease is not None
        node.give_back(lease)
    assert node.free == node.capacity


def test_shares_are_packed_unless_the_request_spreads_them():
    """[B24]"""
    node = ledger()
    requests = [asking(0, 0.25), asking(0, 0.25, spread=True), asking(0, 0.25)]
    leases = [node.take(request) for request in requests]
    assert [lease and lease.shares[0][0][0] for lease in leases] == [0, 1, 0]
    node.check()


def test_a_request_stays_off_the_devices_that_are_barred_to_it():
    """[B24]"""
    node = ledger(gpus=3)
    assert node.take(asking(1, 0.5), barred={"GPU": 0b111}) is None
    assert node.take(asking(1, 2), barred={"GPU": 0b101}) is None
    assert node.available() == node.totals()
    first = node.take(asking(1, 0.5), barred={"GPU": 0b011})
    assert first is not None
    assert first.shares == (((2, 5_000),),)
    other = node.take(asking(1, 1), barred={"TPU": 0b111})
    assert other is not None
    assert other.shares == (((0, UNIT),),)
    assert node.take(asking(1), barred={"GPU": 0b111}) is not None
    node.check()


def test_a_request_leaves_what_is_kept_from_it():
    """[B24]"""
    node = ledger(cpus=4, license=1)
    kept = {"CPU": 3 * UNIT, "TPU": UNIT}
    assert node.take(asking(2), kept=kept) is None
    assert node.take(asking(1, 1, license=1), kept={"license": 1}) is None
    assert node.available() == node.totals()
    assert node.take(asking(1, 1, license=1), kept=kept) is not None
    assert node.take(asking(0.5), kept=kept) is None
    assert node.take(asking(0, 1), kept=kept) is not None
    assert node.take(asking(3), kept={}) is not None
    node.check()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (asking(4, 2), None),
        (asking(0, 0.25), None),
        (asking(5), "it lacks CPU 5 of 4"),
        (asking(0, 3), "it lacks GPU 3 of 2"),
        (asking(0, 0, license=1), "it lacks license 1 of 0"),
        (asking(0, 1, kind="T4"), "there is no GPU of type 'T4' (there are: 2 x A100)"),
    ],
)
def test_what_a_node_can_never_meet_is_said_in_words(request_, reason):
    assert ledger().why_infeasible(request_) == reason


def test_too_few_devices_of_a_type():
    node = ledger(**{"accelerator_type:A100": 1})
    assert (
        node.why_infeasible(asking(0, 3, kind="A100"))
        == "it lacks GPU 3 of 2 of type A100"
    )


def test_a_busy_node_is_not_an_infeasible_one():
    node = ledger(cpus=1)
    assert node.take(asking(1)) is not None
    assert node.why_infeasible(asking(1)) is None


def test_the_cpus_of_one_who_waits_are_lent_and_nothing_else():
    """[B12]"""
    node = ledger(cpus=2, gpus=1, license=1)
    lease = node.take(asking(2, 0.5, license=1))
    assert lease is not None
    node.lend(lease)
    assert lease.is_lent
    assert node.available() == {"CPU": 2.0, "license": 0.0, "GPU": 0.5}
    node.check()
    node.resume(lease)
    assert not lease.is_lent
    assert node.available() == {"CPU": 0.0, "license": 0.0, "GPU": 0.5}
    node.check()


def test_who_goes_on_takes_his_cpus_at_once_though_others_have_them():
    """[B12]"""
    node = ledger(cpus=2)
    lent = node.take(asking(2))
    assert lent is not None
    node.lend(lent)
    other = node.take(asking(1))
    assert other is not None
    node.resume(lent)
    assert node.free == {"CPU": -UNIT}
    assert node.is_overdrawn
    assert node.available()["CPU"] == 0.0
    assert node.take(asking(0.5)) is None
    node.check()
    node.give_back(other)
    assert not node.is_overdrawn
    node.give_back(lent)
    assert node.free == node.capacity


def test_a_lease_that_is_lent_can_be_given_back():
    node = ledger(cpus=2)
    lease = node.take(asking(2))
    assert lease is not None
    node.lend(lease)
    node.give_back(lease)
    assert node.free == node.capacity
    node.check()


def test_a_lease_helps_who_is_short_of_what_it_holds():
    node = ledger(cpus=2, license=1)
    plain, licensed = node.take(asking(1)), node.take(asking(0, license=1))
    assert plain is not None
    assert licensed is not None
    short = asking(1, license=1)
    assert not node.would_help(plain, short)
    assert node.would_help(licensed, short)


def test_a_ledger_shows_what_is_free():
    node = ledger()
    node.take(asking(1, 0.5))
    assert repr(node) == "<Ledger CPU 3/4, GPU 1.5/2; 1 leases>"


def test_check_notices_an_amount_that_nobody_holds():
    node = ledger()
    node.take(asking(1, 0.5))
    node.free["CPU"] += 1
    with pytest.raises(AssertionError):
        node.check()


def test_check_notices_a_share_that_nobody_holds():
    node = ledger()
    node.take(asking(1, 0.5))
    node.device_sets["GPU"].free[1] -= 1
    with pytest.raises(AssertionError):
        node.check()


@pytest.mark.parametrize(
    ("asked", "room"),
    [
        (asking(1), 4),
        (asking(1.5), 2),
        (asking(5), 0),
        (asking(1, 1), 2),
        (asking(0, 1), 2),
        (asking(0, 0.3), 6),
        (asking(0, 0.5), 4),
        (asking(0, 2), 1),
        (asking(0, 3), 0),
        (asking(0, 0.5, kind="A100"), 4),
        (asking(0, 0.5, kind="H100"), 0),
        (asking(0, 0.25, license=1), 3),
        (asking(0, 0, phone=1), 0),
        (asking(), None),
    ],
    ids=str,
)
def test_how_many_leases_an_idle_node_has_room_for(asked, room):
    node = ledger(license=3, **{"accelerator_type:A100": 1})
    node.take(asking(2, 1))
    assert node.room_for(asked) == room


def test_who_gives_his_cpus_back_needs_no_room_for_them():
    node = ledger()
    assert node.room_for(asking(1), are_lent=True) is None
    assert node.room_for(asking(1, 0.5), are_lent=True) == 4
    assert node.room_for(asking(1, license=1), are_lent=True) == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1, 2])
def test_there_is_room_for_as_many_as_can_be_taken(share):
    node = ledger(cpus=0, gpus=3)
    room = node.room_for(asking(0, share))
    assert all(node.take(asking(0, share)) for _ in range(room))
    assert node.take(asking(0, share)) is None
