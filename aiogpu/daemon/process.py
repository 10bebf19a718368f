"""The process that is the node: its loop, its signals, its streams. Door to uvloop.

Detached, it has no terminal and belongs to no shell; in the foreground it is the
`aiogpu start --block` command itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

from aiogpu.daemon.journal import Journal, stand_in_for_streams
from aiogpu.daemon.notify import Notifier
from aiogpu.daemon.pidfile import Claim
from aiogpu.daemon.plan import LAST_WORDS, Plan
from aiogpu.daemon.readiness import Ready, tell_failure, tell_ready
from aiogpu.daemon.service import MakeNode, Service, make_node
from aiogpu.errors import AiogpuError, InternalError, NodeStartError
from aiogpu.linux.syscalls import set_process_name

_log: Final = logging.getLogger("aiogpu.daemon")

NAME: Final = "aiogpu-node"
"""What process lists call it."""
COLLECTED: Final = 10_000
"""Objects after which the collector looks for cycles among the young. What comes with
a task goes with it and is in none, so looking at each 700 was 4 % of its work."""


def run_detached(plan: Plan, pipe: int, make: MakeNode = make_node) -> int:
    """Be a node without a terminal; gives the exit code.

    Args:
        plan: what to be.
        pipe: descriptor on which to say that it is ready, or why it is not.
        make: makes the node.
    """

    def on_ready(ready: Ready) -> None:
        tell_ready(pipe, ready)
        os.close(pipe)

    set_process_name(NAME)
    try:
        plan.place.prepare()
        claim = Claim.take(plan.place)
        try:
            _leave_the_terminal(plan.place.logs)
            _live(plan, claim, on_ready, make, is_detached=True)
        finally:
            claim.release()
    except AiogpuError as error:
        tell_failure(pipe, error)
        return 1
    except BaseException as error:
        _log.critical("a defect of aiogpu ended the node", exc_info=True)
        tell_failure(pipe, InternalError(f"the node ended: {error!r}. Please report."))
        raise
    return 0


def run_here(
    plan: Plan, on_ready: Callable[[Ready], None], make: MakeNode = make_node
) -> None:
    """Be a node in the foreground, which Ctrl-C ends: once to drain, twice at once.

    Args:
        plan: what to be.
        on_ready: told when clients can come.
        make: makes the node.

    Raises:
        NodeError: it could not start.
        DeviceError: the devices asked for are not there.
    """
    plan.place.prepare()
    claim = Claim.take(plan.place)
    try:
        _live(plan, claim, on_ready, make, is_detached=False)
    finally:
        claim.release()


def _live(
    plan: Plan,
    claim: Claim,
    on_ready: Callable[[Ready], None],
    make: MakeNode,
    is_detached: bool,
) -> None:
    import uvloop

    gc.set_threshold(COLLECTED)
    journal = Journal.begin(plan.place.logs, None if is_detached else sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(plan, claim, on_ready, make, is_detached))
    except AiogpuError as error:
        _log.error("%s", error)
        raise
    finally:
        journal.close()


async def _serve(
    plan: Plan,
    claim: Claim,
    on_ready: Callable[[Ready], None],
    make: MakeNode,
    is_detached: bool,
) -> None:
    service = Service(plan, Notifier.take(os.environ), make)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        name = signal.Signals(number).name
        loop.add_signal_handler(number, service.ask_to_stop, name)
    # Not SIG_IGN, which all workers would inherit.
    hung_up: Callable[[], None]
    if is_detached:
        hung_up = partial(_log.info, "SIGHUP: ignored, a node needs no terminal")
    else:
        hung_up = service.hang_up
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    await service.run(claim, on_ready)


def _leave_the_terminal(logs: str) -> None:
    """Take the standard streams away from whoever has started this process.

    Raises:
        NodeStartError: there is no room for what replaces them.
    """
    path = f"{logs}/{LAST_WORDS}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    try:
        words = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NodeStartError(
            f"the node's log {path} cannot be written: {error.strerror}. Make room "
            f"or allow it, or name another directory by --log-dir."
        ) from error
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for descriptor, number in ((nothing, 0), (words, 1), (words, 2)):
        os.dup2(descriptor, number)
    os.close(words)
    os.close(nothing)
    faulthandler.enable(2)
    stand_in_for_streams()
    os.chdir("/")  # or the file system that it was started on could not be unmounted
