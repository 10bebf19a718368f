"""Starts a zygote's interpreter, and makes what a node's first one needs.

Little is imported here: the interpreter starts while the driver imports the rest. The
driver never forks: a fresh interpreter is started through vfork and exec, and its end
is seen on a pidfd, without a thread and without touching SIGCHLD.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup_hierarchy import NodeCgroup
from aiogpu.runtime.descriptors import soft_limit
from aiogpu.runtime.directories import create_directory, remove_directory
from aiogpu.runtime.zygote.config import Program, ZygoteConfig, program_of
from aiogpu.wire.messages import Setup, socket_path

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


def start_interpreter(
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


BACKLOG: Final = 64


PER_ZYGOTE: Final = 6
"""Descriptors that a zygote takes beside its pipe: two for good, four for its start."""


class Modules(NamedTuple):
    """What a zygote imports.

    Attributes:
        named: modules that the user has named.
        learnt: modules that were learnt.
        proven: those of them that need no probe.
    """

    named: Sequence[str] = ()
    learnt: Sequence[str] = ()
    proven: Sequence[str] = ()


class Launched(NamedTuple):
    """A zygote that nobody listens to yet.

    Attributes:
        child: the process.
        output: descriptor from which to read what it prints.
    """

    child: subprocess.Popen[bytes]
    output: int


def launch(
    around: ZygoteConfig,
    generation: int = 0,
    environment: Sequence[tuple[str, str]] = (),
    modules: Modules = Modules(),  # noqa: B008 - it is immutable
) -> Launched:
    """Start a zygote.

    Args:
        around: what it shares with the node's others.
        generation: its number.
        environment: variables that it is exec'd with, beside the program's own.
        modules: what it imports before it is forked.

    Raises:
        NodeStartError: there is no interpreter, or it cannot be started.
    """
    own = dict(environment)
    program = around.programs.get(program_of(environment)) or around.own
    setup = _setup(around, generation, _path(program, own), modules)
    reading, writing = _open_pipe()
    variables = {**program.environ, **own}
    try:
        child = start_interpreter(
            setup._asdict(),
            around.page,
            writing,
            variables,
            program.directory or None,
            program.executable,
            fitting(program.flags, program.environ, variables),
        )
    except NodeStartError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Launched(child, reading)


def _open_pipe() -> tuple[int, int]:
    """A pipe for a zygote's output, if there are descriptors for the rest as well.

    One that has started and whose connection cannot be accepted would stand still.
    """
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The kernel gives the lowest numbers that are free.
        if writing + PER_ZYGOTE >= soft_limit():
            os.close(reading)
            os.close(writing)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    except OSError as error:
        raise NodeStartError(f"no pipe for the zygote's output: {error}") from error
    return reading, writing


def _path(program: Program, own: Mapping[str, str]) -> list[str]:
    first = own["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in own else ()
    return [*first, *program.sys_path]


def _setup(
    around: ZygoteConfig, generation: int, sys_path: list[str], modules: Modules
) -> Setup:
    return Setup(
        sys_path=sys_path,
        node=around.node,
        directory=around.directory,
        driver=os.getpid(),
        page=around.page,
        preload=list(modules.named),
        cgroup=around.cgroup.path,
        generation=generation,
        learns=around.learns,
        learnt=list(modules.learnt),
        proven=list(modules.proven),
        spill=around.spill,
    )


class Ground(NamedTuple):
    """What a node begins with.

    Attributes:
        around: what all its zygotes share.
        listening: its socket; who connects early waits.
        first: the first zygote.
    """

    around: ZygoteConfig
    listening: socket.socket
    first: Launched

    @classmethod
    def lay(
        cls,
        cgroup: NodeCgroup,
        preload: Sequence[str],
        learns: bool,
        spill: str = "",
    ) -> Ground:
        """Make the directory and the socket, and start the zygote.

        Args:
            cgroup: the node's, which is chosen here.
            preload: modules that the zygote imports before it is forked.
            learns: whether workers report what they import.
            spill: directory for values beyond the memory limit, "" for the system's.

        Raises:
            NodeStartError: there is no place for the directory, or no interpreter.
        """
        directory = create_directory()
        around = listening = None
        try:
            node = os.path.basename(directory)
            cgroup.choose(node)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(socket_path(directory))
            listening.listen(BACKLOG)
            around = ZygoteConfig.take(node, directory, cgroup, learns, spill)
            return cls(around, listening, launch(around, modules=Modules(preload)))
        except BaseException:
            if around is not None:
                around.close()
            if listening is not None:
                listening.close()
            remove_directory(directory)
            raise

    def clear(self) -> None:
        """Take all of it back, before anything else was built on it."""
        # Before the zygote is killed: if we are killed amid this, it goes on with it.
        self.listening.close()
        remove_directory(self.around.directory)
        self.first.child.kill()
        self.first.child.wait()
        os.close(self.first.output)
        self.around.close()
