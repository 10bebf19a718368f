"""What a zygote is started with: its program, environment and interpreter; the start.

A node that several programs share forks the workers of each from a zygote of its own.
To the core a program is one more variable in the environment of its tasks, so no other
program's worker fits them. A variable that is read when a process is exec'd, or when a
module is imported, has no effect in a fork of a zygote that has done both: tasks that
set one get a zygote of their own environment (`early_variables`); all others share the
plain one.

Little is imported here: the interpreter starts while the driver imports the rest. The
driver never forks: a fresh interpreter is started through vfork and exec.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup_hierarchy import NodeCgroup
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.descriptors import soft_limit
from aiogpu.runtime.directories import create_directory, remove_directory
from aiogpu.wire.messages import LOG_LEVEL, Setup, socket_path

_FLAGS: Final = (("optimize", "O"), ("dont_write_bytecode", "B"), ("no_user_site", "s"))


_CARRIED: Final = frozenset(
    {
        *("dev", "faulthandler", "frozen_modules", "int_max_str_digits"),
        *("no_debug_ranges", "pycache_prefix", "tracemalloc", "utf8"),
        "warn_default_encoding",
    }
)
"""What may stand behind -X of the workers; the rest would print at the end."""


def _log_level() -> Sequence[str]:
    """What tells workers the level of this program's logging, where it has chosen one.

    Workers have no handlers: `logging.lastResort` prints what they log.
    """
    root = logging.getLogger()
    if not root.handlers or root.level == logging.WARNING:
        return ()
    return ("-X", f"{LOG_LEVEL}={root.level}")


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


AT_EXEC: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
"""Prefixes of what the dynamic linker, the C library and Python read."""


AT_LOAD: Final = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("VECLIB_", "NUMEXPR_"),
)
"""Prefixes of what numeric libraries read when they are loaded."""


SET_LATER: Final = frozenset(
    {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
    }
)
"""Thread counts: a worker sets them by the libraries' own setters."""


OF_DEVICES: Final = ("_VISIBLE_DEVICES", "_DEVICE_ORDER")
"""Suffixes of what says which devices there are: a zygote must see none."""


ALIASES: Final = {
    "cupy": ("CUPY_",),
    "huggingface_hub": ("HF_",),
    "jax": ("JAX_", "XLA_"),
    "tensorflow": ("TENSORFLOW_", "TF_"),
    "torch": ("TORCH_", "PYTORCH_"),
    "transformers": ("TRANSFORMERS_", "HF_"),
}
"""Prefixes that do not follow from a module's name."""


def early_variables(
    environment: Environment, modules: Iterable[str], read: Iterable[str]
) -> Environment:
    """The part of a task's variables that its zygote must be started with.

    Args:
        environment: all variables of the task's `runtime_env`.
        modules: top-level modules that the plain zygote has imported.
        read: names of variables that were read meanwhile.
    """
    if not environment:
        return ()
    prefixes: tuple[str, ...] = AT_EXEC + AT_LOAD
    for module in modules:
        prefixes += ALIASES.get(module, (f"{module.upper()}_",))
    names = set(read)
    return tuple(
        (name, value)
        for name, value in environment
        if (name in names or name.startswith(prefixes) or name == PROGRAM)
        and name not in SET_LATER
        and not name.endswith(OF_DEVICES)
    )


PASSING: Final = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES"})
"""Variables that differ between two starts of the same program from one shell."""


class Program(NamedTuple):
    """See above.

    Attributes:
        executable: the interpreter.
        sys_path: where it looks for modules.
        directory: the working directory.
        environ: its variables.
        preload: modules that its zygote imports.
        flags: command-line options of its interpreter.
    """

    executable: str
    sys_path: Sequence[str]
    directory: str
    environ: Mapping[str, str]
    preload: Sequence[str] = ()
    flags: Sequence[str] = ()

    @property
    def key(self) -> str:
        """The same for two programs whose workers may stand in for each other."""
        parts: list[str] = [self.executable, self.directory, *self.sys_path, "", ""]
        parts += [*self.preload, "", "", *self.flags, "", ""]
        for name, value in sorted(self.environ.items()):
            if name not in PASSING:
                parts += [name, value]
        joined = "\0".join(parts).encode("utf-8", "surrogateescape")
        from hashlib import blake2b  # most programs join nobody

        return blake2b(joined, digest_size=8).hexdigest()


