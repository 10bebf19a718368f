"""The configuration of a zygote (program, environment, modules), and its start.

On a shared node each program has its own zygotes. This module imports little: the
interpreter starts while the driver imports the rest, which takes as long. So the first
result comes after 120 ms instead of 190 ms. The driver never forks: a fresh interpreter
is started through vfork and exec.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from aiogpu.core.model.ids import PROGRAM, is_of_program
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.linux.interpreter import interpreter_command
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.descriptors import soft_limit
from aiogpu.runtime.directories import NodeDirectory, create_directory
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.wire.messages import ARGUMENTS, LOG_LEVEL, Setup, socket_path

_FLAGS: Final = (
    ("bytes_warning", "b"),
    ("debug", "d"),
    ("dont_write_bytecode", "B"),
    ("ignore_environment", "E"),
    ("isolated", "I"),
    ("no_site", "S"),
    ("no_user_site", "s"),
    ("optimize", "O"),
    ("quiet", "q"),
    ("safe_path", "P"),
)
"""Attributes of `sys.flags` with their options. Not -v, which prints each import, and
not -i, which would read commands."""


_NOT_INHERITED: Final = frozenset({"importtime", "showrefcount", LOG_LEVEL})
"""Options after -X that workers do not inherit: the first two print at imports or at
exit, the last may have changed."""


def _log_level() -> Sequence[str]:
    """Return the options that set the logging level, if this program has chosen one.

    Workers have no handlers: `logging.lastResort` prints their records.
    """
    root = logging.getLogger()
    if not root.handlers or root.level == logging.WARNING:
        return ()
    return ("-X", f"{LOG_LEVEL}={root.level}")


def interpreter_flags() -> Sequence[str]:
    """Return the command-line options of this interpreter that workers inherit."""
    options = [
        "-" + letter * int(getattr(sys.flags, name))
        for name, letter in _FLAGS
        if getattr(sys.flags, name)
    ]
    for name, value in sys._xoptions.items():
        if name not in _NOT_INHERITED:
            options += ["-X", name if value is True else f"{name}={value}"]
    options += [f"-W{option}" for option in sys.warnoptions]
    return [*options, *_log_level()]


def arguments() -> list[str]:
    """Return this program's `sys.argv`, which programs may change or not have."""
    return [word for word in getattr(sys, "argv", ()) if isinstance(word, str)]


AT_EXEC: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
"""Prefixes of variables that the dynamic linker, the C library and Python read."""


AT_LOAD: Final = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "VECLIB_",
    "NUMEXPR_",
)
"""Prefixes of variables that numeric libraries read when they are loaded."""


SET_LATER: Final = frozenset(
    {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
    }
)
"""Thread counts: a worker sets them through the libraries' own functions."""


OF_DEVICES: Final = ("_VISIBLE_DEVICES", "_DEVICE_ORDER")
"""Suffixes of variables that select devices; a zygote must not see any device."""


ALIASES: Final = {
    "huggingface_hub": "HF_",
    "jax": "XLA_",
    "tensorflow": "TF_",
    "torch": "PYTORCH_",
    "transformers": "HF_",
}
"""Prefixes of variables that do not follow from a module's name."""


def early_variables(
    environment: Environment, modules: Iterable[str], read: Iterable[str]
) -> Environment:
    """Return the variables of a task that its zygote must be started with.

    Some variables take effect only at exec or at the import of a module, so setting
    them in a fork would do nothing. Tasks without such variables share the plain
    zygote.

    Args:
        environment: all variables of the task's `runtime_env`.
        modules: top-level modules that the plain zygote has imported.
        read: names of the variables that these imports have read.
    """
    if not environment:
        return ()
    prefixes: tuple[str, ...] = AT_EXEC + AT_LOAD
    for module in modules:
        own = f"{module.upper()}_"
        prefixes += (own, ALIASES.get(module, own))
    names = set(read)
    return tuple(
        (name, value)
        for name, value in environment
        if (name in names or name.startswith(prefixes) or name == PROGRAM)
        and name not in SET_LATER
        and not name.endswith(OF_DEVICES)
    )


