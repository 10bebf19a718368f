"""Quantities, sizes, requests, specs and records: what is valid, equal, allowed."""

import re
from itertools import product

import pytest

from aiogpu.core.model.request import (
    DEEPEST,
    Device,
    DeviceSelector,
    DurationEstimate,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.text import escaped, in_words, listing, printable, span, terms
from aiogpu.core.model.units import (
    BY_SHARE,
    LARGEST,
    LEAST,
    MOST_PARTS,
    UNIT,
    device_quantity,
    memory_size,
    parse_size,
    quantity,
)
from aiogpu.core.records import (
    TASK_LEADS_TO,
    WORKER_LEADS_TO,
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    binding_of,
)
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.errors import InternalError, OptionError
from tests.core.builders import A100, GIB, H100


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        *[(0, 0), (-0.0, 0), (1, 10_000), (0.5, 5_000), (0.57, 5_700), (0.29, 2_900)],
        *[(1 / 3, 3_333), (2 / 3, 6_666), (0.1, 1_000), (0.1 + 0.2, 3_000)],
        *[(0.0001, 1), (0.00019, 1), (0.99999, 9_999), (128.5, 1_285_000)],
        (MOST_PARTS, MOST_PARTS * UNIT),
    ],
)
def test_quantity_truncates_the_decimal_text(value, parts):
    assert quantity("num_gpus", value) == parts


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "num_gpus=True is a bool; give an int or a float"),
        ("1", "num_gpus='1' is a str; give an int or a float"),
        (None, "num_gpus=None is a NoneType"),
        ([1], "num_gpus=[1] is a list"),
        (1j, "num_gpus=1j is a complex"),
        (float("nan"), "num_gpus=nan is not a quantity; give a finite number"),
        (float("inf"), "num_gpus=inf is not a quantity"),
        (float("-inf"), "num_gpus=-inf is not a quantity"),
        (-1, "num_gpus=-1 is not a quantity"),
        (-0.5, "num_gpus=-0.5 is not a quantity"),
        (10**15, "from 0 to 1e+14"),
        pytest.param(10**400, "is not a quantity", id="beyond floats"),
        (0.00001, "num_gpus=1e-05 is finer than 1/10000"),
        (5e-324, "num_gpus=5e-324 is finer than 1/10000"),
    ],
)
def test_invalid_quantity_is_refused(value, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        quantity("num_gpus", value)


@pytest.mark.parametrize("value", [1.5, 2.0001, 3.9999])
def test_several_devices_must_be_whole(value):
    with pytest.raises(OptionError, match="mixes whole devices and a share"):
        device_quantity("num_gpus", value)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        *[(0, 0), (12, 12), (LARGEST, LARGEST), ("6GiB", 6 << 30), ("6 gib", 6 << 30)],
        *[("0.5KiB", 512), ("500MB", 500_000_000), ("1TB", 10**12), ("1TiB", 1 << 40)],
        (" 7 B ", 7),
    ],
)
def test_sizes_are_parsed(given, count):
    assert parse_size("memory", given) == count


@pytest.mark.parametrize(
    "given",
    [-1, 1.5, True, None, LARGEST + 1, "6", "", "GiB", "6GiBB", "-1GB", "nanGB"],
)
def test_invalid_size_is_refused(given):
    for read in (parse_size, memory_size):
        with pytest.raises(OptionError) as caught:
            read("memory", given)
        assert f"memory={given!r}" in str(caught.value)
        assert '"6GiB"' in str(caught.value)


@pytest.mark.parametrize("given", [0, "0B", LEAST, "1MiB", "2GiB", LARGEST])
def test_memory_size_accepts_zero_and_large_sizes(given):
    assert memory_size("memory", given) == parse_size("memory", given)


@pytest.mark.parametrize(
    ("given", "begins", "ends"),
    [
        (1, "means 1 byte, too few for any process", '"1GiB".'),
        (2, "means 2 bytes,", '"2GiB".'),
        (8000, "means 8000 bytes,", '"8000MiB".'),
        (LEAST - 1, f"means {LEAST - 1} bytes,", '"65536MiB".'),
        ("80B", "means 80 bytes, too few for any process;", "give at least 1MiB."),
        ("500KB", "means 500000 bytes,", "give at least 1MiB."),
    ],
)
def test_memory_size_without_unit_is_refused(given, begins, ends):
    with pytest.raises(OptionError) as caught:
        memory_size("gpu_memory", given)
    assert str(caught.value).startswith(f"gpu_memory={given!r} {begins}")
    assert str(caught.value).endswith(ends)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(-0.1, "0.0 s"), (0.04, "0.0 s"), (0.25, "0.2 s"), (9.94, "9.9 s")],
        *[(9.95, "10 s"), (119.4, "119 s"), (119.5, "2 min"), (7100, "118 min")],
        *[(7170, "2 h"), (360_000, "100 h")],
    ],
)
def test_spans_are_formatted(seconds, text):
    assert span(seconds) == text


