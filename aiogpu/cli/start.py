"""`aiogpu start --head` and `aiogpu stop`: a node that all programs of a user share.

Options with the same meaning as in Ray have Ray's names. `aiogpu.daemon` is the node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import click

from aiogpu.api.node import FOREIGN, InitOptions, check_node_options
from aiogpu.api.options import Option
from aiogpu.cli import connect
from aiogpu.cli.connect import Command, Number, Seconds, Whole, size
from aiogpu.cli.terminal import echo
from aiogpu.core.model.text import span, terms
from aiogpu.daemon.place import Place, Record, how_to_use
from aiogpu.daemon.process import DRAIN, Plan
from aiogpu.daemon.readiness import Ready
from aiogpu.daemon.start import start_detached, unit
from aiogpu.daemon.stop import stop as stop_node
from aiogpu.linux.interpreter import interpreter_command

SWITCH: Final = click.Choice(["auto", "off"])
PATH: Final = click.Path(readable=False)
"""A path that click does not check, because later errors say more."""
NO_HEAD: Final = (
    "write `aiogpu start --head`, which starts the node of this machine. Programs join "
    "it by aiogpu.init(address='auto')."
)


NAMES: Final = {
    "object_memory": "--object-memory --object-store-memory object_memory",
}
"""Names of flags besides that of the option: Ray's."""
BY_TYPE: Final[Mapping[str, Mapping[str, Any]]] = {
    "float | None": {"type": Number(min=0)},
    "int | None": {"type": Whole(min=0)},
    "int": {"type": Whole(min=0)},
    "int | str | None": {"type": size},
}
"""How flags of a type are parsed; the others are texts."""
BY_NAME: Final[Mapping[str, Mapping[str, Any]]] = {
    "resources": {"metavar": "JSON"},
    "spill_directory": {"type": PATH},
    "foreign": {"type": click.Choice(FOREIGN)},
    "mps": {"type": SWITCH},
    "cpu_affinity": {"type": SWITCH},
    "preload": {"multiple": True, "metavar": "MODULE,...", "default": ()},
    "cancel_grace": {"type": Seconds(min=0, min_open=True)},
}
"""How flags are parsed whose types do not say it."""


def option(
    names: str, text: str, default: Any = None, **settings: Any
) -> Callable[[Command], Command]:
    """Return a click option; the help shows its default, if it has one."""
    if default is not None:
        settings |= {"default": default, "show_default": True}
    return click.option(*names.split(), help=text, **settings)


def flag_of(row: Option[Any], text: str) -> Callable[[Command], Command]:
    """Return the flag of an option of `init`, whose help is the option's text."""
    name = row.name.replace("_", "-")
    settings = {"default": row.default, **BY_TYPE.get(row.type, {})}
    names = NAMES.get(row.name, f"--{name}")
    if row.default is True:
        names = f"--{name}/--no-{name}"
    elif row.default is False:
        settings["is_flag"] = True
    settings |= BY_NAME.get(row.name, {})
    text = text.replace("`", "")
    return click.option(*names.split(), help=text[:1].upper() + text[1:], **settings)


def options(command: Command) -> Command:
    """Give a command the flags of the options of `init` that a shared node has."""
    docs = InitOptions.docs("node")
    for name, row in reversed([*InitOptions.taken_by("start").items()]):
        command = flag_of(row, docs[name])(command)
    return command


@click.command()
@option("--head", "Start the node of this machine (required).", is_flag=True)
@options
@option("--socket", "Socket of the node, for example of a second node.", type=PATH)
@option("--log-dir", "Directory for logs; default beside the socket.", type=PATH)
@option(
    "--drain",
    "Seconds that running tasks have to end when the node is stopped.",
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
    "Largest fraction of a resource that one program may hold: '{\"GPU\": 0.5}' for "
    "half. Tasks beyond it wait.",
    metavar="JSON",
)
@option(
    "--block",
    "Stay in the foreground. Ctrl-C stops the node; a second Ctrl-C ends it at once.",
    is_flag=True,
)
@option("--systemd", "Print a systemd user unit, and start nothing.", is_flag=True)
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

    Programs join it by aiogpu.init(address="auto"). The node is ready when this command
    ends, and runs in the background until `aiogpu stop`. The exit code is 1 if the node
    could not start.

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
        check_node_options(given),
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
        echo(unit_of(plan).rstrip("\n"))
    elif block:
        from aiogpu.daemon.process import run_here

        run_here(plan, print_ready)
    else:
        print_ready(start_detached(plan))


