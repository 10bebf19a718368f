"""Tasks for tests on a real card, once for each framework that uses it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from tests.support.gate import pass_gate

GIB = 1 << 30
kept: list[Any] = []
"""What a task leaks, for as long as its process lives."""


def taken(framework: str, count: int) -> Any:
    """So many bytes of the first visible device, written to."""
    if framework == "torch":
        import torch

        return torch.ones(count, dtype=torch.uint8, device="cuda:0")
    import cupy

    return cupy.ones(count, dtype=cupy.uint8)


def first(framework: str, piece: Any) -> int:
    """One element, for which all that was started on the device must have ended."""
    return int(piece[0].item() if framework == "torch" else piece[0].get())


def see(framework: str) -> dict[str, Any]:
    """What a framework says of the devices that it sees."""
    import aiogpu

    if framework == "torch":
        import torch

        count = torch.cuda.device_count()
        uuids = [torch.cuda.get_device_properties(i).uuid for i in range(count)]
        shown = [f"GPU-{uuid}" for uuid in uuids]
    else:
        from cupy.cuda import runtime

        shown = [
            f"GPU-{UUID(bytes=bytes(runtime.getDeviceProperties(i)['uuid']))}"
            for i in range(runtime.getDeviceCount())
        ]
    return {"ids": aiogpu.get_gpu_ids(), "uuids": shown}


def compute(framework: str, size: int = 1 << 20) -> int:
    """Use the device a little."""
    return first(framework, taken(framework, size))


def compute_at_gate(framework: str, path: str, name: str) -> int:
    """Hold some of the device's memory, and wait to be let on."""
    piece = taken(framework, 1 << 24)
    assert first(framework, piece) == 1
    pass_gate(path, name)
    return first(framework, piece)


def leak(framework: str, count: int) -> int:
    """Take memory and never give it back."""
    kept.append(taken(framework, count))
    return first(framework, kept[-1])


def free_bytes(framework: str) -> int:
    """What the device says is free."""
    if framework == "torch":
        import torch

        return int(torch.cuda.mem_get_info(0)[0])
    from cupy.cuda import runtime

    return int(runtime.memGetInfo()[0])


def spin(path: str) -> None:
    """Have a kernel run for about an hour, and wait for its end in C."""
    import torch

    compute("torch")
    pass_gate(path, "spins")
    torch.cuda._sleep(1 << 42)
    torch.cuda.synchronize()


def was_loaded_before(framework: str) -> bool:
    """Whether the process had a module before the task, and can use the device."""
    import sys

    was_there = framework in sys.modules
    return was_there and compute(framework) == 1