def test_lists_and_amounts_are_formatted():
    assert [listing(*some) for some in ((["a"], 1), ("abcdefghij", 10), ("ab", 5))] == [
        "a",
        "a, b, c, d, e, f, g, h, and 2 more",
        "a, b, and 3 more",
    ]
    assert listing([], 0) == ""
    assert [in_words(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        *("", "a", "a and b", "a, b and c")
    ]
    assert terms({"CPU": 1.0, "GPU": 0.25}.items()) == "{CPU: 1, GPU: 0.25}"
    memory = Request.of({"CPU": 10_000, "memory": (6 << 30) * 10_000}, {})
    assert str(memory) == "{CPU: 1, memory: 6GiB}"


def test_control_characters_are_replaced():
    assert printable("mödel 日本") == "mödel 日本"
    assert printable("a\nb\x1b[31m\u202ec") == "a?b?[31m?c"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (DeviceSelector(least_memory=40 * GIB), "memory of 40GiB or more"),
        (DeviceSelector(least_capability=(8, 6)), "compute capability 8.6 or more"),
        (DeviceSelector(name="*h100*"), "a name like '*h100*'"),
        (
            DeviceSelector(GIB, (9, 0)),
            "memory of 1GiB or more and compute capability 9.0 or more",
        ),
    ],
)
def test_conditions_are_formatted(where, told):
    assert str(where) == told


def test_device_must_fulfil_conditions_and_type():
    cards = [A100, H100, Device(2, "A100", memory=40 * GIB)]
    devices = DeviceSet("GPU", cards)
    large = DeviceSelector(least_memory=80 * GIB)
    request = Request.of({}, {"GPU": UNIT}, "A100", where=large)
    assert devices.fitting(request) == 0b001
    assert devices.choose(2 * UNIT, request) is None


def spec_of(request: Request, *environment: tuple[str, str]) -> TaskSpec:
    """Make a spec with a request."""
    return TaskSpec("f", Shape(request, environment))


TABLES = [
    pytest.param(TaskRecord, TASK_LEADS_TO, TaskState.WAITING, id="task"),
    pytest.param(WorkerRecord, WORKER_LEADS_TO, WorkerState.STARTING, id="worker"),
]


@pytest.mark.parametrize(("record_class", "table", "first"), TABLES)
def test_records_move_only_along_their_tables(record_class, table, first):
    states = list(type(first))
    reached = {first}
    for _ in table:
        reached |= {after for before in reached for after in table[before]}
    assert reached == set(table) == set(states)
    assert [state for state, after in table.items() if not after] == [states[-1]]
    assert all(states[-1] in table[state] for state in states[:-1])
    for before, after in product(states, repeat=2):
        parts = (spec_of(Request()),) if record_class is TaskRecord else ()
        record = record_class(7, *parts, state=before)
        if after in table[before]:
            record.move(after)
            assert record.state is after
        else:
            with pytest.raises(InternalError, match="7 cannot go"):
                record.move(after)
            assert record.state is before


def test_binding_has_environment_devices_and_memory_limit():
    """The binding ignores amounts; a framework reads its limit only once."""
    cards = [Device(0, memory=80), Device(1), Device(2)]
    bindings = []
    for amount, memory in (
        *((2_500, 0), (5_000, 0), (2 * UNIT, 0)),
        *((1_000, 10), (2_000, 10), (1_000, BY_SHARE), (500, BY_SHARE)),
    ):
        ledger = Ledger({}, [DeviceSet("GPU", cards)])
        lease = ledger.take(Request.of({}, {"GPU": amount}, gpu_memory=memory))
        bindings.append(binding_of(spec_of(lease.request, ("A", "1")), lease))
    assert {environment for environment, _, _ in bindings} == {(("A", "1"),)}
    masks = [devices for _, devices, _ in bindings]
    assert masks[:3] == [(("GPU", (0,)),), (("GPU", (0,)),), (("GPU", (0, 1)),)]
    assert [limit for _, _, limit in bindings] == [0, 0, 0, 10, 10, -1_000, -500]
    cpu = Request.of({"CPU": UNIT}, {})
    assert binding_of(spec_of(cpu), Ledger({"CPU": UNIT}).take(cpu)) == ((), (), 0)


def pace(*durations: float) -> DurationEstimate:
    """Make an estimate from these durations."""
    made = DurationEstimate()
    for took in durations:
        made.note(took)
    return made


def test_duration_estimate_follows_and_forgives_an_outlier():
    """The kernel may have suspended the worker."""
    assert DurationEstimate().depth == 0
    made = pace(*[1e-5] * 50)
    made.note(1.0)
    assert 40 < made.depth < DEEPEST
    assert pace(*[1e-5] * 50, *[1.0] * 8).depth == 0
    made = pace(1.0, *[1e-5] * 60)
    assert (made.depth, made.mean) == (DEEPEST, pytest.approx(1e-5, rel=0.1))


def test_characters_that_command_a_terminal_are_escaped():
    """Tabs and ends of lines stay; bytes that are no characters are shown as bytes."""
    assert escaped("a\tb\n\x1b[2J") == "a\tb\n\\x1b[2J"
    assert escaped("\u202eabc") == "\\u202eabc"
    assert escaped(b"\xff!".decode("utf-8", "surrogateescape")) == "\\xff!"