def check_absolute(*paths: str | None) -> None:
    """Refuse relative paths, because systemd starts a service in another directory."""
    for path in paths:
        if path is not None and not os.path.isabs(path):
            raise click.UsageError(
                f"with --systemd a path must be absolute, because the service starts "
                f"in another directory: write {os.path.abspath(path)} instead of "
                f"{path}."
            )


def amounts(text: str | None, option: str, example: str) -> dict[str, Any] | None:
    """Parse amounts by name; return None if not given. Names are checked later."""
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except ValueError as error:
        parsed = error
    if not isinstance(parsed, dict):
        raise click.BadParameter(
            f"{text!r} is not a JSON object of names and amounts; write one such as "
            f"'{example}', in single quotes for the shell.",
            param_hint=option,
        )
    return parsed


def import_path() -> tuple[str, ...]:
    """Return the import path of this process, as absolute paths."""
    absolute = []
    for path in sys.path:
        with suppress(OSError):  # relative to a directory that was removed
            absolute.append(os.path.abspath(path))
    return tuple(absolute)


def print_ready(ready: Ready) -> None:
    """Print how to use the node; a closed terminal is not an error."""
    with suppress(OSError):
        echo("\n".join(ready_lines(ready)))


def ready_lines(ready: Ready) -> list[str]:
    """Return the lines that are printed after a start."""
    address, stop = how_to_use(ready.socket)
    return [
        f"The node runs: pid {ready.pid}, {terms(ready.resources.items())}.",
        f"  address  {ready.socket}",
        f"  logs     {ready.logs}",
        f'  join     aiogpu.init(address="{address}"), or AIOGPU_ADDRESS={address}',
        f"  stop     {stop}",
    ]


def unit_of(plan: Plan) -> str:
    """Return a systemd unit that runs this command in the foreground."""
    given = [word for word in sys.argv[1:] if word not in ("--systemd", "--block")]
    return unit(
        interpreter_command(sys.executable, "-m", "aiogpu", *given, "--block"),
        os.environ,
        opens_within=plan.opens_within,
        ends_within=plan.drain + plan.ends_within,
    )


@click.command()
@connect.service_option
@click.option("--force", is_flag=True, help="Kill the node and all its tasks at once.")
@click.option(
    "--drain",
    type=Seconds(0),
    help="Seconds that running tasks have to end; default as given to `aiogpu start`.",
)
def stop(address: str, force: bool, drain: float | None) -> None:
    """Stop the node of `aiogpu start`.

    The node accepts no new tasks, gives running tasks time to end, then ends them. A
    second `aiogpu stop` ends the node at once. The exit code is 0 if no node runs
    afterwards.
    """
    if force and drain is not None:
        raise click.UsageError("--force and --drain exclude each other: give one.")
    place = Place.at(connect.socket_path(address))
    ended = stop_node(place, force=force, drain=drain, on_wait=_print_wait)
    if ended is None:
        echo(f"No node runs at {place.socket}.")
        return
    how = "Killed" if ended.is_forced else "Stopped"
    echo(
        f"{how} the node at {ended.record.socket} (pid {ended.record.pid}) in "
        f"{span(ended.seconds)}."
    )


def _print_wait(record: Record, seconds: float) -> None:
    echo(
        f"Stopping the node at {record.socket} (pid {record.pid}); running tasks have "
        f"{span(seconds)} to end.",
        err=True,
    )
