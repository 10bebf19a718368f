"""Starts a detached node and waits until it is ready, or writes a unit for systemd.

A detached node is a fresh interpreter in a session of its own, not a fork: a process
with threads must not fork. For the unit see systemd.service(5).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from aiogpu.accelerators.registry import KNOWN
from aiogpu.daemon.process import CRASH_LOG, Plan
from aiogpu.daemon.readiness import Ready, wait_for_report
from aiogpu.errors import NodeStartError
from aiogpu.linux.interpreter import interpreter_command
from aiogpu.runtime.zygote.config import interpreter_flags

NAME: Final = "aiogpu.service"
CARRIED: Final = (
    "CUDA_DEVICE_ORDER",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    *(entry.variable for entry in KNOWN),
)
"""Variables that a node may need and that a user's services do not inherit."""
_UNIT: Final = """\
# One node for all programs of this user. Install it by
#   aiogpu start --head ... --systemd > ~/.config/systemd/user/{name}
#   systemctl --user daemon-reload
#   systemctl --user enable --now {name}
# and have it start with the machine, before anybody logs in, by
#   loginctl enable-linger
[Unit]
Description=aiogpu: one node for many programs
Documentation=man:systemd.service(5)

[Service]
Type=notify
NotifyAccess=main
{environment}ExecStart={command}
# SIGTERM goes to the node alone: it lets what runs end, then ends its workers.
KillMode=mixed
TimeoutStartSec={start:.0f}
TimeoutStopSec={stop:.0f}
# Each worker has a group of its own below this unit's.
Delegate=yes
# One of them that fills the memory is no reason to stop all.
OOMPolicy=continue
Restart=on-failure
RestartSec=2
# 2 is bad input, which no second try makes better.
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"""


def unit(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    opens_within: float,
    ends_within: float,
) -> str:
    """Return a user unit.

    Args:
        command: the command that starts the node in the foreground.
        environ: the environment; the unit gets the variables in `CARRIED`.
        opens_within: most seconds until the node is ready.
        ends_within: most seconds that the node needs to end, with the drain.
    """
    kept = (f"{name}={environ[name]}" for name in CARRIED if name in environ)
    return _UNIT.format(
        name=NAME,
        environment="".join(f"Environment={quoted(line)}\n" for line in kept),
        command=" ".join(quoted(word).replace("$", "$$") for word in command),
        start=opens_within,
        stop=ends_within,
    )


def quoted(word: str) -> str:
    """Quote a word for systemd.syntax(7): quotes, escapes and specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t")
    is_plain = escaped == word and word and not set(" ';") & set(word)
    return word if is_plain else f'"{escaped}"'


GIVE_UP: Final = 10.0
"""Seconds that a process has to end before it is killed."""
_TAIL: Final = 4096


_BOOT: Final = (
    "import json, sys; plan = sys.stdin.buffer.read(); "
    "sys.path[:] = json.loads(plan)['sys_path']; "
    "from aiogpu.daemon.process import Plan, run_detached; "
    "sys.exit(run_detached(Plan.unpacked(plan), int(sys.argv[2])))"
)
"""The program of a detached node. The plan comes on stdin. The arguments are the
socket, only to show it in process lists, and the descriptor for the report."""


def start_detached(plan: Plan) -> Ready:
    """Start the node and wait until programs can join it.

    Raises:
        NodeError: the node did not start.
        DeviceError: the requested devices do not exist.
        KeyboardInterrupt: the wait was interrupted, and the node was ended.
    """
    output = _memory_file("aiogpu-output")
    reading, writing = os.pipe()
    try:
        child = _start(plan, writing, output)
    except BaseException:
        os.close(reading)
        os.close(output)
        raise
    finally:
        os.close(writing)
    try:
        ready = wait_for_report(reading, plan.opens_within)
        if ready is None:
            raise _death(plan, child.wait(), output)
    except TimeoutError:
        _end(child)
        raise NodeStartError(
            f"the node was not ready within {plan.opens_within:.0f} s and was ended. "
            f"What it did is told in {plan.place.logs}."
        ) from None
    except BaseException:
        _end(child)
        raise
    finally:
        os.close(reading)
        os.close(output)
    child.returncode = 0  # the node lives on, so Popen must not wait for it
    return ready


def _memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory.

    Raises:
        NodeStartError: the kernel refuses it.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        from aiogpu.linux.denied import why_refused

        why = why_refused("memfd_create", "3.17", error)
        raise NodeStartError(f"the node gets no shared memory: {why}") from error


def _start(plan: Plan, pipe: int, output: int) -> subprocess.Popen[bytes]:
    source = _memory_file("aiogpu-plan")
    try:
        os.write(source, plan.packed())
        os.lseek(source, 0, os.SEEK_SET)
        return subprocess.Popen(
            interpreter_command(
                sys.executable,
                "-c",
                _BOOT,
                plan.place.socket,
                str(pipe),
                flags=interpreter_flags(),
            ),
            stdin=source,
            stdout=output,
            stderr=output,
            pass_fds=(pipe,),
            start_new_session=True,
        )
    except OSError as error:
        raise NodeStartError(f"{sys.executable} cannot be started: {error}") from error
    finally:
        os.close(source)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the node: SIGTERM twice, which means at once; then SIGKILL."""
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(GIVE_UP)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _death(plan: Plan, status: int, output: int) -> NodeStartError:
    """Return the error for a process that died without a report."""
    ended = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    said = _tail(output)
    with suppress(OSError), open(f"{plan.place.logs}/{CRASH_LOG}", "rb") as file:
        said = said or _tail(file.fileno())
    after = f" Its last output:\n{said}" if said else ""
    return NodeStartError(
        f"the node ended before it was ready ({ended}); more may be told in "
        f"{plan.place.logs}.{after}"
    )


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
    return text.decode(errors="replace").strip()
