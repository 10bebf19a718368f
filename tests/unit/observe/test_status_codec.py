"""All that a node says of itself can be said without pickle."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.server_info import pack_capacity, unpack_capacity
from aiogpu.errors import ProtocolError
from aiogpu.observe.status_codec import status_codec

KNOWN = {one.__name__ for one in status_codec.classes}
PLAIN = {"Mapping", "None"}


@pytest.mark.parametrize("record", status_codec.classes)
def test_every_class_that_a_report_contains_is_known(record: type) -> None:
    told = " ".join(str(field.type) for field in fields(record))
    named = set(re.findall(r"\b[A-Z]\w+", told))
    assert named - PLAIN <= KNOWN


def test_a_ledger_is_told_whole() -> None:
    gpus = [
        Device(0, "A100", "GPU-1", "NVIDIA A100", 80 << 30, (8, 0), "0:3B:00.0"),
        Device("MIG-2", links=frozenset({"GPU-1", "GPU-3"}), parent="GPU-1"),
    ]
    ledger = Ledger({"CPU": 40_000, "license": 1}, [DeviceSet("GPU", gpus)])
    policies = {"mps": "off", "spare_workers": 2, "memory_guard": True}
    told, how = unpack_capacity(pack_capacity(ledger, policies))
    assert how == policies
    assert told.capacity == ledger.capacity
    assert told.device_sets["GPU"].devices == tuple(gpus)
    assert told.totals() == ledger.totals()


@pytest.mark.parametrize(
    "told", [(), ({"CPU": "4"}, (), {}), ({}, (("GPU", ((),)),), {})]
)
def test_what_is_no_capacity_is_told(told: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError):
        unpack_capacity(status_codec.dump(told))
