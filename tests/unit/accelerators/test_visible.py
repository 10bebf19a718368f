"""Variables that name devices, as text against what there is; no NVML, no process."""

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


def named(text: str, there: Inventory = THREE, **how: bool) -> list[int | str]:
    return [device.id for device in resolve(text, there, **how)]


def refused(text: str, there: Inventory = THREE) -> str:
    with pytest.raises(DeviceError) as caught:
        resolve(text, there)
    return str(caught.value)


# Lists of indices


THERE = tuple(Device(number, name="x") for number in range(3))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("  ", ()),
        ("NoDevFiles", ()),
        ("-1", ()),
        ("2, 0 ,1", (2, 0, 1)),
        ("1,-1,7", (1,)),
    ],
)
def test_a_list_names_indices(text: str, ids: tuple[int, ...]) -> None:
    assert listed_devices.entries("V", text) == ids


@pytest.mark.parametrize(
    "text", ["0,x", "x", "0,", "1.5", "-2", "1" * 10, "²", "GPU-1"]
)
def test_an_ill_formed_entry_is_named(text: str) -> None:
    entry = text.split(",")[-1]
    with pytest.raises(DeviceError, match=r"V=.*names no device. Correct") as caught:
        listed_devices.entries("V", text)
    assert f"V={text!r}: {entry!r} names no device" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "text", "ids"),
    [
        (None, None, [0, 1, 2]),
        (2, None, [0, 1]),
        (5, None, [0, 1, 2, 3, 4]),
        (None, "2,0", [2, 0]),
        (1, "2,0", [2]),
        (None, "", []),
    ],
)
def test_what_a_node_may_share_out(
    wanted: int | None, text: str | None, ids: list[int]
) -> None:
    listed = None if text is None else ("V", text, listed_devices.entries("V", text))
    chosen = choose("num", wanted, THERE, listed)
    assert [device.id for device in chosen] == ids
    assert all(device in THERE or int(device.id) > 2 for device in chosen)


def test_a_list_is_held_against_what_there_is() -> None:
    for wanted, there, text, ids, why in (
        (
            3,
            THERE,
            "0,1",
            (0, 1),
            r"num=3, but V='0,1' names 2 devices; ask for at most",
        ),
        (None, THERE, "0,7", (0, 7), r"there is no device '7'.*has 0, 1, 2\. Name"),
    ):
        with pytest.raises(DeviceError, match=why):
            choose("num", wanted, there, ("V", text, ids))
    with pytest.raises(
        DeviceError, match="'01' names the device 1 for the second time"
    ):
        listed_devices.entries("V", "1,01")
    # Without devices it is believed only by those that give a number.
    assert choose("num", None, (), ("V", "4,5", (4, 5))) == ()
    assert choose("num", 2, (), ("V", "4,5", (4, 5))) == (Device(4), Device(5))


# CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  ", ()),
        (" NoDevFiles ", ()),
        ("-1", ()),
        (" 1 ,\t3 ", (1, 3)),
        ("02", (2,)),
        ("0,2,-1,1", (0, 2)),
        ("0, -1 ,rubbish", (0,)),
        (f"{A},0,{MIG}", (A, 0, MIG)),
        ("0,,1", (0, "", 1)),
        ("0,", (0, "")),
        ("-2", ("-2",)),
        ("+1", ("+1",)),
        ("1.0", ("1.0",)),
        ("\u0662", ("\u0662",)),  # a digit to Python, none to CUDA
        ("9" * 5000, ("9" * 5000,)),  # more digits than int() accepts
    ],
)
def test_entries(text, expected):
    assert entries(text) == expected


def test_devices_are_found_by_index_and_by_the_beginning_of_their_uuid():
    """They come in the order of the text, with what is known of them."""
    assert resolve("2,0", THREE) == (THIRD, FIRST)
    third = Device(C, "T4", C, "Tesla T4", 16 << 30)
    assert resolve(f"{C},0", THREE) == (third, FIRST)
    assert named("GPU-0,GPU-8932f,GPU-8932aaaa") == [C, A, B]


def test_an_ambiguous_beginning_is_refused():
    assert refused("2,GPU-8932") == (
        "CUDA_VISIBLE_DEVICES='2,GPU-8932': 'GPU-8932' is a prefix of the UUIDs of 2 "
        f"devices. This machine has 0 ({A}, NVIDIA A100-SXM4-40GB), "
        f"1 ({B}, NVIDIA A100-SXM4-40GB), 2 ({C}, Tesla T4). "
        "Give more digits of the UUID."
    )


@pytest.mark.parametrize("mig", [MIG + "0", MIG[:-1], OLD_MIG.replace("/1/", "/3/")])
@pytest.mark.parametrize("there", [THREE, EMPTY, MIXED], ids=["three", "none", "mig"])
def test_an_instance_that_is_not_there_is_named(mig, there):
    message = refused(mig, there)
    assert f"there is no MIG instance {mig!r}. This machine has " in message