VOLATILE: Final = frozenset({"_", "OLDPWD", "PWD", "SHLVL", "COLUMNS", "LINES"})
"""Variables that differ between two starts of the same program from one shell."""


class ProgramEnvironment(NamedTuple):
    """A program whose tasks this node runs.

    To the core a program is one more variable in the environment of its tasks, so tasks
    never match workers of other programs.

    Attributes:
        executable: the interpreter.
        sys_path: the import path.
        directory: the working directory.
        environ: the environment variables.
        preload: modules that the zygote imports.
        flags: command-line options of the interpreter.
        argv: its `sys.argv`.
    """

    executable: str
    sys_path: Sequence[str]
    directory: str
    environ: Mapping[str, str]
    preload: Sequence[str] = ()
    flags: Sequence[str] = ()
    argv: Sequence[str] = ()

    @property
    def variables(self) -> Environment:
        """The variables of its tasks; equal for programs that may share workers."""
        return ((ARGUMENTS, "\0".join(self.argv)), (PROGRAM, self.key))

    @property
    def key(self) -> str:
        """A hash that is equal for programs that may share a zygote."""
        parts: list[str] = [self.executable, self.directory, *self.sys_path, "", ""]
        parts += [*self.preload, "", "", *self.flags, "", ""]
        if self.preload:
            parts += [*self.argv, "", ""]  # the user's modules may parse them
        for name, value in sorted(self.environ.items()):
            if name not in VOLATILE:
                parts += [name, value]
        joined = "\0".join(parts).encode("utf-8", "surrogateescape")
        from hashlib import blake2b  # late: most programs never join a node

        return blake2b(joined, digest_size=8).hexdigest()


class ZygoteConfig(NamedTuple):
    """The configuration that all zygotes of a node share, fixed when the node starts.

    Later generations start with the same environment, path and directory as the first,
    even if the program has changed its own since.

    Attributes:
        directory: the directory of the node's sockets and pipes.
        page: descriptor of the control page.
        place: descriptor of the working directory; None if this process may not enter
            it.
        cgroup: the node's cgroup, chosen before the first start.
        learns: workers report their imports.
        spill: directory for values beyond the memory limit, "" for the default.
        seed: PYTHONHASHSEED of all zygotes, unless the user has set it.
        own: the node's own program; `launch` fills in interpreter and options.
        programs: the programs that have joined, by key; each has its own zygotes.
    """

    directory: NodeDirectory
    page: int
    place: int | None
    cgroup: NodeCgroup
    learns: bool
    spill: str
    seed: str
    own: ProgramEnvironment
    programs: dict[str, ProgramEnvironment]

    @classmethod
    def take(
        cls,
        directory: NodeDirectory,
        cgroup: NodeCgroup,
        learns: bool,
        spill: str = "",
    ) -> ZygoteConfig:
        """Record the current state of this process, with a new control page.

        Raises:
            NodeStartError: there is no shared memory.
        """
        try:
            page = ControlPage.create()
        except OSError as error:
            from aiogpu.linux.denied import why_refused

            why = why_refused("memfd_create", "3.17", error)
            raise NodeStartError(f"the node gets no shared memory: {why}") from error
        try:
            place = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            place = None
        # Python ignores entries that are no strings, such as a `Path`.
        sys_path = [str(path) for path in sys.path if isinstance(path, str)]
        working = "" if place is None else f"/proc/self/fd/{place}"
        own = ProgramEnvironment(
            "", sys_path, working, dict(os.environ), argv=arguments()
        )
        # 0 would make hashes predictable.
        seed = str(int.from_bytes(os.urandom(4), "little") or 1)
        return cls(directory, page, place, cgroup, learns, spill, seed, own, {})

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.page)
        if self.place is not None:
            os.close(self.place)


