"""A web application whose every worker joins the node of its box.

`/pid` says which worker answers; `/hold/GATE/NAME` holds half a GPU until the gate
lets it go.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote

import aiogpu
from tests.contract import tasks


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        async with aiogpu.init(address="auto"):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    _, what, *rest = scope["raw_path"].decode().split("/")
    answer = str(os.getpid())
    if what == "hold":
        gate, name = map(unquote, rest)
        answer = await tasks.gated.options(num_gpus=0.5).remote(gate, name)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer.encode()})
