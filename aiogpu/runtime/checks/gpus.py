"""What NVML tells here: which GPUs there are, and what can be asked of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from aiogpu.accelerators.base import Health, Sample
from aiogpu.accelerators.nvidia import Nvidia, inventory
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.accelerators.visible import VISIBLE, Inventory
from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError
from aiogpu.runtime.checks.finding import Finding, Level

UNVERIFIED: Final = "Shares come back when their processes end, and are `unverified`."


def check_gpus(
    take: Callable[[], Inventory] = inventory,
    make_watch: Callable[[], NvmlWatch] = NvmlWatch,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """NVML, each GPU, and what `CUDA_VISIBLE_DEVICES` leaves of them."""
    there = take()
    if there.count is None:
        yield Finding(
            "nvml",
            Level.MISSING,
            there.problem or "it says nothing",
            "GPUs are not detected; `num_gpus=` makes logical ones.",
            "Install NVIDIA's driver, or give the container `--gpus all`.",
        )
    else:
        watch = make_watch()
        watch.open()
        try:
            yield _nvml(there, watch.driver_version)
            yield from _unused(there)
            for device in there.devices:
                yield _device(device, watch.look(device), watch.check(device))
        finally:
            watch.close()
    yield _visible(environ)


def _nvml(there: Inventory, version: str | None) -> Finding:
    count = f"{there.count} GPU{'s' * (there.count != 1)}"
    told = f"driver {version or 'of unknown version'}, {count}"
    if there.problem is None:
        return Finding("nvml", Level.OK, told)
    return Finding(
        "nvml",
        Level.WARN,
        f"{told}; {there.problem}",
        "A GPU that does not answer is not shared out.",
        "See what `nvidia-smi` says of it.",
    )


def _unused(there: Inventory) -> Iterator[Finding]:
    for mig in there.mig:
        if not mig.instances:
            yield Finding(
                f"gpu {mig.gpu.id}",
                Level.WARN,
                f"{mig.gpu.name or 'without a name'}: in MIG mode, without an instance",
                "No task can use it, and it is not shared out.",
                "Make instances (`nvidia-smi mig -cgi`), or leave MIG mode.",
            )


def _device(device: Device, sample: Sample, health: Health) -> Finding:
    name = f"gpu {device.id}"
    told = device.name or "without a name"
    if sample.problem is not None:
        return Finding(
            name,
            Level.WARN,
            f"{told}: {sample.problem}",
            "It is set aside." if sample.is_lost else UNVERIFIED,
            "See what `nvidia-smi` says of it.",
        )
    if health.action:
        return Finding(
            name,
            Level.WARN,
            f"{told}: its driver asks for this: {health.action}",
            "It is not given to tasks until that is done.",
            "See what `nvidia-smi -q` says of it.",
        )
    parts = [told]
    if sample.used is not None:
        parts.append(f"{sample.used / 2**30:.1f} GiB in use")
    if sample.processes is not None:
        parts.append(f"{len(sample.processes)} processes listed")
    told = ", ".join(parts)
    if sample.processes is None:
        means = "A share of it comes back `unverified`."
        if sample.used is None:
            means = UNVERIFIED
        return Finding(name, Level.WARN, f"{told}; it lists no processes", means)
    if not sample.reads_pids:
        return Finding(
            name,
            Level.WARN,
            f"{told}; whether their ids are ours is unknown before a task of ours "
            f"is listed",
            "Until then a share of it comes back `unverified`.",
            "To have it verified, run the container with `--pid=host`.",
        )
    return Finding(name, Level.OK, told)


def _visible(environ: Mapping[str, str]) -> Finding:
    """Return what a node would share out, said by the rules that it goes by."""
    text = environ.get(VISIBLE)
    try:
        devices = Nvidia().devices(environ, None)
    except DeviceError as error:
        return Finding(
            "visible gpus",
            Level.WARN,
            str(error),
            "A node does not start, unless num_gpus=0.",
            f"Correct {VISIBLE}.",
        )
    ids = ", ".join(str(device.id) for device in devices) or "none"
    said = f"{VISIBLE}={text!r}" if text is not None else f"{VISIBLE} is not set"
    return Finding("visible gpus", Level.OK, f"{said}: a node shares out {ids}")
