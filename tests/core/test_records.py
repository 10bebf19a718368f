"""Records move along their tables only; a binding is environment and devices."""

import pytest

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.records import (
    TASK_LEADS_TO,
    WORKER_LEADS_TO,
    Kin,
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    binding_of,
    sort_key,
)
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.errors import InternalError


def spec_of(request: Request, *environment: tuple[str, str]) -> TaskSpec:
    """A spec that asks for this."""
    return TaskSpec("f", Shape(request, environment))


@pytest.mark.parametrize("before", TaskState)
@pytest.mark.parametrize("after", TaskState)
def test_a_task_moves_where_its_table_leads(before, after):
    record = TaskRecord(TaskId(7), spec_of(Request()), state=before)
    if after in TASK_LEADS_TO[before]:
        record.move(after)
        assert record.state is after
    else:
        with pytest.raises(InternalError, match="task 7 cannot go"):
            record.move(after)
        assert record.state is before


@pytest.mark.parametrize("before", WorkerState)
@pytest.mark.parametrize("after", WorkerState)
def test_a_worker_moves_where_its_table_leads(before, after):
    record = WorkerRecord(WorkerId(7), state=before)
    if after in WORKER_LEADS_TO[before]:
        record.move(after)
        assert record.state is after
    else:
        with pytest.raises(InternalError, match="worker 7 cannot go"):
            record.move(after)
        assert record.state is before


def test_a_binding_is_environment_and_devices_but_not_amounts():
    ledger = Ledger({}, [DeviceSet("GPU", [Device(0), Device(1), Device(2)])])
    bindings = []
    for amount in (2_500, 5_000, 2 * UNIT):
        request = Request.of({}, {"GPU": amount})
        lease = ledger.take(request)
        assert lease is not None
        bindings.append(binding_of(spec_of(request, ("A", "1")), lease))
    quarter, half, two = bindings
    assert quarter == half == ((("A", "1"),), (("GPU", (0,)),), 0)
    assert two == ((("A", "1"),), (("GPU", (1, 2)),), 0)


def test_a_binding_is_also_the_limit_on_device_memory():
    """[B27] A framework is told of its limit once."""
    ledger = Ledger({}, [DeviceSet("GPU", [Device(0, memory=80)])])
    bindings = []
    for amount, memory in (
        (1_000, 10),
        (2_000, 10),
        (1_000, BY_SHARE),
        (500, BY_SHARE),
    ):
        lease = ledger.take(Request.of({}, {"GPU": amount}, gpu_memory=memory))
        assert lease is not None
        bindings.append(binding_of(spec_of(lease.request), lease))
    assert [limit for _, _, limit in bindings] == [10, 10, -1_000, -500]


def test_without_devices_the_environment_alone_binds():
    request = Request.of({"CPU": UNIT}, {})
    lease = Ledger({"CPU": UNIT}).take(request)
    assert lease is not None
    assert binding_of(spec_of(request), lease) == ((), (), 0)


def test_a_task_stands_by_its_priority_until_it_has_kin():
    record = TaskRecord(TaskId(1), TaskSpec("f", Shape(Request()), priority=2))
    assert sort_key(record) == (-2, 0)
    record.kin = Kin((-5, -1))
    assert sort_key(record) == (-5, -1)
