"""The zygote: imports once, stays fit to be forked, and forks keepers on request.

After each import it checks that it may fork (see `preload`). Its death ends no running
worker. The driver's death ends the zygote, which then removes the node's directory.

A zygote also forks branches: zygotes that import further modules. A branch shares the
memory of its parent's imports, and pays for none of them again. The parent stays until
its branches have ended, since only a parent learns how its child ended.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import end_node, end_slot, fork_into_slot, remove_closed_node
from aiogpu.linux.sockets import keep_pages
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.connection import ZYGOTE
from aiogpu.wire.messages import (
    Branch,
    BranchEnded,
    Check,
    Keep,
    Lost,
    Ready,
    Setup,
    Stale,
    Unfit,
    socket_path,
)
from aiogpu.worker.environment import Threads
from aiogpu.worker.private_hooks import (
    forget_exit_functions,
    leave_resource_trackers,
    resource_trackers,
    run_exit_functions,
    set_interpreter_flag,
)
from aiogpu.worker.zygote.bootstrap import WorkerTemplate, nothing
from aiogpu.worker.zygote.keeper import (
    Keeper,
    Watch,
    end_children,
    is_served,
    remove_directory,
)
from aiogpu.worker.zygote.preload import Files, Imports, Preload, unfit_to_fork

KEEPER_LIMIT: Final = 1.5
"""Seconds after the driver's end until keepers are killed."""


