"""A task that tells the node something which nobody answers, and goes on."""

from __future__ import annotations

import threading

import aiogpu


@aiogpu.remote
def put_and_wait() -> None:
    put = aiogpu.put("a value")
    threading.Event().wait()
    del put
