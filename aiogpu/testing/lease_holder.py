"""A process that holds leases for another program until that program ends.

`python -m aiogpu.testing.lease_holder COUNT SHARE PID` takes COUNT leases of SHARE GPUs
each, writes one line of JSON to its output, and keeps them until its input is closed or
process PID has ended. The line has `leases`, a list of objects with the `environ` and
the `ids` of each; or `error`, the reason in words.

The leases are those of the shared node that `AIOGPU_ADDRESS` names, otherwise of the
user's shared node if one runs, otherwise of a node of this process on all GPUs of the
machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import aiogpu
from aiogpu.errors import AiogpuError, NodeDiedError, NodeError

if TYPE_CHECKING:
    from aiogpu.types import Lease

EXPLAINED_AFTER: Final = 1.0
"""Seconds of waiting after which the reason is shown, and again when it changes."""


async def hold(count: int, share: float, parent: int) -> None:
    """Take the leases, report them, and keep them; see the module."""
    async with AsyncExitStack() as stack:
        try:
            where = await _open_node(stack)
            await _check_room(where, count, share)
            names = [f"pytest-{number}" for number in range(count)]
            leases = [aiogpu.lease(num_gpus=share, name=name) for name in names]
            await _explaining(
                asyncio.gather(*map(stack.enter_async_context, leases)), leases
            )
        except AiogpuError as error:
            _report(error=str(error))
            return
        _report(leases=[{"environ": x.environ, "ids": x.ids} for x in leases])
        await _end_of(parent)


def _report(**answer: object) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


async def _open_node(stack: AsyncExitStack) -> str:
    """Join a node, or open one; return what it is, in words."""
    address = os.environ.get("AIOGPU_ADDRESS", "")
    is_path = address.startswith(("/", "unix:"))
    try:
        joining = aiogpu.init(address=address if is_path else "auto")
        await stack.enter_async_context(joining)
    except NodeDiedError:
        if is_path or address == "auto":
            raise
        await stack.enter_async_context(aiogpu.init(address="local", preload=()))
        return "this machine"
    return "the node"


async def _check_room(where: str, count: int, share: float) -> None:
    """Refuse leases that could never be held together.

    Raises:
        NodeError: there are too few GPUs.
    """
    total = int((await aiogpu.cluster_resources()).get("GPU", 0))
    room = int(1 / share + 1e-9) * total if share <= 1 else int(total / share)
    if room >= count:
        return
    asked = f"{count} pytest processes ask for {share:g} of a GPU each"
    if not total:
        advice = (
            "Leave --gpus out, or declare logical GPUs: `aiogpu start --head "
            "--num-gpus=1`."
        )
        raise NodeError(f"{asked}, and {where} has no GPU. {advice}")
    advice = f"Use -n {room}, or " if room else ""
    raise NodeError(
        f"{asked}; {where} has {total}, room for {room}. {advice or 'Use '}--gpus "
        f"{_fitting(count, total):g}."
    )


def _fitting(count: int, total: int) -> float:
    """Return the largest share of which `count` fit on `total` GPUs."""
    if total >= count:
        return total // count
    per_gpu = -(-count // total)
    return int(10_000 / per_gpu) / 10_000


async def _explaining(granted: Awaitable[Any], leases: list[Lease]) -> None:
    """Wait for leases; say on stderr why they wait."""
    waiting = asyncio.ensure_future(granted)
    shown = ""
    while not (await asyncio.wait([waiting], timeout=EXPLAINED_AFTER))[0]:
        for lease in leases:
            why = await lease.why()
            if why is not None and why.state != "running" and str(why) != shown:
                shown = str(why)
                sys.stderr.write(f"{shown}\n")
                break
    await waiting


async def _end_of(parent: int) -> None:
    """Wait until the input is closed, or the parent has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)  # nothing is ever written to it
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    loop.add_reader(parent_fd, ended.set)
    await ended.wait()


if __name__ == "__main__":
    aiogpu.run(hold(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
