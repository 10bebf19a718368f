"""Tasks whose processes do not end when they are killed."""

from __future__ import annotations

import aiogpu
from tests.support.gate import pass_gate
from tests.support.unending import start_init


@aiogpu.remote(num_gpus=1, max_retries=0)
def leave_init_and_wait(path: str) -> None:
    start_init()
    pass_gate(path, "in")


@aiogpu.remote(num_gpus=1)
class Holder:
    """An actor with a GPU."""

    def wait(self, path: str) -> None:
        pass_gate(path, "in")
