"""Cancelled calls on their way to the processes of their actors; see `cancels`.

On the same machine the process is told at once. On others a task of Ray's tells it,
which runs beside it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Final

from aiogpu.engines import ray
from aiogpu.engines.cluster.cancels import MOST, name_of

PATIENCE: Final = 5.0
"""Seconds for a process to take what it is told."""
PROMPT: Final = 0.002
"""Seconds for the same where an event loop may wait for it."""
REACHED: Final = 10.0
"""Seconds for a task to begin beside an actor on another machine."""


def tell_here(actor: str, calls: bytes, seconds: float) -> bool:
    """Tell an actor's process that these calls are cancelled, if it is on this machine.

    Raises:
        TimeoutError: it has not taken it in so many seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(seconds)
        try:
            sender.sendto(calls, name_of(actor))
        except ConnectionRefusedError:
            return False
    return True


class Telling:
    """What the threads of a process have to tell; see above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[bytes]] = {}
        self._has_thread = False

    def __repr__(self) -> str:
        return f"<Telling for {len(self._waiting)} actors>"

    def tell(self, actor: str, call: bytes, node: str) -> None:
        """Tell an actor's process that a call is cancelled, now or soon.

        Args:
            actor: its id.
            call: the call's.
            node: where the process is, empty if that is not known.
        """
        key = actor, node
        with self._lock:
            if key not in self._waiting:
                # One that has much to hear, or is elsewhere, a thread tells.
                with suppress(TimeoutError):
                    if tell_here(actor, call, PROMPT):
                        return
            self._waiting.setdefault(key, []).append(call)
            if not self._has_thread:
                self._has_thread = True
                name = "aiogpu-cancel"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                key = next(iter(self._waiting), None)
                if key is None:
                    self._has_thread = False
                    return
                calls, self._waiting[key] = self._waiting[key], []
            for start in range(0, len(calls), MOST):
                _deliver(*key, b"".join(calls[start : start + MOST]))
            with self._lock:
                rest = self._waiting.pop(key)
                if rest:
                    self._waiting[key] = rest


telling: Final = Telling()
"""That of this process."""


def _deliver(actor: str, node: str, calls: bytes) -> None:
    try:
        if tell_here(actor, calls, PATIENCE):
            return
        here = "" if ray.is_far() else ray.facts()[0]
        others = [one.id for one in ray.nodes() if one.id != here]
        for one in sorted(others, key=node.__ne__):
            where = {"scheduling_strategy": ray.Affinity(one, soft=False)}
            options = {"num_cpus": 0, "max_retries": 0, "name": "aiogpu.cancel"}
            told = ray.function(tell_here, {**options, **where})
            answer = told.remote(actor, calls, PATIENCE)
            if ray.wait([answer], REACHED) and ray.fetched(answer):
                return
    except (TimeoutError, OSError, ray.RayError, RuntimeError, SystemExit):
        return  # it hangs, or has gone with the cluster; to Ray that is an exit
