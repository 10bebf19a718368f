"""An actor on a GPU, for the ends of `with` blocks."""

from __future__ import annotations

import os
import threading
from typing import Any

from aiogpu import sync


@sync.remote(num_gpus=1)
class Holder:
    def __init__(self, how: str = "") -> None:
        if how == "fail":
            raise LookupError(how)
        if how:  # the path of a FIFO
            with open(how, "w") as fifo:
                fifo.write(f"{os.getpid()}\n")
            threading.Event().wait()

    def answer(self) -> Any:
        return 42
