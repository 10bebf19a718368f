"""`aiogpu start --head` and `aiogpu stop`: a node that all programs of a user share.

Options have Ray's names if they mean the same. `aiogpu.daemon` is the node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click

from aiogpu.api.node import check_node_options
from aiogpu.cli import connect
from aiogpu.cli.connect import Command, Number, Seconds, Whole, size
from aiogpu.core.model.text import span, terms
from aiogpu.daemon.place import Place, Record, how_to_use
from aiogpu.daemon.process import DRAIN, Plan
from aiogpu.daemon.readiness import Ready
from aiogpu.daemon.start import start_detached, unit
from aiogpu.daemon.stop import stop as stop_node

FOREIGN: Final = click.Choice(["ignore", "avoid", "wait"])
SWITCH: Final = click.Choice(["auto", "off"])
PATH: Final = click.Path(readable=False)
"""Not checked here: later errors say what to do."""
NO_HEAD: Final = (
    "write `aiogpu start --head`: it starts the node of this machine. Programs join "
    "that node by aiogpu.init(address='auto')."
)


def option(
    names: str, text: str, default: Any = None, **more: Any
) -> Callable[[Command], Command]:
    """An option; the help shows its default, if it has one."""
    if default is not None:
        more |= {"default": default, "show_default": True}
    return click.option(*names.split(), help=text, **more)


OPTIONS: Final = (
    option("--num-cpus", "CPUs to share out.", type=Number(min=0)),
    option(
        "--num-gpus",
        "GPUs to share out; by default those detected.",
        type=Whole(min=0),
    ),
    option("--resources", """Others: '{"license": 2}'.""", metavar="JSON"),
    option("--memory", "Main memory for tasks that ask: 64GiB.", type=size),
    option(
        "--object-memory --object-store-memory object_memory",
        "Shared memory for large values, such as 8GiB.",
        type=size,
    ),
    option("--spill-directory", "Where values go beyond that.", type=PATH),
    option("--accelerator-type", "Type of GPUs that were not detected: A100."),
    option("--gpu-memory", "Memory of each such GPU: 80GiB.", type=size),
    option(
        "--gpu-memory-enforce",
        "End tasks that use more GPU memory than they asked for.",
        is_flag=True,
    ),
    option(
        "--foreign",
        "GPUs that processes outside of aiogpu use: ignore that, avoid the GPUs, or "
        "wait until the processes have ended.",
        "ignore",
        type=FOREIGN,
    ),
    option(
        "--mps", "NVIDIA's Multi-Process Service for shared GPUs.", "off", type=SWITCH
    ),
    option(
        "--cpu-affinity",
        "Whether GPU tasks run on the CPUs near their GPU.",
        "auto",
        type=SWITCH,
    ),
    option(
        "--preload",
        "Modules that workers are forked with, by commas; auto: those slow to import.",
        multiple=True,
        metavar="MODULES",
    ),
    option(
        "--cancel-grace",
        "Seconds that cancelled work has to stop.",
        2.0,
        type=Seconds(min=0, min_open=True),
    ),
    option("--spare-workers", "Clean workers that stand ready.", 2, type=Whole(min=0)),
    option(
        "--memory-guard/--no-memory-guard",
        "End a task that fills the memory, before the kernel ends something.",
        True,
    ),
)
"""The options of `aiogpu.init`, with the names of Ray's command."""


