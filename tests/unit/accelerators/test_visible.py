"""Variables that name devices, resolved against the devices of a machine."""

from __future__ import annotations

import pytest

from aiogpu.accelerators import listed_devices
from aiogpu.accelerators.listed_devices import choose, require
from aiogpu.accelerators.visible import VISIBLE, Inventory, MigGpu, entries, resolve
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError

A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
B = "GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6"
C = "GPU-00000000-d72c-4106-c12f-20bd9faed9f6"
FIRST = Device(0, "A100", A, "NVIDIA A100-SXM4-40GB", 40 << 30)
SECOND = Device(1, "A100", B, "NVIDIA A100-SXM4-40GB", 40 << 30)
THIRD = Device(2, "T4", C, "Tesla T4", 16 << 30)
THREE = Inventory((FIRST, SECOND, THIRD), 3)
UNKNOWN = Inventory(problem="NVML does not start: Driver Not Loaded")
EMPTY = Inventory((), 0)
MIG = "MIG-3ec1be0e-1b5a-5a1e-9b6e-3d8b5a0f1c2d"
OLD_MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"
OTHER_MIG = "MIG-4ec1be0e-1b5a-5a1e-9b6e-3d8b5a0f1c2d"
INSTANCE = Device(MIG, "A100", MIG, "NVIDIA A100 MIG 1g.5gb", 5 << 30, parent=A)
OTHER = Device(OTHER_MIG, "A100", OTHER_MIG, "NVIDIA A100 MIG 2g.10gb", parent=A)
SPLIT = MigGpu(FIRST, (("1/0", INSTANCE), ("2/0", OTHER)))
BARE = MigGpu(SECOND)
MIXED = Inventory((INSTANCE, OTHER, THIRD), 3, mig=(SPLIT, BARE))


def named(text: str, **options: bool) -> list[int | str]:
    return [device.id for device in resolve(text, THREE, **options)]


def refusal(text: str, machine: Inventory = THREE) -> str:
    with pytest.raises(DeviceError) as caught:
        resolve(text, machine)
    return str(caught.value)


# Lists of indices


DEVICES = tuple(Device(number, name="x") for number in range(3))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        *[("  ", ()), ("NoDevFiles", ()), ("-1", ())],
        *[("2, 0 ,1", (2, 0, 1)), ("1,-1,7", (1,))],
    ],
)
def test_list_of_indices_is_parsed(text: str, ids: tuple[int, ...]) -> None:
    assert listed_devices.entries("V", text) == ids


@pytest.mark.parametrize(
    "text", ["0,x", "x", "0,", "1.5", "-2", "1" * 10, "²", "GPU-1"]
)
def test_malformed_entry_of_a_list_is_refused(text: str) -> None:
    entry = text.split(",")[-1]
    with pytest.raises(DeviceError, match=r"V=.*names no device. Correct") as caught:
        listed_devices.entries("V", text)
    assert f"V={text!r}: {entry!r} names no device" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "text", "ids"),
    [
        *[(None, None, [0, 1, 2]), (2, None, [0, 1]), (5, None, [0, 1, 2, 3, 4])],
        *[(None, "2,0", [2, 0]), (1, "2,0", [2]), (None, "", [])],
    ],
)
def test_list_and_number_choose_the_devices_of_a_node(
    wanted: int | None, text: str | None, ids: list[int]
) -> None:
    listed = None if text is None else ("V", text, listed_devices.entries("V", text))
    chosen = choose("num", wanted, DEVICES, listed)
    assert [device.id for device in chosen] == ids
    assert all(device in DEVICES or int(device.id) > 2 for device in chosen)


def test_list_must_agree_with_the_devices_of_the_machine() -> None:
    for wanted, text, ids, message in (
        (3, "0,1", (0, 1), "num=3, but V='0,1' names 2 devices; ask for at most"),
        (None, "0,7", (0, 7), r"there is no device '7'.*has 0, 1, 2\. Name"),
    ):
        with pytest.raises(DeviceError, match=message):
            choose("num", wanted, DEVICES, ("V", text, ids))
    with pytest.raises(DeviceError, match="'01' names the device 1 for the second ti"):
        listed_devices.entries("V", "1,01")
    # Without detected devices, the list counts only if a number is given.
    assert choose("num", None, (), ("V", "4,5", (4, 5))) == ()
    assert choose("num", 2, (), ("V", "4,5", (4, 5))) == (Device(4), Device(5))


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("  ", ()), (" NoDevFiles ", ()), ("-1", ()), (" 1 ,\t3 ", (1, 3))],
        *[("02", (2,)), ("0,2,-1,1", (0, 2)), ("0, -1 ,rubbish", (0,))],
        *[(f"{A},0,{MIG}", (A, 0, MIG)), ("0,,1", (0, "", 1)), ("0,", (0, ""))],
        *[("-2", ("-2",)), ("+1", ("+1",)), ("1.0", ("1.0",))],
        ("\u0662", ("\u0662",)),  # a digit for Python, but not for CUDA
        ("9" * 5000, ("9" * 5000,)),  # more digits than int() accepts
    ],
)
def test_entries_of_the_cuda_variable_are_parsed(text, expected):
    assert entries(text) == expected


