"""One process started by the driver: start, watch, signal, reap. No decisions.

The driver never forks: a fresh interpreter is started through vfork and exec, and
its end is seen on a pidfd, without a thread and without touching SIGCHLD.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.errors import NodeStartError
from aiogpu.wire.messages import LOG_LEVEL

if TYPE_CHECKING:
    import asyncio

_FLAGS: Final = (("optimize", "O"), ("dont_write_bytecode", "B"), ("no_user_site", "s"))
_CARRIED: Final = frozenset(
    {
        *("dev", "faulthandler", "frozen_modules", "int_max_str_digits"),
        *("no_debug_ranges", "pycache_prefix", "tracemalloc", "utf8"),
        "warn_default_encoding",
    }
)
"""What may stand behind -X of the workers; the rest would print at the end."""
_EMBEDS: Final = (
    "this program embeds Python and sys.executable is empty; set it to a Python "
    "interpreter that can import aiogpu."
)
_BOOT: Final = (
    "import gc, marshal, os, sys; gc.disable(); "
    "fields = marshal.loads(os.read(0, 1 << 24)); "
    "sys.path[:] = fields['sys_path']; "
    "from aiogpu.worker.__main__ import main; main(fields)"
)


class Process:
    """A child of the driver, in a session of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        child: subprocess.Popen[bytes],
        on_end: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._child = child
        self._on_end = on_end
        self._pidfd = os.pidfd_open(child.pid)
        loop.add_reader(self._pidfd, self._reap)

    def __repr__(self) -> str:
        return f"<Process {self.pid} {self._child.returncode}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._on_end(self._child.wait())

    def resume(self) -> None:
        """Continue it if somebody has stopped it (SIGSTOP)."""
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        self._child.kill()


def start_interpreter(  # noqa: PLR0917 - what starts it
    fields: dict[str, object],
    page: int,
    output: int,
    environ: Mapping[str, str] | None = None,
    directory: str | None = None,
    executable: str | None = None,
    flags: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that calls `aiogpu.worker.__main__.main(fields)`.

    The fields travel on its standard input, not on a command line for all to see.

    Args:
        fields: plain values, as marshal takes them.
        page: descriptor that the child inherits under the same number.
        output: descriptor that becomes its stdout and stderr.
        environ: its variables, this process's unless given.
        directory: where it starts, where this process is unless given.
        executable: the interpreter, this process's unless given.
        flags: its command-line options.

    Raises:
        NodeStartError: there is no interpreter, or it cannot be started.
    """
    import marshal

    executable = executable or sys.executable
    if not executable:
        raise NodeStartError(_EMBEDS)
    source = -1
    try:
        source = os.memfd_create("aiogpu-setup", os.MFD_CLOEXEC)
        os.write(source, marshal.dumps(fields))
        os.lseek(source, 0, os.SEEK_SET)
        return subprocess.Popen(
            [executable, *flags, "-c", _BOOT],
            stdin=source,
            stdout=output,
            stderr=output,
            env=environ,
            cwd=directory,
            pass_fds=(page,),
            start_new_session=True,
        )
    except OSError as error:
        raise NodeStartError(f"{executable} cannot be started: {error}") from error
    finally:
        if source >= 0:
            os.close(source)


def interpreter_flags() -> Sequence[str]:
    """The command-line options of this interpreter that its workers are to share."""
    options = [
        "-" + letter * int(getattr(sys.flags, name))
        for name, letter in _FLAGS
        if getattr(sys.flags, name)
    ]
    for name, value in sys._xoptions.items():
        if name in _CARRIED:
            options += ["-X", name if value is True else f"{name}={value}"]
    options += [f"-W{option}" for option in sys.warnoptions]
    return [*options, *_log_level()]


def _log_level() -> Sequence[str]:
    """What tells workers the level of this program's logging, where it has chosen one.

    Workers have no handlers: `logging.lastResort` prints what they log.
    """
    root = logging.getLogger()
    if not root.handlers or root.level == logging.WARNING:
        return ()
    return ("-X", f"{LOG_LEVEL}={root.level}")


def fitting(
    flags: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]
) -> Sequence[str]:
    """The options of an interpreter, once its variables are others.

    Options go before variables; so filters of warnings are left out where the
    variables have others.

    Args:
        flags: its options.
        before: variables that it had with them.
        now: variables that it is to have.
    """
    own = now.get("PYTHONWARNINGS")
    if own is None or own == before.get("PYTHONWARNINGS"):
        return flags
    return [flag for flag in flags if not flag.startswith("-W")]
