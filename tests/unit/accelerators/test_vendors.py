"""Which vendors are known, and those that a user adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from aiogpu.accelerators import (
    Device,
    DeviceWatch,
    Health,
    Unwatched,
    register,
    registry,
)
from aiogpu.accelerators.registry import KNOWN, amount, kinds, variables, vendor_of
from aiogpu.errors import OptionError


class Fpga:
    """A vendor of the user's own."""

    kind = "FPGA"
    option = "resources['FPGA']"
    variable = "FPGA_VISIBLE"

    def __repr__(self) -> str:
        return "<Fpga>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        return tuple(
            Device(number) for number in range(2 if wanted is None else wanted)
        )

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        return {self.variable: ",".join(map(str, ids))}

    def quantity(self, value: object) -> Any:
        return value

    def type_of(self, name: str | None) -> str | None:
        return name

    def watch(self) -> Unwatched:
        return Unwatched()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    registry._registered.clear()


def test_the_table_says_what_the_files_say() -> None:
    told = [(entry.kind, entry.variable, entry.name) for entry in KNOWN]
    said = [(v.kind, v.variable, type(v).__name__) for v in registry.vendors()]
    assert told == said
    assert kinds() == ("GPU", "neuron_cores", "TPU", "HPU", "NPU")
    assert len(set(variables())) == len(KNOWN)


def test_a_kind_has_a_vendor_and_a_custom_resource_none() -> None:
    assert [repr(vendor_of(kind)) for kind in ("GPU", "TPU")] == [
        "<Nvidia GPU>",
        "<Tpu TPU>",
    ]
    assert vendor_of("license") is None


def test_the_watch_of_most_vendors_asks_nobody() -> None:
    watch: DeviceWatch = Unwatched()
    watch.open()
    assert not watch.knows(Device(0))
    assert watch.look(Device(3)).problem == "the driver of 3 is not asked"
    assert watch.check(Device(3)) == Health()
    watch.close()


def test_a_vendor_is_registered() -> None:
    vendor = Fpga()
    register(vendor)
    assert vendor_of("FPGA") is vendor
    assert registry.vendors()[-1] is vendor
    assert kinds()[-1] == "FPGA"
    assert variables()[-1] == "FPGA_VISIBLE"


def test_the_same_again_is_harmless() -> None:
    first, second = Fpga(), Fpga()
    register(first)
    register(first)
    register(second)
    assert vendor_of("FPGA") is second, "a notebook's cell may be run again"


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ({"watch": None}, "it lacks watch."),
        ({"quantity": 1, "kind": ""}, "it lacks quantity, kind."),
        ({"variable": None}, "it lacks variable."),
    ],
)
def test_what_lacks_an_answer_is_refused(lacks: dict[str, object], told: str) -> None:
    lame = type("Lame", (Fpga,), lacks)()
    with pytest.raises(OptionError) as caught:
        register(lame)
    assert told in str(caught.value)
    assert "the methods devices, assignment, quantity, type_of, watch" in str(
        caught.value
    )
    assert vendor_of("FPGA") is None


def test_a_class_is_no_vendor() -> None:
    with pytest.raises(OptionError, match="it is a class, not an object"):
        register(Fpga)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", ["GPU", "neuron_cores", "CPU", "memory", "accelerator_type:X"]
)
def test_a_kind_of_aiogpus_own_is_taken(kind: str) -> None:
    with pytest.raises(OptionError, match=f"'{kind}' is a resource of aiogpu's own"):
        register(type("Mine", (Fpga,), {"kind": kind})())


def test_a_kind_of_another_vendors_is_taken() -> None:
    register(Fpga())
    other = type("Other", (Fpga,), {"variable": "OTHER"})
    with pytest.raises(OptionError, match="'FPGA' is the kind of <Fpga> already"):
        register(other())


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "FPGA_VISIBLE"])
def test_a_variable_is_that_of_one_vendor(variable: str) -> None:
    register(Fpga())
    more = {"kind": "OTHER", "variable": variable}
    with pytest.raises(OptionError, match=f"{variable} assigns another vendor's"):
        register(type("Other", (Fpga,), more)())


@pytest.mark.parametrize("parts", [0, 1, 10_000, 30_000])
def test_a_vendor_says_which_quantities_are_valid(parts: int) -> None:
    assert amount(Fpga(), parts) == parts


@pytest.mark.parametrize("parts", [None, "1", 1.0, True, -1, 10_001, 15_000])
def test_but_it_counts_in_parts(parts: object) -> None:
    with pytest.raises(OptionError, match=r"<Fpga> makes .* of it\. `quantity` gives"):
        amount(Fpga(), parts)