def program_of(environment: Iterable[tuple[str, str]]) -> str:
    """Return the key of the program to which these variables belong, "" for none."""
    return next((value for name, value in environment if name == PROGRAM), "")


def program_variables(environment: Environment) -> Environment:
    """Return the variables of the program to which these variables belong."""
    return tuple(pair for pair in environment if is_of_program(pair[0]))


_EMBEDS: Final = (
    "this program embeds Python and sys.executable is empty; set it to a Python "
    "interpreter that can import aiogpu."
)


_BOOT: Final = """
import gc, sys
gc.disable()
del __file__
sys.path[:] = fields["sys_path"]
from aiogpu.worker.zygote.main import main
main(fields)
"""
"""The program of a zygote, after a line that assigns its fields. `__file__` would be
<stdin>, which multiprocessing tries to open."""


def start_interpreter(
    fields: dict[str, object],
    page: int,
    output: int,
    environ: Mapping[str, str] | None = None,
    directory: str | None = None,
    executable: str | None = None,
    flags: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that calls `aiogpu.worker.zygote.main.main(fields)`.

    The program is sent on standard input. Any user can read a command line, and
    debuggers and profilers (pydevd, viztracer) rewrite the command lines of Python
    programs that are named on them, so that these run under the debugger.

    Args:
        fields: plain values that have literals.
        page: descriptor that the child inherits under the same number.
        output: descriptor that becomes stdout and stderr.
        environ: the environment variables; default: as in this process.
        directory: the working directory; default: as in this process.
        executable: the interpreter; default: as in this process.
        flags: command-line options of the interpreter.

    Raises:
        NodeStartError: there is no interpreter, or it cannot be started.
    """
    executable = executable or sys.executable
    if not executable:
        raise NodeStartError(_EMBEDS)
    source = -1
    try:
        source = os.memfd_create("aiogpu-setup", os.MFD_CLOEXEC)
        os.write(source, f"fields = {fields!a}{_BOOT}".encode())
        os.lseek(source, 0, os.SEEK_SET)
        return subprocess.Popen(
            interpreter_command(executable, "-", flags=flags),
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


def is_script(executable: str) -> bool:
    """Return whether an interpreter is a script that starts another one."""
    try:
        with open(executable, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def fitting(
    flags: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]
) -> Sequence[str]:
    """Adapt the options of an interpreter to other environment variables.

    Options take precedence over variables, so -W is dropped if `PYTHONWARNINGS` has
    changed.

    Args:
        flags: the options.
        before: the variables that the options were made for.
        now: the variables of the interpreter.
    """
    own = now.get("PYTHONWARNINGS")
    if own is None or own == before.get("PYTHONWARNINGS"):
        return flags
    return [flag for flag in flags if not flag.startswith("-W")]


HASH_SEED: Final = "PYTHONHASHSEED"


_IGNORING: Final = ("-E", "-I")
"""Options for which Python ignores its variables, the hash seed among them."""


def start_variables(
    variables: Mapping[str, str], flags: Sequence[str], seed: str
) -> dict[str, str]:
    """Return the variables that an interpreter with these options is started with.

    Text has equal hashes in processes with equal seeds, and only a variable sets the
    seed. So Python's variables are left out, instead of ignored.

    Args:
        variables: the variables of its program.
        flags: the options.
        seed: the hash seed, unless the variables set it.
    """
    started = dict(variables)
    if not set(flags).isdisjoint(_IGNORING):
        started = {k: v for k, v in variables.items() if not k.startswith("PYTHON")}
    if started.get(HASH_SEED, "") in ("", "random"):
        started[HASH_SEED] = seed
    return started


PER_ZYGOTE: Final = 6
"""Descriptors that a zygote needs in addition to its pipe: two for its life, and four
to start."""


class Modules(NamedTuple):
    """The modules that a zygote imports.

    Attributes:
        preload: modules that the user has named.
        added: modules that a branch imports in addition to its parent's.
    """

    preload: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


class Launched(NamedTuple):
    """A zygote process that has just been started.

    Attributes:
        child: the process.
        output: descriptor of the read end of its output.
    """

    child: subprocess.Popen[bytes]
    output: int


def launch(
    config: ZygoteConfig,
    generation: int = 0,
    environment: Sequence[tuple[str, str]] = (),
    preload: Sequence[str] = (),
) -> Launched:
    """Start a zygote.

    Args:
        config: the configuration that all zygotes of the node share.
        generation: the number.
        environment: variables that it starts with, in addition to the program's.
        preload: modules that it imports before it forks.

    Raises:
        NodeStartError: there is no interpreter, or it cannot be started; or the node's
            directory was removed and cannot be made anew.
    """
    config.directory.check()
    own = dict(environment)
    program = config.programs.get(program_of(environment))
    if program is None:
        program = config.own._replace(
            executable=sys.executable, flags=interpreter_flags()
        )
    first = own["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in own else ()
    variables = {**program.environ, **own}
    flags = fitting(program.flags, program.environ, variables)
    started = start_variables(variables, flags, config.seed)
    # A zygote of several programs takes on the arguments of none.
    argv = program.argv if program.preload or not program_of(environment) else ("",)
    setup = Setup(
        sys_path=[*first, *program.sys_path],
        node=os.path.basename(config.directory.path),
        directory=config.directory.path,
        driver=os.getpid(),
        page=config.page,
        preload=list(preload),
        cgroup=config.cgroup.path,
        generation=generation,
        learns=config.learns,
        spill=config.spill,
        argv=tuple(argv),
        flags=tuple(flags),
        environ=tuple(
            (name, variables.get(name))
            for name in {**variables, **started}
            if variables.get(name) != started.get(name)
        ),
    )
    reading, writing = _open_pipe()
    try:
        child = start_interpreter(
            setup._asdict(),
            config.page,
            writing,
            started,
            program.directory or None,
            program.executable,
            [flag for flag in flags if flag not in _IGNORING],
        )
    except NodeStartError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Launched(child, reading)


def _open_pipe() -> tuple[int, int]:
    """Open a pipe for a zygote's output, if enough descriptors are left to accept it.

    A zygote whose connection cannot be accepted would wait forever.
    """
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # The kernel returns the lowest free numbers.
        if writing + PER_ZYGOTE >= soft_limit():
            os.close(reading)
            os.close(writing)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    except OSError as error:
        raise NodeStartError(f"no pipe for the zygote's output: {error}") from error
    return reading, writing


class Bootstrap:
    """The first parts of a node: directory, socket, configuration and first zygote.

    Attributes:
        config: the configuration that all zygotes of the node share.
        listening: the node's socket; processes that connect early wait.
        preload: modules that each zygote imports before it forks.
        first: the first zygote.
    """

    def __init__(
        self,
        cgroup: NodeCgroup,
        preload: Sequence[str],
        learns: bool,
        spill: str = "",
    ) -> None:
        """Make the directory and the socket, and start the zygote.

        Args:
            cgroup: the node's cgroup; its path is chosen here.
            preload: modules that the zygote imports before it forks.
            learns: workers report their imports.
            spill: directory for values beyond the memory limit, "" for the default.

        Raises:
            NodeStartError: there is no place for the directory, no shared memory, or no
                interpreter.
        """
        directory = NodeDirectory(create_directory())
        with ExitStack() as undo:
            undo.callback(directory.remove)
            cgroup.choose(os.path.basename(directory.path))
            listening = directory.listen(socket_path(directory.path))
            self.listening = undo.enter_context(listening)
            self.config = ZygoteConfig.take(directory, cgroup, learns, spill)
            undo.callback(self.config.close)
            self.preload = tuple(preload)
            self.first = launch(self.config, preload=self.preload)
            self._undo = undo.pop_all()

    def clear(self) -> None:
        """Undo the start, if the node fails to start."""
        # Kill the zygote last: if this process is killed before, the zygote cleans up.
        self._undo.close()
        self.first.child.kill()
        self.first.child.wait()
        os.close(self.first.output)