class ZygoteConfig(NamedTuple):
    """What all zygotes of a node share, as it was when the node was opened.

    A later generation finds what the first one has found, whatever the program has
    done to its own environment, path or directory meanwhile.

    Attributes:
        directory: where the node's socket and pipes are; its name is the node's id.
        page: descriptor of the control page.
        place: descriptor of the working directory, None where we may not even
            enter it.
        cgroup: the node's, chosen before the first start.
        learns: whether workers report what they import.
        spill: directory for values beyond the memory limit, "" for the system's.
        own: the node's own program, but for what `launch` finds out by itself.
        programs: those that have joined, by key; each has zygotes of its own.
    """

    directory: str
    page: int
    place: int | None
    cgroup: NodeCgroup
    learns: bool
    spill: str
    own: Program
    programs: dict[str, Program]

    @classmethod
    def take(
        cls, directory: str, cgroup: NodeCgroup, learns: bool, spill: str = ""
    ) -> ZygoteConfig:
        """Return what they are now, with a new control page."""
        try:
            place = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            place = None
        # Python ignores what else there may be in the path, such as a Path.
        sys_path = [str(path) for path in sys.path if isinstance(path, str)]
        where = "" if place is None else f"/proc/self/fd/{place}"
        own = Program("", sys_path, where, dict(os.environ))
        page = ControlPage.create()
        return cls(directory, page, place, cgroup, learns, spill, own, {})

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.page)
        if self.place is not None:
            os.close(self.place)


def program_of(environment: Iterable[tuple[str, str]]) -> str:
    """The key of the program whose tasks have these variables, "" for none."""
    return next((value for name, value in environment if name == PROGRAM), "")


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

    named: tuple[str, ...] = ()
    learnt: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()


class Launched(NamedTuple):
    """A zygote that nobody listens to yet.

    Attributes:
        child: the process.
        output: descriptor from which to read what it prints.
    """

    child: subprocess.Popen[bytes]
    output: int


def launch(
    config: ZygoteConfig,
    generation: int = 0,
    environment: Sequence[tuple[str, str]] = (),
    modules: Modules = Modules(),  # noqa: B008 - it is immutable
) -> Launched:
    """Start a zygote.

    Args:
        config: what it shares with the node's others.
        generation: its number.
        environment: variables that it is exec'd with, beside the program's own.
        modules: what it imports before it is forked.

    Raises:
        NodeStartError: there is no interpreter, or it cannot be started.
    """
    own = dict(environment)
    program = config.programs.get(program_of(environment))
    if program is None:
        program = config.own._replace(
            executable=sys.executable, flags=interpreter_flags()
        )
    first = own["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in own else ()
    setup = Setup(
        sys_path=[*first, *program.sys_path],
        node=os.path.basename(config.directory),
        directory=config.directory,
        driver=os.getpid(),
        page=config.page,
        preload=list(modules.named),
        cgroup=config.cgroup.path,
        generation=generation,
        learns=config.learns,
        learnt=list(modules.learnt),
        proven=list(modules.proven),
        spill=config.spill,
    )
    reading, writing = _open_pipe()
    variables = {**program.environ, **own}
    try:
        child = start_interpreter(
            setup._asdict(),
            config.page,
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


class Ground:
    """What a node begins with.

    Attributes:
        config: what all its zygotes share.
        listening: its socket; who connects early waits.
        first: the first zygote.
    """

    config: ZygoteConfig
    first: Launched

    def __init__(
        self,
        cgroup: NodeCgroup,
        preload: Sequence[str],
        learns: bool,
        spill: str = "",
    ) -> None:
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
        with ExitStack() as undo:
            undo.callback(remove_directory, directory)
            cgroup.choose(os.path.basename(directory))
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listening = undo.enter_context(listening)
            listening.bind(socket_path(directory))
            listening.listen(BACKLOG)
            self.config = ZygoteConfig.take(directory, cgroup, learns, spill)
            undo.callback(self.config.close)
            self.first = launch(self.config, modules=Modules(tuple(preload)))
            undo.pop_all()

    def clear(self) -> None:
        """Take all of it back, before anything else was built on it."""
        # Before the zygote is killed: if we are killed amid this, it goes on with it.
        self.listening.close()
        remove_directory(self.config.directory)
        self.first.child.kill()
        self.first.child.wait()
        os.close(self.first.output)
        self.config.close()