SCARCE: Final = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors for exhausted resources, which other processes may free."""

GIVEN_UP: Final = frozenset(
    (errno.ENOENT, errno.ENXIO, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
)
"""Errors of a keeper or a branch after the driver has dropped its slot or has closed:
the pipes have no name or no reader, and no process listens at the socket."""


class Zygote:
    """The zygote of one node; made in a fresh interpreter."""

    def __init__(
        self,
        setup: Setup,
        problem: str = "",
        customize: Callable[[], None] = nothing,
    ) -> None:
        """Connect to the driver.

        Args:
            setup: the configuration.
            problem: why this process may not be forked, "" if it may.
            customize: start-up code of Python that each worker runs first.
        """
        self._setup = setup
        self._problem = problem
        self._customize = customize
        self._keepers: dict[int, int] = {}
        self._branches: dict[int, int] = {}
        self._strays: set[int] = set()
        self._lost: dict[int, set[int]] = {}
        # Of shared memory and semaphores that preloaded modules have created.
        self._trackers: set[int] = set()
        self._threads = Threads()
        self._imports = Imports()
        driver = self._watch_driver()
        kernel.set_process_name("aiogpu-zygote")
        # The driver's signal mask is inherited; SIGCHLD must not be blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        kernel.adopt_orphans()
        self._template: WorkerTemplate
        self._page = ControlPage.open(setup.page)
        os.close(setup.page)
        path = socket_path(setup.directory)
        try:
            self._watch = Watch(ZYGOTE, setup.generation, path, driver)
        except OSError:
            self._leave_early()
            if is_served(path):
                raise  # the driver lives, and has refused this process
            # The driver has closed the node before it knew this process; or it is
            # dying, and its sockets close before this process gets another parent.
            self._clear_up()
            sys.exit(0)

    def _watch_driver(self) -> int:
        """Return a pidfd of the driver; end this process if the driver has died."""
        kernel.resume_with_parents_end()
        try:
            driver = os.pidfd_open(self._setup.driver)
        except ProcessLookupError:
            driver = -1
        self._leave_early()  # another process may have the number now
        return driver

    def _leave_early(self) -> None:
        """Clean up and exit if the driver died before it knew this process."""
        if os.getppid() != self._setup.driver:
            self._clear_up()
            sys.exit(0)

    def _clear_up(self) -> None:
        """Kill the node's processes, and remove its directory and its cgroup."""
        end_node(self._setup.cgroup)
        remove_directory(self._setup.directory)

    def run(self) -> None:
        """Preload, then fork keepers until the driver closes or dies."""
        # Late: it imports `logging`, which takes milliseconds.
        from aiogpu.worker.zygote.log_records import handle_records

        began = time.time_ns()
        handle_records()
        watch = self._watch
        ready = None
        if self._problem:
            watch.send(Unfit("", self._problem, False))
        else:
            preload = Preload(watch.send)
            ready = preload.begin(self._setup, watch.leave, watch.driver)
        if ready is not None:
            keep_pages()
            if self._setup.learns:
                self._imports.watch()
            self._serve(ready, began)
        # The driver of an unfit zygote waits for the zygote's end.
        self._end(0.0 if ready is None else 2.0)

    def _end(self, patience: float) -> None:
        """Disconnect; clean up if the driver ends within `patience` seconds."""
        watch = self._watch
        watch.close()
        if watch.is_asked:
            remove_closed_node(self._setup.directory, self._setup.cgroup)
        elif watch.driver_has_left(patience):
            self._clear_up()

    def _serve(self, ready: Ready, began: int) -> None:
        files = Files(began)
        self._threads.scan()
        self._threads.begin_with_one()
        self._template = WorkerTemplate(
            self._setup,
            self._page,
            self._imports,
            self._threads,
            self._customize,
        )
        if ready.microseconds:
            gc.collect()  # aiogpu alone leaves 0.3 MB of garbage, which all forks share
        gc.freeze()
        self._trackers = {tracker._pid for tracker in resource_trackers()}
        self._imports.found.clear()  # else each fork would report them as its own
        self._watch.send(ready)
        while not self._watch.is_over:
            for message in self._watch.wait():
                if isinstance(message, Keep):
                    self._fork(message.slot)
                elif isinstance(message, Branch):
                    self._branch(message)
                elif isinstance(message, Check):
                    self._check(files)
            self._reap()
        self._wait_for_children()

    def _branch(self, order: Branch) -> None:
        """Fork a zygote that imports further modules and then serves."""
        try:
            pid = os.fork()
        except OSError as error:
            reason = kernel.why_not_forked(error)
            self._watch.send(BranchEnded(order.generation, 0, reason))
            return
        if pid:
            self._branches[pid] = order.generation
            return
        status = 1
        try:
            status = self._begin_branch(order)
        except BaseException as error:  # noqa: BLE001 - the fork must not return
            if getattr(error, "errno", None) not in GIVEN_UP:
                sys.excepthook(*sys.exc_info())
        finally:
            _leave(status)

    def _begin_branch(self, order: Branch) -> int:
        """Run a branch, in its process, until the driver closes or dies."""
        began = time.time_ns()
        parent = os.getppid()
        self._watch.leave()
        self._keepers.clear()
        self._branches.clear()
        self._lost.clear()
        self._strays.clear()
        if self._trackers:
            # The parent keeps them; this process has trackers of its own.
            leave_resource_trackers()
            self._trackers.clear()
        forget_exit_functions()  # the parent calls them
        kernel.adopt_orphans()  # a fork does not inherit this (prctl(2))
        path = socket_path(self._setup.directory)
        self._watch = Watch(ZYGOTE, order.generation, path, self._watch.driver)
        ready = Preload(self._watch.send).extend(order.modules)
        if ready is not None:
            self._serve(ready, began)
        if os.getppid() == parent:
            self._watch.close()  # the parent cleans up
        else:
            self._end(2.0)
        return 0

    def _check(self, files: Files) -> None:
        modules = files.edited()
        if modules:
            self._watch.send(Stale(modules[0]))

    def _fork(self, slot: int) -> None:
        try:
            pid = fork_into_slot(self._setup.cgroup, slot)
        except OSError as error:
            self._watch.send(Lost(slot, kernel.why_not_forked(error)))
            return
        if pid == 0:
            try:
                self._watch.leave()
                # Here and not in the worker, where it would take each worker's time.
                forget_exit_functions()
                if self._trackers:
                    # A worker has a tracker of its own, which ends with it.
                    leave_resource_trackers()
                for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
                    kernel.set_default_handler(number)
                begin = self._template.begin
                Keeper(slot, self._setup, self._watch.driver, begin).run()
            except BaseException as error:  # noqa: BLE001 - the fork must not return
                if getattr(error, "errno", None) not in GIVEN_UP:
                    sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        self._keepers[pid] = slot

    def _reap(self) -> None:
        """Handle keepers that have died, and kill the processes that they left.

        A slot is lost when the processes have ended that came while its keeper died.
        So a process that SIGKILL does not end delays no other slot.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._trackers.discard(pid)
            if pid in self._branches:
                self._watch.send(BranchEnded(self._branches.pop(pid), status))
            elif pid in self._keepers:
                slot = self._keepers.pop(pid)
                end_slot(self._setup.cgroup, slot)
                self._lost[slot] = set()
        own = self._keepers.keys() | self._branches.keys() | self._trackers
        strays = {pid for pid in kernel.children() if pid not in own}
        for pid in strays:
            kernel.kill(pid)
        new, self._strays = strays - self._strays, strays
        for slot, before in list(self._lost.items()):
            self._lost[slot] = left = (before | new) & strays
            if not left:
                self._watch.send(Lost(slot))
                del self._lost[slot]

    def _wait_for_children(self) -> None:
        """Give keepers and branches a moment to end; then kill all but trackers."""
        deadline = time.monotonic() + KEEPER_LIMIT
        while self._has_children and time.monotonic() < deadline:
            self._reap()
            if self._has_children:
                self._watch.wait_for_child(deadline - time.monotonic())
        end_children(spared=self._trackers)

    @property
    def _has_children(self) -> bool:
        return bool(self._keepers or self._branches)


def main(fields: dict[str, object]) -> None:
    """Run the zygote until the node closes or the driver dies.

    Args:
        fields: the values of `Setup`, by name.
    """
    status = 0
    try:
        setup = Setup(**fields)  # type: ignore[arg-type]
        problem = ""
        customize: Callable[[], None] = nothing
        if unfit_to_fork() or sys.flags.no_site:
            # Late: most environments have no code that prevents a fork.
            from aiogpu.worker.zygote.start_up import postpone

            problem, customize = postpone(setup.flags)
        _become_like_program(setup)
        Zygote(setup, problem, customize).run()
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno not in SCARCE:
            raise
        # The driver tries again later, when the resource may be free.
        sys.excepthook(*sys.exc_info())
        status = os.EX_TEMPFAIL
    _leave(status)


def _become_like_program(setup: Setup) -> None:
    """Give this interpreter the program's path, arguments, variables and flags."""
    sys.path[:] = setup.sys_path
    sys.argv[:] = setup.argv
    for name, value in setup.environ:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    is_isolated = "-I" in setup.flags
    set_interpreter_flag("isolated", is_isolated)
    set_interpreter_flag("ignore_environment", is_isolated or "-E" in setup.flags)
    set_interpreter_flag("safe_path", "-P" in setup.flags)
    set_interpreter_flag("no_site", "-S" in setup.flags)


def _leave(status: int) -> NoReturn:
    """Exit after the exit functions of imported modules and a flush.

    The interpreter's own finalisation does not free frozen objects, and some libraries
    print objects that were not freed: nanobind thirty lines if torch was loaded.
    """
    try:
        run_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
        if status == 0:
            # Only trackers are left. After the exit functions, which may use them.
            leave_resource_trackers()
            end_children()
    finally:
        os._exit(status)