def options(command: Command) -> Command:
    """Give a command all `OPTIONS`."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@option("--head", "Start the node of this box; there is no other kind.", is_flag=True)
@options
@option("--socket", "Where it listens, such as a place for a second node.", type=PATH)
@option("--log-dir", "Where its logs go, if not beside the socket.", type=PATH)
@option(
    "--drain",
    "Seconds for running tasks when it is asked to stop.",
    DRAIN,
    type=Seconds(0),
)
@option(
    "--metrics",
    "Serve Prometheus metrics on this port of 127.0.0.1 (pip install "
    "'aiogpu[metrics]').",
    type=Whole(1, 65535),
    metavar="PORT",
)
@option(
    "--max-waiting",
    "Unfinished tasks that one program may have; more are refused by LimitError.",
    type=Whole(1),
    metavar="N",
)
@option(
    "--max-share",
    "What one program may hold of a resource: '{\"GPU\": 0.5}' for half. More waits.",
    metavar="JSON",
)
@option(
    "--block", "Stay in the foreground; Ctrl-C stops it, twice at once.", is_flag=True
)
@option("--systemd", "Print a user unit, and start nothing.", is_flag=True)
def start(
    head: bool,
    socket: str | None,
    log_dir: str | None,
    drain: float,
    metrics: int | None,
    max_waiting: int | None,
    max_share: str | None,
    block: bool,
    systemd: bool,
    **given: Any,
) -> None:
    """Start a node that all your programs on this machine share.

    They join it by aiogpu.init(address="auto"). It is ready when this command ends,
    and runs in the background until `aiogpu stop`. The exit code is 1 if it could not
    start.

    \b
    Examples:
      aiogpu start --head --num-gpus=2
      aiogpu start --head --max-waiting 10000 --max-share '{"GPU": 0.5}'
      aiogpu start --head --systemd > ~/.config/systemd/user/aiogpu.service
    """  # noqa: D301 - click's mark for lines to be left as they are
    if not head:
        raise click.UsageError(NO_HEAD)
    for option, path in (("--socket", socket), ("--log-dir", log_dir)):
        if path == "":
            raise click.BadParameter("it is empty.", param_hint=option)
    given["resources"] = amounts(given["resources"], "--resources", '{"license": 2}')
    modules = tuple(
        name for names in given["preload"] for name in names.split(",") if name
    )
    given["preload"] = modules if given["preload"] else "auto"
    plan = Plan(
        check_node_options(**given, log_to_driver=True),
        Place.at(socket, log_dir),
        drain,
        import_path(),
        metrics,
        max_waiting,
        amounts(max_share, "--max-share", '{"GPU": 0.5}') or {},
    )
    _ = plan.limits  # raises for an invalid limit, before the node is started
    if systemd:
        check_absolute(socket, log_dir, given["spill_directory"])
        click.echo(unit_of(plan), nl=False)
    elif block:
        from aiogpu.daemon.process import run_here

        run_here(plan, print_ready)
    else:
        print_ready(start_detached(plan))


def check_absolute(*paths: str | None) -> None:
    """Refuse relative paths: a service starts in another directory."""
    for path in paths:
        if path is not None and not os.path.isabs(path):
            raise click.UsageError(
                f"a service starts in another directory than this one, so with "
                f"--systemd paths begin with a slash: {os.path.abspath(path)} instead "
                f"of {path}."
            )


def amounts(text: str | None, option: str, example: str) -> dict[str, Any] | None:
    """Amounts by name, None if not given; the names are checked later."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise click.BadParameter(
            f"{text!r} is no JSON object of names and amounts; write it as "
            f"'{example}', in single quotes for the shell.",
            param_hint=option,
        )
    return found


def import_path() -> tuple[str, ...]:
    """Return the import path of this process, as absolute paths."""
    found = []
    for path in sys.path:
        with suppress(OSError):  # it is relative to a directory that was removed
            found.append(os.path.abspath(path))
    return tuple(found)


def print_ready(ready: Ready) -> None:
    """Print how to use the node; a closed terminal is not an error."""
    with suppress(OSError):
        click.echo("\n".join(ready_lines(ready)))


def ready_lines(ready: Ready) -> list[str]:
    """The lines that are printed after a start."""
    address, stop = how_to_use(ready.socket)
    return [
        f"The node runs: pid {ready.pid}, {terms(ready.resources.items())}.",
        f"  address  {ready.socket}",
        f"  logs     {ready.logs}",
        f'  join     aiogpu.init(address="{address}"), or AIOGPU_ADDRESS={address}',
        f"  stop     {stop}",
    ]


def unit_of(plan: Plan) -> str:
    """A systemd unit for the given command, in the foreground."""
    given = [word for word in sys.argv[1:] if word not in ("--systemd", "--block")]
    return unit(
        [sys.executable, "-m", "aiogpu", *given, "--block"],
        os.environ,
        opens_within=plan.opens_within,
        ends_within=plan.drain + plan.ends_within,
    )


@click.command()
@connect.service_option
@click.option("--force", is_flag=True, help="Kill it, with everything that runs on it.")
@click.option(
    "--drain",
    type=Seconds(0),
    help="Seconds for running tasks; by default those of `aiogpu start`.",
)
def stop(address: str, force: bool, drain: float | None) -> None:
    """Stop the node that `aiogpu start` has started.

    It takes no new work, gives running tasks time to end, then ends them. A second
    `aiogpu stop` ends it at once. The exit code is 0 if no node runs afterwards.
    """
    if force and drain is not None:
        raise click.UsageError("--force leaves no time for --drain; give one of them.")
    place = Place.at(connect.socket_path(address))
    ended = stop_node(place, force=force, drain=drain, on_wait=_print_wait)
    if ended is None:
        click.echo(f"No node runs at {place.socket}.")
        return
    how = "Killed" if ended.is_forced else "Stopped"
    click.echo(
        f"{how} the node at {ended.record.socket} (pid {ended.record.pid}) in "
        f"{span(ended.seconds)}."
    )


def _print_wait(record: Record, seconds: float) -> None:
    click.echo(
        f"Stopping the node at {record.socket} (pid {record.pid}); what runs has "
        f"{span(seconds)} to end.",
        err=True,
    )
