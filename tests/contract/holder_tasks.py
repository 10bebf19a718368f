"""Tasks that are given an actor and fail with its error. Light to import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import aiogpu


@aiogpu.remote(num_gpus=1)
class Failing:
    def fail(self) -> None:
        raise ValueError("told")

    def fail_amid(self) -> Iterator[int]:
        yield 1
        raise ValueError("told")


@aiogpu.remote
def raises(actor: Any) -> None:
    gc.disable()
    handle = actor.fail.remote()
    aiogpu.get(handle)


@aiogpu.remote
def catches(actor: Any) -> None:
    gc.disable()
    try:
        aiogpu.get([actor.fail.remote()])
    except ValueError:
        return


@aiogpu.remote
def catches_amid(actor: Any) -> None:
    gc.disable()
    try:
        for _ in actor.fail_amid.remote():
            pass
    except ValueError:
        return


@aiogpu.remote
async def softly_raises(actor: Any) -> None:
    gc.disable()
    await actor.fail.remote()


@aiogpu.remote
async def softly_catches(actor: Any) -> None:
    gc.disable()
    try:
        await actor.fail.remote()
    except ValueError:
        return


@aiogpu.remote
async def softly_catches_amid(actor: Any) -> None:
    gc.disable()
    try:
        async for _ in actor.fail_amid.remote():
            pass
    except ValueError:
        return


HOLDERS = [
    raises,
    catches,
    catches_amid,
    softly_raises,
    softly_catches,
    softly_catches_amid,
]
