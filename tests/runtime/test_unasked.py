"""A node without devices has nobody to ask about them, and waits for nobody."""

from __future__ import annotations

from aiogpu.core.model.ids import LeaseId, WorkerId
from aiogpu.core.model.request import Request
from aiogpu.core.resources.ledger import Lease
from aiogpu.runtime.devices.binding import NullDeviceRelease


def test_whoever_has_ended_is_let_go_at_once() -> None:
    unasked, lease, told = NullDeviceRelease(), Lease(LeaseId(1), Request()), []
    unasked.tell(told.append)
    unasked.begin(WorkerId(1), lease)
    assert not unasked.end(WorkerId(1), lease, (1,))
    unasked.forget(WorkerId(1))
    assert told == []