def test_devices_are_found_by_index_and_by_prefix_of_their_uuid():
    """They keep the order of the text and have their details."""
    assert resolve("2,0", THREE) == (THIRD, FIRST)
    third = Device(C, "T4", C, "Tesla T4", 16 << 30)
    assert resolve(f"{C},0", THREE) == (third, FIRST)
    assert named("GPU-0,GPU-8932f,GPU-8932aaaa") == [C, A, B]


def test_ambiguous_prefix_is_refused():
    assert refusal("2,GPU-8932") == (
        "CUDA_VISIBLE_DEVICES='2,GPU-8932': 'GPU-8932' is a prefix of the UUIDs of 2 "
        f"devices. This machine has 0 ({A}, NVIDIA A100-SXM4-40GB), "
        f"1 ({B}, NVIDIA A100-SXM4-40GB), 2 ({C}, Tesla T4). "
        "Give more digits of the UUID."
    )


@pytest.mark.parametrize("mig", [MIG + "0", MIG[:-1], OLD_MIG.replace("/1/", "/3/")])
@pytest.mark.parametrize("machine", [THREE, EMPTY, MIXED], ids=["three", "none", "mig"])
def test_missing_mig_instance_is_refused(mig, machine):
    message = refusal(mig, machine)
    assert f"there is no MIG instance {mig!r}. This machine has " in message


@pytest.mark.parametrize(
    "entry", [MIG, OLD_MIG, "0", A, "GPU-8932f"], ids=lambda entry: entry[:8]
)
def test_gpu_in_mig_mode_means_its_first_instance(entry):
    assert resolve(entry, MIXED) == (INSTANCE,)
    message = refusal(f"{entry},{MIG}", MIXED)
    assert f"names the same device as {entry!r} before" in message


@pytest.mark.parametrize("entry", ["1", B, "GPU-8932a"])
def test_gpu_in_mig_mode_without_an_instance_is_refused(entry):
    assert refusal(entry, MIXED) == (
        f"CUDA_VISIBLE_DEVICES={entry!r}: {entry!r} is a GPU in MIG mode without an "
        f"instance, which CUDA cannot use. This machine has {MIG} (NVIDIA A100 MIG "
        f"1g.5gb), {OTHER_MIG} (NVIDIA A100 MIG 2g.10gb), 2 ({C}, Tesla T4), 1 ({B}, "
        f"NVIDIA A100-SXM4-40GB) in MIG mode without an instance. Make instances "
        f"(`nvidia-smi mig -cgi`), or remove the entry."
    )


@pytest.mark.parametrize("entry", ["3", "GPU-ffff", C[:-1] + "0"])
def test_missing_device_is_refused(entry):
    message = refusal(f"0,{entry}")
    assert f"there is no device '{entry}'" in message
    assert f"This machine has 0 ({A}, NVIDIA A100-SXM4-40GB), 1 (" in message
    assert message.endswith("CUDA itself hides the entry and all after it.")


@pytest.mark.parametrize("machine", [THREE, UNKNOWN], ids=["nvml", "no nvml"])
@pytest.mark.parametrize("entry", ["", "x", "-2", "1.0", "GPU", "GPU-xyz", "MIG-"])
def test_malformed_entry_is_refused_with_and_without_nvml(entry, machine):
    message = refusal(f"0,{entry},1", machine)
    assert f": {entry!r} is neither an index" in message
    assert str(machine) in message


@pytest.mark.parametrize(
    ("text", "again", "before"),
    [
        *[("1,1", "1", "1"), ("1,01", "1", "1"), (f"0,{A}", A, "0")],
        *[("GPU-8932f,0", "0", "GPU-8932f"), (f"GPU-8932f,{A}", A, "GPU-8932f")],
    ],
)
def test_device_named_twice_is_refused(text, again, before):
    message = refusal(text)
    assert f"{again!r} names the same device as {before!r} before it" in message
    assert "This machine has 0 (" in message
    assert message.endswith("Name each device once.")


def test_entries_are_accepted_unchecked_without_nvml():
    devices = resolve(f"7,GPU-89,{MIG}", UNKNOWN)
    assert devices == (Device(7), Device("GPU-89"), Device(MIG))
    assert "This machine has no device." in refusal("0", EMPTY)


def test_indices_have_no_details_under_another_order():
    assert resolve("2,0", THREE, by_bus=False) == (Device(2), Device(0))
    assert named("1,GPU-0", by_bus=False) == [1, C]
    with pytest.raises(DeviceError, match="there is no device '3'"):
        resolve("3", THREE, by_bus=False)


def test_entry_that_may_be_a_silent_device_is_accepted():
    """An unknown UUID may belong to the device that does not answer."""
    machine = Inventory((FIRST, THIRD), 3, "GPU 1 does not answer: GPU is lost")
    assert resolve(f"1,{B},2", machine) == (Device(1), Device(B), THIRD)
    assert refusal("3", machine).count("and 1 that did not answer") == 1


@pytest.mark.parametrize(
    ("wanted", "text", "names"),
    [
        (3, "0,1", "names 2 devices; ask for at most 2, or name more."),
        (2, "0,-1,1", "names 1 device; ask for at most 1, or name more."),
        (1, "", "names no device; ask for num_gpus=0, or name some."),
    ],
)
def test_request_for_more_devices_than_named_is_refused(wanted, text, names):
    with pytest.raises(DeviceError) as caught:
        require("num_gpus", wanted, VISIBLE, text, len(entries(text)))
    request = f"num_gpus={wanted}, but CUDA_VISIBLE_DEVICES={text!r}"
    assert str(caught.value) == f"{request} {names}"
