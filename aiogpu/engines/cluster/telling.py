"""Cancelled calls on their way to the processes of their actors; see `cancels`.

On the same machine the process is told at once. On others a task of Ray's tells it,
which runs beside it, and which threads of ours wait for.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiogpu.engines import ray
from aiogpu.engines.cluster.cancels import KEPT, MOST, name_of

PATIENCE: Final = 5.0
"""Seconds for a process to take what it is told."""
REACHED: Final = 10.0
"""Seconds for a task to begin beside an actor on another machine."""
THREADS: Final = 8
"""So many actors are told at the same time of what one message does not hold, or
elsewhere: one of them may be on a machine that does not answer."""


def tell_here(actor: str, calls: bytes, seconds: float) -> bool:
    """Tell an actor's process that these calls are cancelled, if it is on this machine.

    Raises:
        TimeoutError: it has not taken it in so many seconds.
        BlockingIOError: the same, of none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(seconds)
        try:
            sender.sendto(calls, name_of(actor))
        except ConnectionRefusedError:
            return False
    return True


class CancelSender:
    """What the threads of a process have to tell; see above."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[ray.Ref]] = {}
        self._told: set[tuple[str, str]] = set()
        self._found: dict[str, str] = {}
        self._threads = 0
        self._teller: Any = None

    def __repr__(self) -> str:
        return f"<CancelSender for {len(self._waiting)} actors>"

    def tell(self, actor: str, call: ray.Ref, node: str) -> None:
        """Tell an actor's process that a call is cancelled, now or soon.

        Args:
            actor: its id.
            call: what it makes.
            node: where the process is, empty if that is not known.
        """
        key = actor, node
        with self._lock:
            if key not in self._waiting:
                with suppress(BlockingIOError):
                    if self.reaches(actor, _id_of(call), 0):
                        return
            self._waiting.setdefault(key, []).append(call)
            if self._threads < min(THREADS, len(self._waiting)):
                self._threads += 1
                name = "aiogpu-cancel"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                keys = (key for key in self._waiting if key not in self._told)
                key = next(keys, None)
                if key is None:
                    self._threads -= 1
                    return
                self._told.add(key)
                calls, self._waiting[key] = self._waiting[key], []
            # It hangs, or has gone with the cluster; to Ray that is an exit.
            with suppress(OSError, ray.RayError, RuntimeError, ValueError, SystemExit):
                self._deliver(*key, calls)
            with self._lock:
                self._told.discard(key)
                rest = self._waiting.pop(key)
                if rest:
                    self._waiting[key] = rest

    def _deliver(self, actor: str, node: str, calls: Sequence[ray.Ref]) -> None:
        for start in range(0, len(calls), MOST):
            ids = b"".join(map(_id_of, calls[start : start + MOST]))
            if not self.reaches(actor, ids, PATIENCE):
                self._tell_elsewhere(actor, node, ids)

    def reaches(self, actor: str, ids: bytes, seconds: float) -> bool:
        """Whether its process is on this machine, and was told; see `tell_here`."""
        return tell_here(actor, ids, seconds)

    def _tell_elsewhere(self, actor: str, node: str, ids: bytes) -> None:
        """Where it was found last, or it is known to be; if not there, all at once."""
        here = ray.facts()[0]
        others = [one.id for one in ray.nodes() if one.id != here]
        known = self._found.pop(actor, node)
        likely = [one for one in others if one == known]
        rest = [one for one in others if one != known]
        found = self._told_on(likely, actor, ids) or self._told_on(rest, actor, ids)
        if found:
            self._found[actor] = found
            while len(self._found) > KEPT:
                del self._found[next(iter(self._found))]

    def _told_on(self, nodes: Sequence[str], actor: str, ids: bytes) -> str:
        """On which of these it was told; empty if on none."""
        if self._teller is None:
            # Of no CPUs: it has a place where others have taken all.
            options = {"num_cpus": 0, "max_retries": 0, "name": "aiogpu.cancel"}
            self._teller = ray.function(tell_here, options)
        answers = queue.SimpleQueue[tuple[str, Any]]()
        for node in nodes:
            if not ray.is_connected():
                return ""  # to ask would have Ray start a cluster
            where = ray.Affinity(node, soft=False)
            told = self._teller.options(scheduling_strategy=where)
            ref = told.remote(actor, ids, PATIENCE)
            ray.when_done(ref, partial(_note, answers, node))
        until = time.monotonic() + REACHED
        for _ in nodes:
            with suppress(queue.Empty):
                node, found = answers.get(timeout=max(0, until - time.monotonic()))
                if found is True:
                    return node
        return ""


telling: Final = CancelSender()
"""That of this process."""


def _note(answers: queue.SimpleQueue[tuple[str, Any]], node: str, found: Any) -> None:
    answers.put((node, found))


def _id_of(call: ray.Ref) -> bytes:
    found: bytes = call.task_id().binary()
    return found