@pytest.mark.parametrize(
    "entry", [MIG, OLD_MIG, "0", A, "GPU-8932f"], ids=lambda entry: entry[:8]
)
def test_a_gpu_in_mig_mode_is_its_first_instance(entry):
    assert resolve(entry, MIXED) == (INSTANCE,)
    assert f"names the same device as {entry!r} before" in refused(
        f"{entry},{MIG}", MIXED
    )


@pytest.mark.parametrize("entry", ["1", B, "GPU-8932a"])
def test_a_gpu_in_mig_mode_without_an_instance_is_refused(entry):
    assert refused(entry, MIXED) == (
        f"CUDA_VISIBLE_DEVICES={entry!r}: {entry!r} is a GPU in MIG mode without an "
        f"instance, which CUDA cannot use. This machine has {MIG} (NVIDIA A100 MIG "
        f"1g.5gb), {OTHER_MIG} (NVIDIA A100 MIG 2g.10gb), 2 ({C}, Tesla T4), 1 ({B}, "
        f"NVIDIA A100-SXM4-40GB) in MIG mode without an instance. Make instances "
        f"(`nvidia-smi mig -cgi`), or remove the entry."
    )


@pytest.mark.parametrize("entry", ["3", "GPU-ffff", C[:-1] + "0"])
def test_an_entry_that_is_not_there_is_named(entry):
    message = refused(f"0,{entry}")
    assert f"there is no device '{entry}'" in message
    assert f"This machine has 0 ({A}, NVIDIA A100-SXM4-40GB), 1 (" in message
    assert message.endswith("CUDA itself hides the entry and all after it.")


@pytest.mark.parametrize("there", [THREE, UNKNOWN], ids=["nvml", "no nvml"])
@pytest.mark.parametrize("entry", ["", "x", "-2", "1.0", "GPU", "GPU-xyz", "MIG-"])
def test_an_ill_formed_entry_is_refused_with_or_without_nvml(entry, there):
    message = refused(f"0,{entry},1", there)
    assert f": {entry!r} is neither an index" in message
    assert str(there) in message


@pytest.mark.parametrize(
    ("text", "again", "before"),
    [
        ("1,1", "1", "1"),
        ("1,01", "1", "1"),
        (f"0,{A}", A, "0"),
        ("GPU-8932f,0", "0", "GPU-8932f"),
        (f"GPU-8932f,{A}", A, "GPU-8932f"),
    ],
)
def test_one_device_named_twice_is_refused(text, again, before):
    message = refused(text)
    assert f"{again!r} names the same device as {before!r} before it" in message
    assert "This machine has 0 (" in message
    assert message.endswith("Name each device once.")


def test_without_nvml_entries_are_taken_as_they_are():
    found = resolve(f"7,GPU-89,{MIG}", UNKNOWN)
    assert found == (Device(7), Device("GPU-89"), Device(MIG))
    assert "This machine has no device." in refused("0", EMPTY)


def test_under_another_order_indices_have_no_details_and_a_limit():
    assert resolve("2,0", THREE, by_bus=False) == (Device(2), Device(0))
    assert named("1,GPU-0", by_bus=False) == [1, C]
    with pytest.raises(DeviceError, match="there is no device '3'"):
        resolve("3", THREE, by_bus=False)


def test_what_a_silent_device_may_be_is_not_refused():
    """With one device silent, a UUID that nobody knows may well be its own."""
    there = Inventory((FIRST, THIRD), 3, "GPU 1 does not answer: GPU is lost")
    assert resolve(f"1,{B},2", there) == (Device(1), Device(B), THIRD)
    assert refused("3", there).count("and 1 that did not answer") == 1


@pytest.mark.parametrize(
    ("wanted", "text", "message"),
    [
        (
            3,
            "0,1",
            "num_gpus=3, but CUDA_VISIBLE_DEVICES='0,1' names 2 devices; ask for at "
            "most 2, or name more.",
        ),
        (
            2,
            "0,-1,1",
            "num_gpus=2, but CUDA_VISIBLE_DEVICES='0,-1,1' names 1 device; ask for at "
            "most 1, or name more.",
        ),
        (
            1,
            "",
            "num_gpus=1, but CUDA_VISIBLE_DEVICES='' names no device; ask for "
            "num_gpus=0, or name some.",
        ),
    ],
)
def test_wanting_more_than_are_named_is_refused(wanted, text, message):
    with pytest.raises(DeviceError) as caught:
        require("num_gpus", wanted, VISIBLE, text, len(entries(text)))
    assert str(caught.value) == message
